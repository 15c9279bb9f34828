"""One rank that runs families at layouts with the real ModelEngine and says how far each is from transformers.

Its argument is a file with a `numerics.Plan`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from safetensors.torch import load_file
from torch import Tensor

import megarl.model_engine.heads as heads_module
from megarl.config import ExpertBalance, Layout, Model, ModelShape, Optimizer, read_model_shape
from megarl.model_engine import Metrics, MicroBatch, ModelEngine, TokenSequence, build, specification
from megarl.model_engine.modules import RMSNorm
from megarl.runtime import ControlPlane, connect, init_process_groups, rank_info
from megarl.weights import HfReader
from tests.distributed import numerics
from tests.distributed.hf_routing import Routing, read_experts
from tests.distributed.payload_sft import share_buckets

DEADLINE_S = 240.0
CPU = torch.device("cpu")
OPTIMIZER = Optimizer(  # that the references were made with
    learning_rate=numerics.LEARNING_RATE,
    betas=numerics.BETAS,
    epsilon=numerics.EPSILON,
    clip=numerics.CLIP,
    weight_decay=numerics.WEIGHT_DECAY,
)
_projected: list[tuple[Tensor, Tensor]] = []
_token_logprobs = heads_module.token_logprobs


def _recording(hidden: Tensor, weight: Tensor, *arguments: Any, **others: Any) -> Any:
    """The engine itself never has logits; these are what it would make them of."""
    _projected.append((hidden.detach(), weight.detach()))
    return _token_logprobs(hidden, weight, *arguments, **others)


def main(file: str) -> None:
    heads_module.token_logprobs = _recording
    run(file, lambda directory, layout, control, _: compare(directory, layout, control))


def run(file: str, compare_one: Callable[[Path, Layout, ControlPlane, Path], Any]) -> None:
    """Compare each of the plan's references at each layout; the last argument is where the comparison may write."""
    plan = numerics.Plan.read(Path(file))
    control = connect(rank_info(), DEADLINE_S)
    init_process_groups(control, CPU, one_node=True, deadline_s=DEADLINE_S)
    for name, fields in plan.layouts.items():
        layout = Layout.model_validate(fields)
        change = plan.changes.get(name)
        for family in plan.families[name]:
            out = plan.out / f"{name}.{family}"
            with CHANGES[change]() if change else contextlib.nullcontext():
                errors = compare_one(plan.references / family, layout, control, out)
            if control.rank == 0:
                out.with_name(out.name + ".json").write_bytes(msgspec.json.encode(errors))
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    control.close()


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _marked_experts(kind: str, mark: str) -> Any:
    """Parameters of experts marked as Megatron's own are."""
    marks = build._mark_shards

    def mark_all(model: Any) -> None:
        marks(model)
        for name, parameter in model.named_parameters():
            if ".experts." in name and name.endswith(kind):
                setattr(parameter, mark, True)

    return _replaced(build, "_mark_shards", mark_all)


_BOTH = {"config", "init_method", "bias", "skip_bias_add", "is_expert", "tp_comm_buffer_name", "tp_group"}


class _Column(ColumnParallelLinear):
    """Takes what the wrapper of Transformer Engine's takes (megatron/core/extensions/transformer_engine.py)."""

    def __init__(self, inputs: int, outputs: int, *, gather_output: bool, **others: Any) -> None:
        assert not gather_output
        assert not others.keys() - _BOTH - {"stride"}
        super().__init__(inputs, outputs, gather_output=False, **others)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x)


class _Row(RowParallelLinear):
    def __init__(self, inputs: int, outputs: int, *, input_is_parallel: bool, **others: Any) -> None:
        assert input_is_parallel
        assert not others.keys() - _BOTH
        super().__init__(inputs, outputs, input_is_parallel=True, **others)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x)


class _Norm(RMSNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)


def _like_transformer_engine() -> Any:
    """Its modules at their places, with its arguments; on a CPU they can only compute as Megatron's own do."""
    engine = specification._Engine(_Norm, _Column, _Row)
    return _replaced(specification, "_transformer_engine", lambda config: engine)


def _batched_exchange() -> Any:
    parallelism = build._parallelism
    return _replaced(build, "_parallelism", lambda layout: {**parallelism(layout), "batch_p2p_comm": True})


CHANGES = {
    "Transformer Engine": _like_transformer_engine,
    "gradient of the shared rope key": lambda: _replaced(specification, "LatentSelfAttention", MLASelfAttention),
    "experts' gradients are summed": lambda: _marked_experts("weight", "allreduce"),
    "expert biases are not summed": lambda: _marked_experts("linear_fc2.bias", "sequence_parallel"),
    "no batched exchange": _batched_exchange,
}
"""Other modules than a CPU's; and what megarl mends in Megatron, each undone: then numbers are wrong without a word."""


def compare(directory: Path, layout: Layout, control: ControlPlane) -> numerics.Errors:
    reference = msgspec.json.decode((directory / "reference.json").read_bytes(), type=numerics.Reference)
    logits = load_file(directory / "logits.safetensors")["logits"]
    shape = read_model_shape(directory / "model")
    model = engine(directory / "model", shape, layout, Routing.read(directory).balance)
    rows, weights = numerics.rows(), numerics.token_weights()
    sequences = [
        TokenSequence(row, 1, {"weight": weight}, experts)
        for row, weight, experts in zip(rows, weights, read_experts(directory, len(rows)), strict=True)
    ]
    logprobs_error = (model.logprobs(sequences) - expected_logprobs(logits)).abs().max()
    _projected.clear()
    farthest = [0.0]

    def loss(
        batch: MicroBatch, logprobs: Tensor, entropies: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        predicted = batch.mask > 0
        hidden, weight = _projected.pop()
        own = gather_from_tensor_model_parallel_region(hidden @ weight.T)[:, : shape.vocab]
        if predicted.any():
            difference = (own[predicted] - logits[batch.response_index[predicted]]).abs().max()
            farthest.append(float(difference.nan_to_num(1e9)))
        total = -(batch.columns["weight"] * (logprobs + numerics.ENTROPY_COEFFICIENT * entropies)).sum()
        return total, {"loss": total.detach()}, {}

    first = model.update(sequences, loss)
    logits_error = max(control.allgather(max(farthest), float, what="logits"))
    gradient_error, name = compare_gradients(model, directory / "gradients", min(1.0, numerics.CLIP / first.grad_norm))
    second = model.update(sequences, loss)
    losses = [
        Metrics.merge(control.allgather(update.metrics, Metrics, what="loss")).sums["loss"]
        for update in (first, second)
    ]
    return numerics.Errors(
        logits=logits_error,
        gradient=gradient_error,
        gradient_name=name,
        grad_norm=abs(first.grad_norm / reference.grad_norm - 1),
        loss=abs(losses[0] / reference.loss - 1),
        next_loss=abs(losses[1] / reference.next_loss - 1),
        logprobs=float(logprobs_error.nan_to_num(1e9)),
    )


def expected_logprobs(logits: Tensor) -> Tensor:
    targets = torch.tensor([token for row in numerics.rows() for token in row[1:]])
    return torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]


def engine(
    directory: Path,
    shape: ModelShape,
    layout: Layout,
    balance: ExpertBalance = ExpertBalance(),  # noqa: B008 (frozen)
    temperature: float = 1.0,
) -> ModelEngine:
    return ModelEngine(
        Model(path=directory),
        shape,
        layout,
        device=CPU,
        seed=0,
        max_tokens_per_rank=96,
        temperature=temperature,
        optimizer=OPTIMIZER,
        balance=balance,
        updates=2,
    )


def compare_gradients(model: ModelEngine, directory: Path, clipped_by: float) -> tuple[float, str]:
    """The largest difference of a gradient over its largest element, and whose it is."""
    for part in model._model:
        for group in [*part.bucket_groups, *part.expert_parallel_bucket_groups]:
            share_buckets(group)
    gradients = copy.copy(model.weights)
    gradients._local = {
        name: held._replace(tensor=getattr(held.tensor, "main_grad", held.tensor))
        for name, held in gradients._local.items()
    }
    reader, worst = HfReader(directory), (0.0, "")
    for bucket in gradients.hf_buckets(1 << 20):
        for parameter, parts in bucket:
            for name, tensor in zip(parameter.hf, parts, strict=True):
                if not parameter.float32:  # a buffer
                    expected = reader.tensor(name, tuple(tensor.shape)) * clipped_by
                    error = (tensor - expected).abs().max() / expected.abs().max().clamp_min(1e-12)
                    worst = max(worst, (float(error.nan_to_num(1e9)), name))
    return worst

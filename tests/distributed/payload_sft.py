"""One rank of a small training run with the real ModelEngine; rank 0 writes what all have seen.

Its argument is a file with a `Plan`; started by test_layouts.py.
"""

from __future__ import annotations

import copy
import faulthandler
import hashlib
import os
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file

from megarl.config import CosineSchedule, Layout, Model, Optimizer, read_model_shape
from megarl.data import Sequence
from megarl.model_engine import Metrics, ModelEngine, TokenSequence
from megarl.model_engine.logprobs import token_logprobs
from megarl.runtime import ControlPlane, connect, init_process_groups, rank_info
from megarl.trainer.sft import loss, weighted
from megarl.weights import HfReader
from tests.distributed import hf_loop
from tests.distributed.sft_plan import TINY_BYTES, Plan, Report, Seen

CPU = torch.device("cpu")
STUCK_S = 240


def main(file: str) -> None:
    faulthandler.dump_traceback_later(STUCK_S)
    plan = Plan.read(Path(file))
    control = connect(rank_info(), 240)
    init_process_groups(control, CPU, one_node=True, deadline_s=240)
    families = {family: run_family(plan, family, control) for family in plan.models}
    report = Report(
        families=families,
        bfloat16_losses={family: run_in_bfloat16(plan, family, control) for family in plan.models},
        pids=control.allgather(os.getpid(), int, what="pids"),
        vocabulary_error=vocabulary_error(control),
        device_context=device_context(),
    )
    if control.rank == 0:
        report.write(plan.out / "report.json")
    if plan.linger:
        linger(plan)
    dist.destroy_process_group()
    control.close()


def run_family(plan: Plan, family: str, control: ControlPlane) -> Seen:
    batches, out = sequences(plan, family), plan.out / family
    frozen = engine(plan, family, temperature=plan.temperature, frozen=True)
    model = engine(plan, family)
    wrong, tensors, largest = compare_with_files(model, plan.models[family])
    seen = Seen(
        logprobs=model.logprobs(batches[0]).tolist(),
        tempered=frozen.logprobs(batches[0]).tolist(),
        losses=[],
        grad_norms=[],
        rates=[],
        wrong_tensors=wrong,
        tensors=tensors,
        largest_shared_bucket=largest,
    )
    for number, batch in enumerate(batches):
        loss, grad_norm, rate = update(model, batch, control)
        seen.losses.append(loss)
        seen.grad_norms.append(grad_norm)
        seen.rates.append(rate)
        if number == 0:
            write_gradients(model, out)
        if plan.save and number + 1 == plan.checkpoint_after:
            checkpoint = out / "checkpoint"
            checkpoint.mkdir(exist_ok=True)
            control.barrier("checkpoint directory")
            model.save(checkpoint)
    seen.digests = digests(model, control)
    model.export_hf(out / "hf")
    if plan.load is not None:
        resumed = engine(plan, family)
        resumed.load(plan.load / family / "checkpoint", plan.checkpoint_after)
        for batch in batches[plan.checkpoint_after :]:
            loss, grad_norm, _ = update(resumed, batch, control)
            seen.resumed_losses.append(loss)
            seen.resumed_grad_norms.append(grad_norm)
    return seen


def run_in_bfloat16(plan: Plan, family: str, control: ControlPlane) -> list[float]:
    model = engine(plan, family, dtype="bfloat16")
    return [update(model, batch, control)[0] for batch in sequences(plan, family)]


def sequences(plan: Plan, family: str) -> list[list[TokenSequence]]:
    return [weighted([Sequence(ids, learned) for ids, learned in batch]) for batch in plan.batches[family]]


def engine(
    plan: Plan,
    family: str,
    *,
    temperature: float = 1.0,
    frozen: bool = False,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> ModelEngine:
    path, layout = plan.models[family], Layout.model_validate(plan.layout)
    recipe = Optimizer(
        learning_rate=hf_loop.LEARNING_RATE,
        warmup_steps=hf_loop.WARMUP,
        schedule=CosineSchedule(final_ratio=hf_loop.FINAL_RATIO),
        betas=hf_loop.BETAS,
        epsilon=hf_loop.EPSILON,
        weight_decay=hf_loop.WEIGHT_DECAY,
        clip=hf_loop.CLIP,
    )
    return ModelEngine(
        Model(path=path, dtype=dtype),
        read_model_shape(path),
        layout,
        device=CPU,
        seed=0,
        max_tokens_per_rank=plan.max_tokens_per_rank,
        temperature=temperature,
        optimizer=None if frozen else recipe,
        updates=len(plan.batches[family]),
    )


def update(model: ModelEngine, batch: list[TokenSequence], control: ControlPlane) -> tuple[float, float, float]:
    """Loss of the global batch, gradient norm and learning rate."""
    done = model.update(batch, loss)
    total = Metrics.merge(control.allgather(done.metrics, Metrics, what="metrics"))
    return total.sums["loss"], done.grad_norm, done.learning_rate


def compare_with_files(model: ModelEngine, path: Path) -> tuple[list[str], int, int]:
    """Tensors that come back from the shards other than they are in the files, all tensors, and the largest bucket.

    A bucket of a single parameter may be as large as that.
    """
    reader, wrong, names, largest = HfReader(path), [], [], 0
    for bucket in model.weights.hf_buckets(TINY_BYTES):
        named = [pair for parameter, parts in bucket for pair in zip(parameter.hf, parts, strict=True)]
        names += [name for name, _ in named]
        wrong += [name for name, tensor in named if not torch.equal(reader.tensor(name, tuple(tensor.shape)), tensor)]
        if len(bucket) > 1:
            largest = max(largest, sum(tensor.nbytes for _, tensor in named))
    assert len(set(names)) == len(names)
    return wrong, len(names), largest


def write_gradients(model: ModelEngine, out: Path) -> None:
    """The gradients of the last update as the tensors of a Hugging Face model: they lie as their weights do."""
    for part in model._model:
        for group in [*part.bucket_groups, *part.expert_parallel_bucket_groups]:
            share_buckets(group)
    gradients = copy.copy(model.weights)
    gradients._local = {name: held._replace(tensor=held.tensor.main_grad) for name, held in gradients._local.items()}
    buckets = list(gradients.hf_buckets(1 << 30))
    if dist.get_rank() == 0:
        tensors = {name: t.clone() for b in buckets for p, parts in b for name, t in zip(p.hf, parts, strict=True)}
        out.mkdir(exist_ok=True)
        save_file(tensors, out / "gradients.safetensors")
    dist.barrier()


def share_buckets(group: Any) -> None:
    """Each data-parallel rank has the sum of its own part of a bucket; give all of them the others', too."""
    ranks = group.intra_distributed_optimizer_instance_group
    for bucket in group.buckets:
        parts = list(bucket.grad_data.chunk(ranks.size()))
        dist.all_gather(parts, parts[ranks.rank()].clone(), group=ranks)


def digests(model: ModelEngine, control: ControlPlane) -> list[tuple[str, str]]:
    """Of every rank's own weights: what they are and their bytes' hash. Equal names must have equal hashes."""
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    mine = []
    for name, held in model.weights._local.items():
        if name == "output_layer.weight" and model._shape.tied:
            name = "embedding.word_embeddings.weight"  # the last stage's copy
        whose = f"{name}, tensor rank {tensor_rank}"
        mine.append((whose, hashlib.sha256(held.data.contiguous().numpy().tobytes()).hexdigest()))
    everyone = control.allgather(mine, list[tuple[str, str]], what="digests")
    return [pair for rank in everyone for pair in rank]


def vocabulary_error(control: ControlPlane) -> float:
    """Largest error of log-probabilities, entropies and gradients when every rank has a part of 5 tokens.

    With four ranks and rows of two tokens each, the last rank has padding alone.
    """
    vocab, rank, world = 5, control.rank, control.world
    shard = -(-vocab // world)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(12, 8, generator=generator).requires_grad_()
    weight = 0.3 * torch.randn(shard * world, 8, generator=generator)
    targets = torch.randint(vocab, (12,), generator=generator)
    exact_hidden, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    log_p = torch.log_softmax(exact_hidden @ exact_weight[:vocab].T, -1)
    expected, expected_entropies = log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    (expected.square() + expected_entropies.square()).sum().backward()
    mine = slice(rank * shard, (rank + 1) * shard)
    part = weight[mine].clone().requires_grad_()
    group: Any = dist.group.WORLD
    logprobs, entropies = token_logprobs(hidden, part, targets, vocab=vocab, temperature=1.0, group=group)
    (logprobs.square() + entropies.square()).sum().backward()
    dist.all_reduce(hidden.grad, group=group)
    differences = [
        logprobs - expected,
        entropies - expected_entropies,
        hidden.grad - exact_hidden.grad,
        part.grad - exact_weight.grad[mine],
    ]
    largest = torch.stack([difference.detach().abs().max().nan_to_num(1e9) for difference in differences]).max()
    return max(control.allgather(float(largest), float, what="vocabulary errors"))


def device_context() -> str:
    """Where torch makes a tensor that is told by its context where to be, after the CPU shim has been installed."""
    with torch.device("meta"):
        return torch.arange(2).device.type


def linger(plan: Plan) -> None:
    """Go on training until the end comes from outside."""
    family = next(iter(plan.models))
    model, batches = engine(plan, family), sequences(plan, family)
    while True:
        model.update(batches[0], lambda _, logprobs, __: (logprobs.sum() * 0, {}, {}))

"""One rank that trains the same model twice, once with its parts going to the host and back in between.

Its argument is a file with an `offload_plan.Plan`; started by test_offload.py.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megarl.config import Layout, Model, read_model_shape
from megarl.model_engine import Metrics, MicroBatch, ModelEngine, PartAwayError, TokenSequence
from megarl.runtime import ControlPlane, connect, init_process_groups, rank_info
from tests.distributed import numerics
from tests.distributed.offload_plan import UPDATES, Case, Held, Memory, Plan, Report, Trained
from tests.distributed.payload_numerics import CPU, OPTIMIZER

DEADLINE_S = 240.0
CYCLES = 50
WARM_CYCLES = 5
BUCKET_BYTES = 1 << 20


def main(file: str) -> None:
    plan = Plan.read(Path(file))
    control = connect(rank_info(), DEADLINE_S)
    init_process_groups(control, CPU, one_node=True, deadline_s=DEADLINE_S)
    for name, case in plan.cases.items():
        report = run(case, plan.out / name, control)
        if control.rank == 0:
            (plan.out / name / "report.json").write_bytes(msgspec.json.encode(report))
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    control.close()


def run(case: Case, out: Path, control: ControlPlane) -> Report:
    plain = train(engine(case), out / "plain" if case.checkpoint else None, control)
    model = engine(case)
    there = model.offload().before
    again = [model.offload().moved_bytes, model.offload("optimizer").moved_bytes]
    back = model.onload()
    again += [model.onload().moved_bytes, model.onload("gradients").moved_bytes]
    refusals = refused(model, out)
    cycled = train(
        model, out / "cycled" if case.checkpoint else None, control, between=lambda: (model.offload(), model.onload())
    )
    warm, end = cycle_often(model)
    frozen = engine(case, frozen=True)
    before = digest(frozen.logprobs(sequences()))
    moved = frozen.offload()
    frozen.onload("parameters")
    return Report(
        plain=plain,
        cycled=cycled,
        there=Held(there.device, there.host),
        away=Held(back.before.device, back.before.host),
        back=Held(back.after.device, back.after.host),
        again=again,
        refusals=refusals,
        warm=warm,
        end=end,
        frozen=[before, digest(frozen.logprobs(sequences()))],
        frozen_there=Held(moved.before.device, moved.before.host),
        frozen_away=Held(moved.after.device, moved.after.host),
    )


def train(
    model: ModelEngine, checkpoint: Path | None, control: ControlPlane, between: Callable[[], Any] | None = None
) -> Trained:
    """Updates as in colocated training, a checkpoint that is loaded again, if there is to be one, and one update more.

    With `between`, which is then called before each use, optimizer and gradients are also away while weights are read.
    """
    seen = Trained()
    cycle = between or (lambda: None)

    def step() -> None:
        cycle()
        seen.logprobs.append(digest(model.logprobs(sequences())))
        cycle()
        loss, grad_norm = update(model, control)
        seen.losses.append(loss)
        seen.grad_norms.append(grad_norm)
        if between is not None:
            model.offload("gradients", "optimizer")
        tensors = [t for bucket in model.weights.hf_buckets(BUCKET_BYTES) for _, parts in bucket for t in parts]
        seen.weights.append(digest(*tensors))
        seen.logprobs.append(digest(model.logprobs(sequences())))
        if between is not None:
            model.offload("parameters")
            model.onload()

    for _ in range(UPDATES):
        step()
    if checkpoint is not None:
        cycle()
        if control.rank == 0:
            checkpoint.mkdir()
        control.barrier("checkpoint directory")
        model.save(checkpoint)
        model.load(checkpoint, UPDATES)
    step()
    return seen


def refused(model: ModelEngine, out: Path) -> dict[str, str]:
    """What the engine says when it is used while parts are away; all are back afterwards."""
    messages: dict[str, str] = {}
    weights = model.weights

    def ask(name: str, use: Callable[[], Any]) -> None:
        try:
            use()
        except PartAwayError as error:
            messages[name] = str(error)

    model.offload("gradients")
    ask("update without gradients", lambda: update(model, None))
    model.offload()
    ask("update", lambda: update(model, None))
    ask("logprobs", lambda: model.logprobs(sequences()))
    ask("weights", lambda: model.weights)
    ask("hf_buckets", lambda: next(weights.hf_buckets(BUCKET_BYTES)))
    ask("shard", lambda: weights.shard(weights.parameters[0]))
    ask("export_hf", lambda: model.export_hf(out))
    ask("save", lambda: model.save(out))
    ask("load", lambda: model.load(out, 0))
    model.onload("parameters")
    ask("save without optimizer", lambda: model.save(out))
    model.onload()
    return messages


def cycle_often(model: ModelEngine) -> tuple[Memory, Memory]:
    """Memory after some cycles and after many."""
    for _ in range(WARM_CYCLES):
        model.offload()
        model.onload()
    warm = memory()
    for _ in range(CYCLES):
        model.offload()
        model.onload()
    return warm, memory()


def memory() -> Memory:
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return Memory(sum(storage.nbytes() for storage in storages.values()), psutil.Process().memory_info().rss)


def engine(case: Case, *, frozen: bool = False) -> ModelEngine:
    return ModelEngine(
        Model(path=case.model, dtype=case.dtype),
        read_model_shape(case.model),
        Layout.model_validate(case.layout),
        device=CPU,
        seed=0,
        max_tokens_per_rank=256,
        optimizer=None if frozen else OPTIMIZER,
        updates=UPDATES + 1,
    )


def sequences() -> list[TokenSequence]:
    rows, weights = numerics.rows(), numerics.token_weights()
    return [TokenSequence(row, 1, {"weight": weight}) for row, weight in zip(rows, weights, strict=True)]


def update(model: ModelEngine, control: ControlPlane | None) -> tuple[float, float]:
    """Loss of the global batch, where `control` is given, and gradient norm."""

    def loss(batch: MicroBatch, logprobs: Tensor, _: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        total = -(batch.columns["weight"] * logprobs).sum()
        return total, {"loss": total.detach()}, {}

    done = model.update(sequences(), loss)
    parts = [done.metrics] if control is None else control.allgather(done.metrics, Metrics, what="loss")
    return Metrics.merge(parts).sums["loss"], done.grad_norm


def digest(*tensors: Tensor) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()

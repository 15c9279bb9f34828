"""One of four ranks of which the first two train a model, at several layouts, and publish it to engines elsewhere.

Asserts what the engine of this rank then holds. Its argument is a directory with a model, to write to.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.checkpoint_engine import Engines, Precision, Publisher, Training
from megarl.config import DirectPublish, Layout, read_model_shape
from megarl.runtime import ControlPlane, Links, connect, init_process_groups, rank_info
from tests.publication import Model, Source, Target

if TYPE_CHECKING:
    from megarl.model_engine import ModelEngine

CPU = torch.device("cpu")
DEADLINE_S = 240.0
TRAIN = 2
PRECISION = Precision(torch.float32)
CASES = [
    (Layout(tensor=2), Engines(((2,), (3,)))),
    (Layout(), Engines(((2, 3),))),
    (Layout(pipeline=2), Engines(((0,), (1,), (2,), (3,)))),
]
"""Training layout, and engines: apart, apart, and on all ranks."""


def main(out: str) -> None:
    control = connect(rank_info(), DEADLINE_S)
    links = init_process_groups(control, CPU, one_node=True, deadline_s=DEADLINE_S, train_ranks=TRAIN)
    losses = [follow(Path(out), str(number), control, links, *case) for number, case in enumerate(CASES)]
    if control.rank < TRAIN:
        torch.testing.assert_close(losses, [losses[0]] * len(CASES), rtol=1e-5, atol=0)
        dist.destroy_process_group()
    else:
        assert not [name for name in sys.modules if name.startswith("megatron")], (
            "what trains nothing needs no Megatron"
        )
    control.close()


def follow(out: Path, name: str, control: ControlPlane, links: Links, layout: Layout, engines: Engines) -> list[float]:
    """Two updates, each published; then a checkpoint. Returns the losses, on ranks that train."""
    shape = read_model_shape(out / "model")
    model = build(out / "model", layout) if control.rank < TRAIN else None
    options = {"precision": PRECISION, "device": CPU, "ranks_per_node": 2, "timeout_s": DEADLINE_S}
    publisher = Publisher(DirectPublish(), shape, Training(layout, TRAIN), engines, control, links, **options)
    source = Source(shape, layout, TRAIN, control.rank, torch.float32)
    source.whole = load_file(out / "model/model.safetensors")
    target = None
    if any(ranks[0] == control.rank for ranks in engines.ranks):
        target = Target([Model(source.engine_state(rank, engines, PRECISION)) for rank in range(engines.tensor)])
    losses = []
    for version in (1, 2):
        exported = out / f"{name}_{version}"
        if model is not None:
            losses.append(update(model))
            model.export_hf(exported)
        found = publisher.publish(version, None if model is None else model.weights, target)
        assert found.failed == {}, found.failed
        before, source.whole = source.whole, load_file(exported / "model.safetensors")
        assert any(not torch.equal(source.whole[key], tensor) for key, tensor in before.items())
        for rank, process in enumerate(target.models if target else []):
            for key, tensor in source.engine_state(rank, engines, PRECISION).items():
                assert torch.equal(process.tensors[key], tensor), (control.rank, rank, key)
    if model is not None:
        check_checkpoint(model, out / f"{name}_checkpoint", out / "model", layout)
    print(f"rank {control.rank}: {layout}", flush=True)
    return losses


def build(path: Path, layout: Layout) -> ModelEngine:
    from megatron.core import parallel_state

    from tests.distributed.payload_numerics import engine

    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    return engine(path, read_model_shape(path), layout)


def update(model: ModelEngine) -> float:
    from megarl.model_engine import Metrics, TokenSequence
    from tests.distributed import numerics
    from tests.distributed.payload_partition import loss

    rows = zip(numerics.rows(), numerics.token_weights(), strict=True)
    done = model.update([TokenSequence(row, 1, {"weight": weights}) for row, weights in rows], loss)
    return Metrics.gathered([done.metrics], CPU).sums["loss"]


def check_checkpoint(model: ModelEngine, directory: Path, path: Path, layout: Layout) -> None:
    """Written and read while the other ranks are elsewhere."""
    if dist.get_rank() == 0:
        directory.mkdir()
    dist.barrier()
    model.save(directory)
    expected = update(model)
    again = build(path, layout)
    again.load(directory, 2)
    assert abs(update(again) / expected - 1) < 1e-5

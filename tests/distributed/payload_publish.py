"""One of four ranks that publish between layouts; asserts what its engine then holds.

Its argument is a directory to write to.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoint_engine import Engines, PlanError, Precision, Publisher, Training, publish
from megarl.config import DirectPublish, Layout, ModelShape
from megarl.runtime import ControlPlane, Links, connect, init_process_groups, rank_info
from tests.publication import Model, Source, Target, flipped_bit, small_shape

CPU = torch.device("cpu")
WORLD = 4
CASES: list[tuple[str, Layout, int, Engines]] = [
    ("qwen3", Layout(tensor=2, pipeline=2), 4, Engines(((0, 1), (2, 3)))),
    ("llama", Layout(), 2, Engines(((2, 3),))),
    ("qwen2", Layout(tensor=2), 2, Engines(((0,), (2,), (3,)))),
    ("qwen3", Layout(), 1, Engines(((1,), (2,), (3,)))),  # which are relayed to
    ("llama", Layout(), 1, Engines(((0,), (3,), (1,), (2,)))),
    ("gemma3", Layout(pipeline=2), 4, Engines(((0, 1, 2, 3),))),
    ("qwen3_moe", Layout(expert=2), 4, Engines(((0, 1), (2, 3)), 2)),
    ("mixtral", Layout(tensor=2, expert=2, expert_tensor=2), 4, Engines(((0, 1, 2, 3),), 2)),
    ("glm4_moe", Layout(expert=4), 4, Engines(((1, 0), (2, 3)))),
    ("deepseek_v3", Layout(tensor=2, pipeline=2), 4, Engines(((0, 1), (2, 3)), 2)),
]
"""Family, training layout and its ranks, engines."""
WIDE = {"hidden_size": 256, "head_dim": 128, "intermediate_size": 512, "num_hidden_layers": 2, "layer_types": None}
CASTS: list[tuple[str, dict[str, Any], Layout, Engines]] = [
    ("qwen3", WIDE, Layout(tensor=2, pipeline=2), Engines(((0, 1), (2, 3)))),
    ("qwen3_moe", WIDE | {"moe_intermediate_size": 256}, Layout(tensor=2, expert=2), Engines(((0, 1), (2, 3)))),
]
"""Float32 that becomes bfloat16 or FP8, of which parts must be whole blocks."""


def main(out: str) -> None:
    control = connect(rank_info(), 60.0)
    links = init_process_groups(control, CPU, one_node=True, deadline_s=60.0)
    directory = Path(out)
    publish._MIB = 200  # so that small models have many buckets
    for family, layout, world, engines in CASES:
        shape = small_shape(family, directory / f"{family}_{control.rank}")
        case = Case(control, links, shape, layout, world, engines, Precision(torch.float32))
        case.every_version()
        if family in ("qwen2", "qwen3_moe"):
            case.changes_alone()
            case.failures()
        print(f"rank {control.rank}: {family}", flush=True)
    for family, fields, layout, engines in CASTS:
        shape = small_shape(family, directory / f"cast_{family}_{control.rank}", **fields)
        for precision in (Precision(torch.bfloat16), Precision(torch.bfloat16, fp8=True)):
            Case(control, links, shape, layout, WORLD, engines, precision).every_version()
    small = small_shape("qwen3", directory / f"small_{control.rank}")
    with contextlib.suppress(PlanError):
        wrong = Precision(torch.bfloat16, fp8=True)
        Case(control, links, small, Layout(), 4, Engines(((0, 1),)), wrong).every_version()
        raise AssertionError("parts of blocks were not refused")
    torch.distributed.destroy_process_group()
    control.close()


class Case:
    def __init__(
        self,
        control: ControlPlane,
        links: Links,
        shape: ModelShape,
        layout: Layout,
        world: int,
        engines: Engines,
        precision: Precision,
    ) -> None:
        self.control, self.links, self.shape = control, links, shape
        self.engines, self.precision = engines, precision
        self.source = Source(shape, layout, world, control.rank, torch.float32)
        self.source.version(0)
        self.number = next((n for n, ranks in enumerate(engines.ranks) if ranks[0] == control.rank), None)
        self.training = Training(layout, world)

    def publisher(self, method: DirectPublish) -> Publisher:
        return Publisher(
            method,
            self.shape,
            self.training,
            self.engines,
            self.control,
            self.links,
            precision=self.precision,
            device=CPU,
            ranks_per_node=2,
            timeout_s=30.0,
        )

    def target(self) -> Target | None:
        if self.number is None:
            return None
        size = self.engines.tensor
        return Target([Model(self.source.engine_state(rank, self.engines, self.precision)) for rank in range(size)])

    def check(self, target: Target | None) -> None:
        """Each rank of the engine has, bit by bit, what cutting the Hugging Face tensors gives."""
        for rank, model in enumerate(target.models if target else []):
            want = self.source.engine_state(rank, self.engines, self.precision)
            assert want.keys() == model.tensors.keys()
            for name, tensor in want.items():
                assert torch.equal(model.tensors[name].float(), tensor.float()), (self.control.rank, rank, name)

    def every_version(self) -> None:
        publisher, target = self.publisher(DirectPublish()), self.target()
        for version in (1, 2):
            self.source.version(version)
            found = publisher.publish(version, self.source, target)
            assert found.failed == {}
            self.check(target)
            if target is not None:
                assert (target.calls[0], target.calls[-2:]) == ("begin", ["compare", version])
                target.calls.clear()

    def changes_alone(self) -> None:
        """Of a model of which only a part changes, little is sent; fingerprints still cover all."""
        publisher, target = self.publisher(DirectPublish(changed_only=True)), self.target()
        whole = publisher.publish(1, self.source, target).nbytes
        assert publisher.publish(2, self.source, target).nbytes == 0
        self.source.version(9, only="layers.1.")
        assert 0 < publisher.publish(3, self.source, target).nbytes < 0.7 * whole
        self.check(target)
        if target is not None:  # a weight that is lost in an engine is seen though nothing was sent
            name = next(iter(target.models[-1].tensors))
            target.models[-1].tensors[name][0] += 1
        found = publisher.publish(4, self.source, target)
        assert found.failed.keys() == set(range(len(self.engines.ranks)))
        assert f"rank {self.engines.tensor - 1} of the engine" in found.failed[0]

    def failures(self) -> None:
        """What goes wrong in the last engine, or on the way to it, concerns it alone; a new one gets the version."""
        last = len(self.engines.ranks) - 1
        for fault in ("begin", "load", "compare", 1, "corrupted"):
            publisher, target = self.publisher(DirectPublish()), self.target()
            if target is not None and self.number == last:
                target.fail_at = fault
            here = fault == "corrupted" and self.control.rank == self.engines.ranks[last][-1]
            with flipped_bit() if here else contextlib.nullcontext():
                found = publisher.publish(1, self.source, target)
            assert found.failed.keys() == {last}, (fault, found)
            expected = "has other weights than the trainer" if fault == "corrupted" else f"it failed at {fault}"
            assert expected in found.failed[last], found.failed
            if self.number != last:
                self.check(target)
            elif target is not None:
                assert 1 not in target.calls or fault == 1  # its version has not changed
                target = self.target()
            again = publisher.publish(1, self.source, target, only=[last])
            assert again.failed == {}
            self.check(target)

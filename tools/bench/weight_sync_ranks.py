"""One rank of weight_sync.py: it holds its part of the model, starts the engine that it leads, and publishes.

Its argument is a file with a `weight_sync.Plan`.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.checkpoint_engine import Engines, Precision, Publisher, Training, make_plan, traffic
from megarl.config import (
    DirectPublish,
    DiskPublish,
    FullPublish,
    Layout,
    Model,
    Optimizer,
    Publish,
    Rollout,
    read_model_shape,
)
from megarl.model_engine import ModelEngine
from megarl.rollout_engine import Engine
from megarl.runtime import ControlPlane, Guard, Links, connect, init_process_groups, rank_info
from tools.bench.weight_sync import LAYERS, METHODS, Measured, Plan, Publication

CPU = torch.device("cpu")
DEADLINE_S = 600.0
DTYPE = torch.float32
SERVER = {"max_total_tokens": 4096, "max_running_requests": 8}
"""Little memory for keys and values: nothing is generated."""
PUBLISHERS: dict[str, Publish] = {
    "direct": DirectPublish(),
    "full": FullPublish(type="full"),
    "disk": DiskPublish(type="disk"),
    "changed": DirectPublish(changed_only=True),
}


def main(file: str) -> None:
    plan = Plan.read(Path(file))
    info = rank_info()
    guard = Guard(info.rank)
    control = connect(info, DEADLINE_S)
    engine = start_engine(plan, info.rank, guard)
    links = init_process_groups(control, CPU, one_node=True, deadline_s=DEADLINE_S)
    rank = Rank(plan, control, links, engine)
    if engine is not None:
        engine.wait_healthy()
    control.barrier("engines")
    measured = rank.measure()
    if info.rank == 0:
        measured.write(plan.out / "measured.json")
    guard.stop_children()
    dist.destroy_process_group()
    control.close()


def start_engine(plan: Plan, rank: int, guard: Guard) -> Engine | None:
    number = next((number for number, ranks in enumerate(plan.engines) if ranks[0] == rank), None)
    if number is None:
        return None
    return Engine(
        Model(path=plan.model),
        Rollout(tensor_parallel=len(plan.engines[number]), max_new_tokens=1, server_args=SERVER),
        name=f"engine {number}",
        host="127.0.0.1",
        key="key of the benchmark",
        device="cpu",
        seed=0,
        log=plan.out / f"engine_{number}.log",
        guard=guard,
        answer_timeout_s=DEADLINE_S,
    )


class TimedEngine:
    """Seconds in which an engine has been asked something, and the bytes that its processes were given otherwise than
    by its ranks."""

    def __init__(self, engine: Engine, ranks: int) -> None:
        self._engine, self._ranks = engine, ranks
        self.seconds: Counter[str] = Counter()
        self.nbytes = 0

    def begin_update(self) -> None:
        with self._timed("pause"):
            self._engine.begin_update()

    def load_slots(self, handles: list[bytes], *, last: bool) -> None:
        with self._timed("load"):
            self._engine.load_slots(handles, last=last)

    def load_tensors(self, payload: bytes) -> None:
        self.nbytes += len(payload) * self._ranks
        with self._timed("load"):
            self._engine.load_tensors(payload)

    def load_directory(self, path: Path) -> None:
        self.nbytes += sum(file.stat().st_size for file in path.glob("*.safetensors")) * self._ranks
        with self._timed("load"):
            self._engine.load_directory(path)

    def end_update(self, version: int) -> None:
        with self._timed("pause"):
            self._engine.end_update(version)

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - start  # type: ignore[assignment]


class Rank:
    def __init__(self, plan: Plan, control: ControlPlane, links: Links, engine: Engine | None) -> None:
        self._plan, self._control, self._engine, self._version = plan, control, engine, 0
        layout, shape = Layout.model_validate(plan.layout), read_model_shape(plan.model)
        self._model = ModelEngine(
            Model(path=plan.model),
            shape,
            layout,
            device=CPU,
            seed=0,
            max_tokens_per_rank=1024,
            optimizer=Optimizer(learning_rate=1e-4),
            updates=1,
        )
        training, engines = Training(layout, control.world), Engines(tuple(map(tuple, plan.engines)))
        self._publishers = {
            name: Publisher(
                method,
                shape,
                training,
                engines,
                control,
                links,
                precision=Precision(DTYPE),
                device=CPU,
                ranks_per_node=control.world,
                timeout_s=DEADLINE_S,
            )
            for name, method in PUBLISHERS.items()
        }
        sizes = {"bucket_bytes": 1 << 30, "item_bytes": DTYPE.itemsize}
        flow = traffic(make_plan(shape, training, engines, ranks_per_node=control.world, **sizes))
        self._engine_bytes, received = int((flow.received + flow.kept).sum()), int(flow.received.sum())
        mine = sum(self._model.weights.shard(parameter).nbytes for parameter in self._model.weights.parameters)
        gathered = sum(control.allgather(mine, int, what="sizes")) * (layout.tensor - 1)
        self._between = {"direct": received, "full": gathered, "disk": gathered, "changed": received}

    def measure(self) -> Measured:
        found, memcpy = {method: list[Publication]() for method in METHODS}, Memcpy(self._engine_bytes, self._control)
        seconds = []
        for _ in range(self._plan.rounds + 1):
            seconds.append(memcpy.seconds())
            for method in METHODS:
                self._change(method)
                found[method].append(self._publish(method.partition(" ")[0]))
        return Measured({method: some[1:] for method, some in found.items()}, seconds[1:])

    def _change(self, method: str) -> None:
        """Before it is published. (What `changed all` published last differs then by an odd number of changes.)"""
        layers = {"changed all": 0, "changed nothing": 0, "changed tenth": LAYERS // 10}.get(method)
        for parameter in self._model.weights.parameters:
            if layers is None or (parameter.layer is not None and parameter.layer < layers):
                self._model.weights.shard(parameter).neg_()

    def _publish(self, name: str) -> Publication:
        self._version += 1
        target = None if self._engine is None else TimedEngine(self._engine, len(self._plan.engines[0]))
        directory = self._plan.out / f"version_{self._version}" if name == "disk" else None
        self._control.barrier("begin")
        start = time.perf_counter()
        if directory is not None:
            self._model.export_hf(directory)
        written = time.perf_counter()
        found = self._publishers[name].publish(self._version, self._model.weights, target, directory=directory)
        end = time.perf_counter()
        assert not found.failed, found.failed
        asked = [target.seconds["pause"], target.seconds["load"]] if target else [0.0, 0.0]
        all_asked = self._control.allgather(asked, list[float], what="seconds")
        outside = sum(self._control.allgather(target.nbytes if target else 0, int, what="bytes"))
        if directory is not None and self._control.rank == 0:
            shutil.rmtree(directory)
        through_ranks = found.nbytes if name in ("direct", "changed") else 0
        share = through_ranks / self._engine_bytes if name == "changed" else 1.0
        pause, load = max(all_asked, key=sum)
        between = round(self._between[name] * share)
        return Publication(end - start, written - start, pause, load, between, through_ranks + outside)


class Memcpy:
    """Each rank's share of some bytes, copied by all ranks at the same time."""

    def __init__(self, nbytes: int, control: ControlPlane) -> None:
        self._control = control
        self._from, self._to = (torch.ones(nbytes // control.world, dtype=torch.uint8) for _ in range(2))

    def seconds(self) -> float:
        self._control.barrier("begin")
        start = time.perf_counter()
        self._to.copy_(self._from)
        return max(self._control.allgather(time.perf_counter() - start, float, what="seconds"))

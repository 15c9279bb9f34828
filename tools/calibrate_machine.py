#!/usr/bin/env python
"""Measures what a machine does in a second, for tools/tune_layout.py: products, memory, collectives, decode steps.

    mpirun -n 4 python tools/calibrate_machine.py machine.json                    4 ranks of this machine
    srun --nodes=2 --ntasks-per-node=8 python tools/calibrate_machine.py machine.json      and between nodes
    python tools/calibrate_machine.py machine.json                                1 rank: no collectives
    ... machine.json --engine models/qwen3-0.6b                                   also decode steps of an engine

Start it as a run will be started, on as many ranks of a node, with the same OMP_NUM_THREADS (1 if you set none). It
takes about a minute without an engine; nothing else should run meanwhile. Everything is measured while 1, 2, 4, ...
ranks of a node do the same at once, since ranks of a CPU share its cores and its memory. Seconds are medians of
repeated intervals, and means over the ranks. Those of a CPU's operations are its seconds on a core, times how many
threads of the ranks there are for a core, so that other programs' use of the cores does not count.

Products are in float32 and bfloat16, attention is torch's, collectives are torch's over NCCL or gloo. --engine starts
one engine of one rank with a Hugging Face model and asks it for responses (tools/bench/engine_table.py); the table can
then be given to tools/simulate_rollout.py --engine-file, too.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import operator
import os
import platform
import secrets
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import aiohttp  # noqa: E402
import msgspec  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from megarl.config import Model, RecipeError, Rollout, read_model_shape  # noqa: E402
from megarl.layout import Exchange, Kind, Load, Products, Table, write_table  # noqa: E402
from megarl.rollout_engine import Engine, EngineError  # noqa: E402
from megarl.runtime import (  # noqa: E402
    ControlPlane,
    Guard,
    RankInfo,
    choose_device,
    connect,
    init_process_groups,
    launcher_pid,
    node_address,
    rank_info,
)
from tools.bench.engine_table import measure_engines  # noqa: E402

DEADLINE_S = 900.0
INTERVAL_S, REPEATS, MOST_CALLS = 0.03, 3, 300
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS = {"cpu": (64, 256, 1024), "cuda": (256, 2048, 16384)}
"""Beyond the largest sizes, products are as fast as those."""
WIDTHS = {"cpu": (64, 256, 1024), "cuda": (512, 2048, 8192)}
SEQUENCE, HEADS, HEAD_DIM = {"cpu": 512, "cuda": 4096}, 8, 64
ELEMENTS = {"cpu": (16, 1 << 14, 1 << 18, 1 << 22), "cuda": (16, 1 << 16, 1 << 22, 1 << 26)}
SPREAD_BYTES = 1 << 27
"""More than caches hold."""
SENT = {"cpu": (1 << 12, 1 << 18, 1 << 22, 1 << 25), "cuda": (1 << 14, 1 << 22, 1 << 27)}
"""Bytes."""
PRODUCT = {"cpu": (256, 512), "cuda": (1024, 4096)}
"""Rows and columns of what is multiplied with itself between collectives: about a millisecond, as between a layer's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the table that is written")
    parser.add_argument("--engine", type=Path, metavar="MODEL", help="a Hugging Face directory, for decode steps")
    arguments = parser.parse_args()
    try:
        guard = Guard(rank_info().rank, launcher_pid())
    except ValueError as error:  # an environment that no launcher makes
        parser.error(str(error))
    try:
        run(arguments.file, arguments.engine, guard)
    except (RecipeError, ValueError, OSError, EngineError) as error:
        guard.die(str(error))
    except BaseException:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
        guard.die(traceback.format_exc())
    os._exit(0)  # exit handlers can hang on a rank that left first


def run(file: Path, engine: Path | None, guard: Guard) -> None:
    """One rank of a job that does nothing else.

    Raises ValueError or RecipeError: the table could not be written, or no model; EngineError: it ended.
    """
    if file.is_dir() or not os.access(file.parent, os.W_OK):
        raise ValueError(f"{file}: the table is a file in a directory that exists and can be written to")
    if engine is not None:
        check_model(engine)
    warnings.filterwarnings("ignore", "`torch.distributed")  # newer torch has other names for some collectives
    info = rank_info()
    control, device = connect(info, DEADLINE_S), choose_device(info)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    init_process_groups(control, device, one_node=info.world == info.ranks_per_node, deadline_s=DEADLINE_S)
    table = calibrate(info, control, device)
    if info.rank == 0:
        if engine is not None:
            table = msgspec.structs.replace(table, engine=measure_engine(engine, device, guard))
        write_table(file, table)
        say(f"{file}: {table.name}, {info.world} ranks")
    dist.destroy_process_group()
    control.close()


def check_model(path: Path) -> None:
    """Before a minute goes into measuring. Raises ValueError or RecipeError."""
    if not (path / "config.json").is_file():
        raise ValueError(f"--engine {path}: no Hugging Face model: it has no config.json")
    read_model_shape(path, fp8=True)
    if not any(path.glob("*.safetensors")):
        raise ValueError(f"--engine {path}: it has no weights (*.safetensors)")


def calibrate(info: RankInfo, control: ControlPlane, device: torch.device, *, interval_s: float = INTERVAL_S) -> Table:
    """A collective of all ranks, on which torch's default process group exists; the same table on all.

    Raises ValueError: nodes have unequal numbers of ranks.
    """
    if set(control.allgather(info.ranks_per_node, int, what="ranks of nodes")) != {info.ranks_per_node}:
        raise ValueError("nodes have unequal numbers of ranks; start as many on each")
    allowed = control.allgather(sorted(os.sched_getaffinity(0)), list[int], what="cores")
    node = info.rank // info.ranks_per_node * info.ranks_per_node  # a launcher may number local ranks in another order
    loads, exchanges = [], []
    for count in rising(info.ranks_per_node):
        ranks = [rank for rank in range(info.world) if rank % info.ranks_per_node < count]
        cores = {core for one in allowed[node : node + count] for core in one}
        bench = Bench(ranks, device, max(1.0, count * torch.get_num_threads() / len(cores)), interval_s)
        if info.rank in ranks:
            loads.append(measure_load(bench, count))
        if len(ranks) > 1:
            exchanges += measure_exchanges(bench, count, info)
        control.barrier(f"measurements of {count} ranks")
        if info.rank == 0:
            say(describe(loads[-1], [one for one in exchanges if one.busy == count]))
    gpu = device.type == "cuda"
    properties = torch.cuda.get_device_properties(device) if gpu else None
    table = Table(
        name=properties.name if properties else f"{platform.node()}, {os.cpu_count()} cores",
        device="cuda" if gpu else "cpu",
        memory=float(properties.total_memory if properties else psutil.virtual_memory().total),
        ranks_per_node=info.ranks_per_node,
        loads=loads,
        exchanges=exchanges,
    )
    return control.broadcast(table, Table, what="table")


class Bench:
    """Measures on some `ranks` at once; the others only help to make groups. `sharing` of them share a core."""

    def __init__(self, ranks: list[int], device: torch.device, sharing: float, interval_s: float) -> None:
        self.ranks, self.device, self._interval_s = ranks, device, interval_s
        self._group, self._gpu = dist.new_group(ranks), device.type == "cuda"
        # the seconds of this thread on a core, however long it waited for one
        self._clock, self._sharing = (time.perf_counter, 1.0) if self._gpu else (time.thread_time, sharing)
        self._batch = 10 if self._gpu else 1  # to wait for a GPU takes as long as to start some kernels

    def seconds(self, work: Callable[[], Any]) -> float:
        """Of one call, while all ranks go on with theirs."""
        work()
        found = []
        for _ in range(REPEATS):
            self._meet()
            calls, start = 0, self._clock()
            while not calls or self._clock() - start < self._interval_s:
                for _ in range(self._batch):
                    work()
                self._wait()
                calls += self._batch
            found.append((self._clock() - start) / calls)
        return self._mean(self._sharing * statistics.median(found))

    def seconds_together(self, collective: Callable[[], Any], product: Callable[[], Any]) -> float:
        """What one call of a collective adds to a product before it, while all ranks make as many calls.

        They come to a collective when their products are done, and where they share cores some come much later: a step
        waits for these, too. No less than when all do nothing else.
        """

        def both() -> None:
            product()
            collective()

        both()
        most = torch.tensor(self._calls(both, 1), device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        calls = min(max(int(2 * self._interval_s / most.item()), 1), MOST_CALLS)
        alone, after = [], []
        for _ in range(REPEATS):  # in turns, as the speed of a machine drifts
            alone.append(self._calls(collective, calls))
            after.append(self._calls(both, calls) - self._calls(product, calls))
        return self._mean(max(statistics.median(alone), statistics.median(after)))

    def _calls(self, work: Callable[[], Any], calls: int) -> float:
        """Seconds of each of so many calls."""
        self._meet()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        self._wait()
        return (time.perf_counter() - start) / calls

    def _meet(self) -> None:
        self._wait()
        dist.barrier(self._group)
        self._wait()

    def _wait(self) -> None:
        if self._gpu:
            torch.cuda.synchronize(self.device)

    def _mean(self, seconds: float) -> float:
        total = torch.tensor(seconds, device=self.device)
        dist.all_reduce(total, group=self._group)
        return total.item() / len(self.ranks)


def measure_load(bench: Bench, count: int) -> Load:
    kind, device = bench.device.type, bench.device
    gemm, attention = {}, {}
    for name, dtype in DTYPES.items():
        rows, widths = ROWS[kind], WIDTHS[kind]
        seconds = [product_s(bench, sizes, dtype) for sizes in itertools.product(rows, widths, widths)]
        gemm[name] = Products(list(rows), list(widths), list(widths), seconds)
        attention[name] = attention_rate(bench, SEQUENCE[kind], dtype)
    memory = []
    for elements in ELEMENTS[kind]:
        # one after the other, so that each has left the caches when its turn comes, as what a backward pass reads has
        count_of = max(2, min(SPREAD_BYTES // (8 * elements), 1024))
        pairs = [torch.ones(2, elements, device=device).requires_grad_() for _ in range(count_of)]
        turns = itertools.cycle([pair.unbind() for pair in pairs])
        memory.append((12.0 * elements, bench.seconds(lambda a=turns: operator.add(*next(a)))))
    return Load(count, gemm, attention, memory)


def product_s(bench: Bench, sizes: tuple[int, int, int], dtype: torch.dtype) -> float:
    """One of a linear layer's three products: forward, for the gradient of its input, and for that of its weight."""
    rows, inputs, outputs = sizes
    make = lambda *shape: torch.randn(shape, device=bench.device).to(dtype)  # noqa: E731
    x, weight, gradient = make(rows, inputs), make(outputs, inputs), make(rows, outputs)
    return bench.seconds(lambda: (x @ weight.T, gradient @ weight, gradient.T @ x)) / 3


def attention_rate(bench: Bench, sequence: int, dtype: torch.dtype) -> float:
    """Forward and backward, by the operations of a causal mask's half that the time model counts."""
    shape = (1, HEADS, sequence, HEAD_DIM)
    inputs = [torch.randn(shape, device=bench.device).to(dtype).requires_grad_() for _ in range(3)]
    gradient = torch.randn(shape, device=bench.device).to(dtype)

    def attend() -> Any:
        return torch.autograd.grad(F.scaled_dot_product_attention(*inputs, is_causal=True), inputs, gradient)

    forward = sequence**2 * HEADS * 2.0 * HEAD_DIM
    return forward * (1 + 2.5 / 0.8) / bench.seconds(attend)


def measure_exchanges(bench: Bench, count: int, info: RankInfo) -> list[Exchange]:
    """Of all sizes of groups on one node; where all ranks are busy, also between nodes."""
    found, nodes = [], info.world // info.ranks_per_node
    for size, spanned in group_sizes(count, nodes if count == info.ranks_per_node else 1):
        near, each = size // spanned, info.ranks_per_node
        groups = [
            [node * each + rank for node in range(start, start + spanned) for rank in range(first, first + near)]
            for start in range(0, nodes, spanned)
            for first in range(0, count, near)
        ]
        made = [dist.new_group(ranks) for ranks in groups]
        own = [number for number, ranks in enumerate(groups) if info.rank in ranks]
        if not own:
            continue
        group, ranks = made[own[0]], groups[own[0]]
        product = torch.randn(PRODUCT[bench.device.type], device=bench.device)
        for kind, start in COLLECTIVES.items():
            if kind == "send" and size > 2:
                continue
            points = []
            for sent in SENT[bench.device.type]:
                part = torch.zeros(sent // 4 // size, device=bench.device)
                whole = torch.zeros(len(part) * size, device=bench.device)
                collective = lambda a=start, b=whole, c=part: a(b, c, group, ranks)  # noqa: B023, E731
                seconds = bench.seconds_together(collective, lambda: product.T @ product)  # noqa: B023
                points.append((4.0 * len(whole), seconds / 2 if kind == "send" else seconds))
            found.append(Exchange(kind, size, spanned, count, points))
    return found


def group_sizes(count: int, nodes: int) -> Iterable[tuple[int, int]]:
    """Ranks of a group and nodes that it lies on: parts of a node, one rank of each node, and whole nodes."""
    yield from ((size, 1) for size in rising(count) if size > 1)
    for spanned in rising(nodes):
        if spanned > 1:
            yield from ((spanned * near, spanned) for near in sorted({1, count}))


def rising(most: int) -> list[int]:
    """1, 2, 4, ... as far as they divide `most`, and itself."""
    return sorted({most} | {1 << power for power in range(most.bit_length()) if most % (1 << power) == 0})


def _gather(whole: Tensor, part: Tensor, group: Any, ranks: list[int]) -> None:
    dist.all_gather_into_tensor(whole, part, group=group)


def _scatter(whole: Tensor, part: Tensor, group: Any, ranks: list[int]) -> None:
    dist.reduce_scatter_tensor(part, whole, group=group)


def _exchange(whole: Tensor, part: Tensor, group: Any, ranks: list[int]) -> None:
    dist.all_to_all_single(torch.empty_like(whole), whole, group=group)


def _send(whole: Tensor, part: Tensor, group: Any, ranks: list[int]) -> None:
    """There and back."""
    first, second = ranks
    if dist.get_rank() == first:
        dist.send(whole, second, group=group)
        dist.recv(whole, second, group=group)
    else:
        dist.recv(whole, first, group=group)
        dist.send(whole, first, group=group)


COLLECTIVES: dict[Kind, Callable[[Tensor, Tensor, Any, list[int]], None]] = {
    "all_gather": _gather,
    "reduce_scatter": _scatter,
    "all_to_all": _exchange,
    "send": _send,
}


def measure_engine(model: Path, device: torch.device, guard: Guard) -> dict[str, Any]:
    """Decode steps of one engine of one rank."""
    key = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as logs:
        try:
            engine = Engine(
                Model(path=model),
                Rollout(max_new_tokens=1024),
                name="engine 0",
                host=node_address([""]),
                key=key,
                device=device.type,
                seed=0,
                log=Path(logs) / "engine.log",
                guard=guard,
                answer_timeout_s=60.0,
            )
            say(f"the engine is healthy after {engine.wait_healthy():.0f} s")
            pid = engine.child.process.pid
            return asyncio.run(measure_engines([engine.address], key, name=model.name, processes=[pid]))
        except aiohttp.ClientError as error:
            raise EngineError(f"the engine no longer answered while it was measured: {error!r}") from error
        finally:
            guard.stop_children()


def describe(load: Load, exchanges: list[Exchange]) -> str:
    """What is most telling of one load."""
    fastest = ", ".join(f"{name} {products.rates().max() / 1e9:,.0f}" for name, products in load.gemm.items())
    moved, seconds = load.memory[-1]
    text = f"{load.ranks} at once: products in GFLOP/s {fastest}; memory {moved / seconds / 1e9:,.1f} GB/s"
    for one in exchanges:
        if one.kind == "all_gather":
            (_, least), (sent, most) = one.points[0], one.points[-1]
            where = f"{one.ranks} ranks" + (f" on {one.nodes} nodes" if one.nodes > 1 else "")
            text += f"; all-gather of {where} {1e6 * least:,.0f} us, {sent / most / 1e9:,.2f} GB/s"
    return text


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

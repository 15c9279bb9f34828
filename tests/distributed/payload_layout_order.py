"""One rank that measures the machine, and then seconds of training steps at one layout after the other.

Its argument is a file with a `layout_order.Plan`. Ranks that a layout does not need wait until it has been measured.
"""

from __future__ import annotations

import random
import time
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megarl.config import Layout, Model, Optimizer, read_model_shape
from megarl.data import Sequence
from megarl.layout import write_table
from megarl.model_engine import ModelEngine, TokenSequence
from megarl.runtime import connect, init_process_groups, rank_info
from megarl.trainer.sft import loss, weighted
from tests.distributed.layout_order import Case, Measured, Plan
from tools.calibrate_machine import calibrate

CPU = torch.device("cpu")
DEADLINE_S = 300.0


def main(file: str) -> None:
    plan, info = Plan.read(Path(file)), rank_info()
    control = connect(info, DEADLINE_S)
    init_process_groups(control, CPU, one_node=True, deadline_s=DEADLINE_S)
    start, busy, own = time.perf_counter(), busy_s(), time.process_time()
    table = calibrate(info, control, CPU, interval_s=plan.interval_s)
    dist.destroy_process_group()
    store, seconds = control.torch_store(), {}
    for name, case in plan.cases.items():
        if info.rank < case.ranks:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(name, store),
                rank=info.rank,
                world_size=case.ranks,
                timeout=timedelta(seconds=DEADLINE_S),
            )
            seconds[name] = step_seconds(plan, case)
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
        control.barrier(name)
    ours = sum(control.allgather(time.process_time() - own, float, what="seconds on cores"))
    if info.rank == 0:
        others = (busy_s() - busy - ours) / (time.perf_counter() - start) / psutil.cpu_count()
        write_table(plan.out / "table.json", table)
        Measured(seconds, max(others, 0.0)).write(plan.out / "measured.json")
    control.close()


def busy_s() -> float:
    """Seconds that all cores together have been busy since the machine's start."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


def step_seconds(plan: Plan, case: Case) -> list[float]:
    """Of whole updates; the first, which is slower, is left out."""
    layout, sequences, found = Layout.model_validate(case.layout), batch(plan), list[float]()
    engine = ModelEngine(
        Model(path=plan.model),
        read_model_shape(plan.model),
        layout,
        device=CPU,
        seed=0,
        max_tokens_per_rank=case.micro_batch * plan.tokens // layout.context,
        optimizer=Optimizer(learning_rate=1e-5),
        updates=plan.steps + 1,
    )
    for _ in range(plan.steps + 1):
        dist.barrier()
        start = time.perf_counter()
        engine.update(sequences, loss)
        dist.barrier()
        found.append(time.perf_counter() - start)
    return found[1:]


def batch(plan: Plan) -> list[TokenSequence]:
    """Equal sequences of random tokens; the last token of each is not read."""
    source, vocab = random.Random(0), read_model_shape(plan.model).vocab
    length = plan.tokens + 1
    rows = [[source.randrange(vocab) for _ in range(length)] for _ in range(plan.sequences)]
    return weighted([Sequence(row, [(1, length)]) for row in rows])

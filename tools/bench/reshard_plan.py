#!/usr/bin/env python
"""Reshard plans of large models: how long they take to make, and how many bytes they move.

    python tools/bench/reshard_plan.py             all cases: some minutes
    python tools/bench/reshard_plan.py --quick     the smallest and the largest of each model: under a minute

Weights are bfloat16, nodes have 8 ranks, buckets at most 512 MiB. Layouts are what such models are trained and served
with; "x8" has 8 engines on ranks of their own, otherwise both are on all ranks.
DeepSeek-V3 has 61 layers, which no number of stages divides: it is planned with 64 where there are stages.

Columns, GB of 10^9 bytes:
  plan      CPU seconds of one core: the table, the patterns, who sends, the buckets
  check     CPU seconds of the proof
  rank      CPU seconds of listing one rank's transfers of all buckets; transfers: their number
  shard     largest shard of an engine's rank
  served    engines that the trainer serves, of all; rounds: in which these pass on each bucket to the others
  needed    lower bound, over 8 of the engines' ranks: the mean of what their shards have beyond what is on their GPU
            already, from their boxes and not from the plan; of engines that are not served, their shards; most: the
            largest
  got       largest of what any rank gets
  sent      largest of what any rank of the trainer sends; passed: of what a rank of an engine passes on
  over      bytes that those 8 get, over their lower bound
  senders   the busiest sender over the mean of the trainer's ranks; by_got: over the rank that gets most
  whole     what a rank gets where all ranks gather the whole model, over what the busiest one gets here
  buckets   their number; loose: over the fewest in which the busiest rank could send or get what it does
  buffer    the largest part of a bucket that a rank needs; sends: that a rank of the trainer sends
A ratio is nan where nothing moves.

The last line has the worst of all cases, plan_v3_1024_s for DeepSeek-V3 on 1,024 ranks, the smallest of `whole`, and
relayed_sent_over_got_worst, the largest by_got where some engines are not served.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from megarl.checkpoint_engine import Engines, Plan, Training, check, make_plan, traffic
from megarl.config import Experts, Layout, ModelShape, TrainPlace, train_place
from megarl.layout import KNOWN
from megarl.weights import Box, EngineLayout, Parameter, model_parameters

NODE = 8
BUCKET_BYTES = 512 << 20
ITEM_BYTES = 2
GB = 1e9

QWEN3_8B, LLAMA3_70B, QWEN3_235B = KNOWN["qwen3-8b"], KNOWN["llama3.1-70b"], KNOWN["qwen3-235b-a22b"]
DEEPSEEK_V3 = KNOWN["deepseek-v3"]
DEEPSEEK_64 = replace(
    DEEPSEEK_V3,
    layers=64,
    experts=Experts(256, 8, 2048, tuple(range(3, 64)), shared_ffn=2048, score="sigmoid", correction_bias=True),
)


@dataclass(frozen=True)
class Case:
    model: str
    shape: ModelShape
    layout: Layout
    world: int
    tensor: int
    expert: int = 1
    elsewhere: int = 0
    """So many engines on ranks of their own; 0: on all of the trainer's."""
    quick: bool = False

    @property
    def engines(self) -> Engines:
        first, ranks = (self.world, self.elsewhere * self.tensor) if self.elsewhere else (0, self.world)
        starts = range(first, first + ranks, self.tensor)
        return Engines(tuple(tuple(range(start, start + self.tensor)) for start in starts), self.expert)

    @property
    def name(self) -> str:
        layout = self.layout
        parts = {"t": layout.tensor, "p": layout.pipeline, "e": layout.expert}
        trained = "".join(f"{key}{size}" for key, size in parts.items() if size > 1) or "whole"
        served = f"t{self.tensor}" + (f"e{self.expert}" if self.expert > 1 else "")
        served += f" x{self.elsewhere}" if self.elsewhere else ""
        return f"{self.model:11} {self.world:5} {trained + '>' + served:18}"


CASES = (
    Case("Qwen3-8B", QWEN3_8B, Layout(tensor=2), 8, 2, quick=True),
    Case("Qwen3-8B", QWEN3_8B, Layout(tensor=4, pipeline=2), 8, 1, quick=True),
    Case("Qwen3-8B", QWEN3_8B, Layout(tensor=4), 64, 2, elsewhere=32),
    Case("Qwen3-8B", QWEN3_8B, Layout(tensor=4, pipeline=2), 2048, 2, quick=True),
    Case("Qwen3-8B", QWEN3_8B, Layout(tensor=2), 8, 1, elsewhere=64, quick=True),
    Case("Qwen3-8B", QWEN3_8B, Layout(tensor=4, pipeline=2), 16, 2, elsewhere=16),
    Case("Llama-3-70B", LLAMA3_70B, Layout(tensor=8, pipeline=2), 16, 8, quick=True),
    Case("Llama-3-70B", LLAMA3_70B, Layout(tensor=8, pipeline=4), 128, 4),
    Case("Llama-3-70B", LLAMA3_70B, Layout(tensor=8, pipeline=4), 512, 8, elsewhere=64),
    Case("Llama-3-70B", LLAMA3_70B, Layout(tensor=8, pipeline=8), 2048, 8, quick=True),
    Case("Llama-3-70B", LLAMA3_70B, Layout(tensor=8, pipeline=2), 32, 8, elsewhere=8),
    Case("Llama-3-70B", LLAMA3_70B, Layout(tensor=8, pipeline=4), 64, 4, elsewhere=64, quick=True),
    Case("Qwen3-235B", QWEN3_235B, Layout(tensor=4, pipeline=2, expert=16), 64, 8, 8, quick=True),
    Case("Qwen3-235B", QWEN3_235B, Layout(tensor=4, pipeline=2, expert=32), 256, 16, 8),
    Case("Qwen3-235B", QWEN3_235B, Layout(tensor=4, pipeline=2, expert=32), 512, 8, 1, elsewhere=64),
    Case("Qwen3-235B", QWEN3_235B, Layout(tensor=4, pipeline=2, expert=32), 2048, 8, 8, quick=True),
    Case("Qwen3-235B", QWEN3_235B, Layout(tensor=4, pipeline=2, expert=8), 32, 8, elsewhere=32),
    Case("Qwen3-235B", QWEN3_235B, Layout(tensor=4, pipeline=2, expert=16), 64, 8, 8, elsewhere=64, quick=True),
    Case("DeepSeek-V3", DEEPSEEK_64, Layout(pipeline=4, expert=16), 64, 16, 16, elsewhere=8),
    Case("DeepSeek-V3", DEEPSEEK_64, Layout(pipeline=4, expert=16), 64, 32, 32, elsewhere=64, quick=True),
    Case("DeepSeek-V3", DEEPSEEK_64, Layout(pipeline=16, expert=16), 256, 16, 16),
    Case("DeepSeek-V3", DEEPSEEK_V3, Layout(expert=64), 1024, 32, 32, quick=True),
    Case("DeepSeek-V3", DEEPSEEK_64, Layout(pipeline=16, expert=64), 1024, 32, 32, quick=True),
    Case("DeepSeek-V3", DEEPSEEK_64, Layout(pipeline=16, expert=64), 1024, 32, 1),
    Case("DeepSeek-V3", DEEPSEEK_64, Layout(tensor=2, pipeline=8, expert=32), 1024, 32, 32, elsewhere=32),
    Case("DeepSeek-V3", DEEPSEEK_64, Layout(pipeline=16, expert=64), 2048, 32, 32, quick=True),
)
COLUMNS = {
    "plan": "6.2f",
    "check": "6.2f",
    "rank": "6.2f",
    "transfers": "9.0f",
    "shard": "7.2f",
    "served": "7.0f",
    "rounds": "6.0f",
    "needed": "7.2f",
    "most": "7.2f",
    "got": "7.2f",
    "sent": "7.2f",
    "passed": "7.2f",
    "over": "6.3f",
    "senders": "7.3f",
    "by_got": "7.3f",
    "whole": "7.2f",
    "buckets": "7.0f",
    "loose": "5.2f",
    "buffer": "6.2f",
    "sends": "6.2f",
}
Row = dict[str, float]
T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the smallest and the largest of each model")
    cases = [case for case in CASES if case.quick or not parser.parse_args().quick]
    print(f"{'model':11} ranks {'layout':18}" + " ".join(f"{c:>{width(form)}}" for c, form in COLUMNS.items()))
    rows = []
    for case in cases:
        rows.append(measure(case))
        print(case.name + " ".join(f"{rows[-1][column]:{form}}" for column, form in COLUMNS.items()), flush=True)
    print(headline(cases, rows))


def width(form: str) -> str:
    return form.split(".")[0]


def measure(case: Case) -> Row:
    engines = case.engines
    training = Training(case.layout, case.world)

    def planned() -> Plan:
        return make_plan(case.shape, training, engines, ranks_per_node=NODE, bucket_bytes=BUCKET_BYTES)

    plan, plan_s = timed(planned)
    _, check_s = timed(lambda: check(plan))
    rank = engines.ranks[0][-1]
    transfers, rank_s = timed(lambda: sum(1 for b in range(len(plan.buckets)) for _ in plan.transfers(b, rank)))
    flow = traffic(plan)
    sends = flow.sent - flow.relayed
    sent, got, kept = (part.sum(0) for part in (sends, flow.received, flow.kept))
    busiest = max(sent.max(), (got + kept).max())
    served = {rank for number in plan.served for rank in engines.ranks[number]}
    ranks = np.array(engines.ranks).ravel()
    table = model_parameters(case.shape, case.layout.tensor)
    some = np.unique(ranks[np.linspace(0, len(ranks) - 1, 8).astype(int)]).tolist()
    needed = {rank: needed_bytes(case, table, rank, served=rank in served) for rank in some}
    whole = sum(int(np.prod(size)) for parameter in table for size in parameter.hf_shapes) * ITEM_BYTES
    return {
        "plan": plan_s,
        "check": check_s,
        "rank": rank_s,
        "transfers": transfers,
        "shard": (got + kept).max() / GB,
        "served": len(plan.served),
        "rounds": len(plan.relays),
        "needed": float(np.mean(list(needed.values()))) / GB,
        "most": max(needed.values()) / GB,
        "got": got.max() / GB,
        "sent": sent.max() / GB,
        "passed": flow.relayed.sum(0).max() / GB,
        "over": over(sum(got[rank] for rank in some), sum(needed.values())),
        "senders": over(sent.max(), sent[: case.world].mean()),
        "by_got": over(sent.max(), got.max()),
        "whole": over(whole, got.max()),
        "buckets": len(plan.buckets),
        "loose": len(plan.buckets) / math.ceil(busiest / BUCKET_BYTES),
        "buffer": (flow.received + flow.kept).max() / GB,
        "sends": sends.max() / GB,
    }


def over(some: float, base: float) -> float:
    return some / base if base else math.nan


def timed(action: Callable[[], T]) -> tuple[T, float]:
    start = time.process_time()
    return action(), time.process_time() - start


def needed_bytes(case: Case, table: Sequence[Parameter], rank: int, *, served: bool) -> int:
    """Of the engine's shard on `rank`, what the trainer does not hold there, or all if other engines send it."""
    place = next(ranks.index(rank) for ranks in case.engines.ranks if rank in ranks)
    at = train_place(rank, case.world, case.layout) if served and rank < case.world else None
    layout, experts = case.layout, case.shape.experts
    counts: Counter[tuple[Parameter, bool]] = Counter()
    for parameter in table:
        stage = layout.pipeline - 1 if parameter.last_stage else 0
        if parameter.layer is not None:
            stage = parameter.layer // (case.shape.layers // layout.pipeline)
        held = at is not None and at.pipeline == stage
        if parameter.expert is not None and experts is not None:
            if parameter.expert // (experts.count // case.expert) != place // (case.tensor // case.expert):
                continue
            held = held and at is not None and at.expert == parameter.expert // (experts.count // layout.expert)
        # one stands for all that lie alike
        counts[replace(parameter, megatron="", hf=(), engine=None, layer=None), held] += 1
    return sum(count * missing_bytes(case, *key, at, place) for key, count in counts.items())


def missing_bytes(case: Case, parameter: Parameter, held: bool, at: TrainPlace | None, place: int) -> int:
    layout, engine_layout, shapes = parameter.layout, parameter.engine_layout, parameter.hf_shapes
    assert isinstance(layout, EngineLayout)
    assert isinstance(engine_layout, EngineLayout)
    of_expert = parameter.expert is not None
    size = case.tensor // case.expert if of_expert else case.tensor
    wanted, have = engine_layout.engine_boxes(shapes, place % size, size), []
    if held and at is not None:
        index, split = (at.expert_tensor, case.layout.expert_tensor) if of_expert else (at.tensor, case.layout.tensor)
        have = layout.boxes(shapes, index, split)
    area = sum(box.rows * box.columns for box in wanted)
    area -= sum(common(a, b) for a in wanted for b in have if a.part == b.part)
    return area * (4 if parameter.float32 else ITEM_BYTES)


def common(a: Box, b: Box) -> int:
    rows = min(a.row + a.rows, b.row + b.rows) - max(a.row, b.row)
    columns = min(a.column + a.columns, b.column + b.columns) - max(a.column, b.column)
    return max(0, rows) * max(0, columns)


def headline(cases: Sequence[Case], rows: Sequence[Row]) -> str:
    pairs = zip(cases, rows, strict=True)
    v3 = [row["plan"] for case, row in pairs if case.model == "DeepSeek-V3" and case.world == 1024]
    moving = [row for row in rows if row["got"]]
    figures = {
        "plan_v3_1024_s": max(v3),
        "plan_worst_s": max(row["plan"] for row in rows),
        "check_worst_s": max(row["check"] for row in rows),
        "rank_worst_s": max(row["rank"] for row in rows),
        "over_lower_bound_worst": max(row["over"] for row in moving),
        "senders_worst": max(row["senders"] for row in moving),
        "gather_whole_over_got_least": min(row["whole"] for row in moving),
        "buffer_worst_gb": max(row["buffer"] for row in rows),
        "sends_worst_gb": max(row["sends"] for row in rows),
        "relayed_sent_over_got_worst": max(row["by_got"] for row in rows if row["rounds"]),
    }
    return " ".join(f"{name}={value:.3f}" for name, value in figures.items())


if __name__ == "__main__":
    main()

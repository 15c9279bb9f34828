#!/usr/bin/env python
"""How evenly batches of variable length divide among data-parallel ranks: megarl's plan beside equal tokens.

    python tools/bench/packing.py             1,000 batches: about two minutes
    python tools/bench/packing.py --quick     100 batches: under a minute

A batch is 256 to 1,024 sequences, each rounded up to a multiple of 8 tokens and at most 32,768 long; their lengths are
log-normal (median 2,000 tokens, three widths), or all short but for one of 32,768. Micro-batches hold 32,768 tokens.
Each batch is planned for 2, 8, 32 and 64 ranks in three ways:
  plan      megarl's plan_microbatches
  kk        ranks of equal tokens, then micro-batches of equal tokens, both divided by the differencing method of
            Karmarkar and Karp ("The differencing method of set partitioning", 1982), with as many micro-batches a rank
            as it takes until all are within the budget
  kk_flops  the same, but ranks of equal FLOPs

Columns are "median p95 worst":
  rank      FLOPs of the largest rank over the mean: what a step waits for where ranks meet once, at its end
  rounds    sum over rounds of the costliest k-th micro-batch, over the mean of ranks: the same where ranks meet in
            each micro-batch, as with expert parallelism or pipeline stages
  limit     max(1, largest sequence over the mean of ranks): no plan has a lower rank or rounds
  unused    share of the micro-batches' tokens that no sequence fills
  batches   micro-batches of a rank over the fewest that the budget allows

FLOPs are those of training a dense model of 7B (Llama 2 7B: P = 6.6e9 weights besides the input embedding, L = 32
layers, H = 4,096 wide) on n tokens: 6 P n + 6 L H n^2. The second term is attention (PaLM, Chowdhery et al. 2022,
appendix B), halved because it is causal.

The last line is over all lengths and numbers of ranks: the median, p95 and worst of each plan's rank, of the limit, and
of rank and rounds over the limit, which is what a plan can be blamed for; the mean of unused; and plan_100k_cpu_s, the
CPU seconds of megarl's plan of 100,000 sequences.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heapify, heappop, heappush

from megarl.data import plan_microbatches

BUDGET = LONGEST = 32_768
ALIGNMENT = 8
RANKS = (2, 8, 32, 64)
SIGMAS = {"sigma 0.4": 0.4, "sigma 0.8": 0.8, "sigma 1.2": 1.2}
SHAPES = (*SIGMAS, "one long")
COLUMNS = ("rank", "rounds", "limit", "unused", "batches")

Plan = list[list[list[int]]]
Row = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="100 batches instead of 1,000: under a minute")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths (default 0)")
    args = parser.parse_args()
    generator = random.Random(args.seed)
    rows: dict[str, list[Row]] = {name: [] for name in PLANNERS}
    aligned = total = 0
    print(f"{'lengths':10} ranks {'':9}" + "".join(f"{name:24}" for name in COLUMNS))
    for shape in SHAPES:
        sets = [lengths_of(shape, generator) for _ in range(25 if args.quick else 250)]
        for ranks in RANKS:
            for name, planner in PLANNERS.items():
                some = [measure(planner(up(lengths), ranks), up(lengths), ranks) for lengths in sets]
                rows[name] += some
                print(f"{shape:10} {ranks:5} {name:9}" + "".join(f"{spread(some, c):24}" for c in COLUMNS), flush=True)
        total += sum(map(sum, sets))
        aligned += sum(sum(up(lengths)) for lengths in sets)
    print(f"alignment to multiples of {ALIGNMENT} tokens adds {aligned / total - 1:.2%}")
    print(headline(rows, max(large_batch_seconds(ranks) for ranks in RANKS)))


def lengths_of(shape: str, generator: random.Random) -> list[int]:
    """Tokens of each sequence, before they are aligned."""
    size = generator.choice([256, 512, 1024])
    if shape == "one long":
        return [LONGEST, *(generator.randint(200, 1000) for _ in range(size - 1))]
    return [log_normal(generator, SIGMAS[shape]) for _ in range(size)]


def log_normal(generator: random.Random, sigma: float) -> int:
    return min(LONGEST, max(16, round(2000 * generator.lognormvariate(0, sigma))))


def up(lengths: list[int]) -> list[int]:
    return [-(-length // ALIGNMENT) * ALIGNMENT for length in lengths]


def flops(length: int) -> float:
    return 6 * 6.6e9 * length + 6 * 32 * 4096 * length**2


def our_plan(lengths: list[int], ranks: int) -> Plan:
    return plan_microbatches(lengths, max_tokens=BUDGET, ranks=ranks, cost=flops)


def differenced_plan(lengths: list[int], ranks: int, *, weight: Callable[[int], float]) -> Plan:
    shares = differencing([weight(length) for length in lengths], ranks)
    count = max(-(-sum(lengths[i] for i in share) // BUDGET) for share in shares)
    while True:
        plan = []
        for share in shares:
            parts = differencing([lengths[i] for i in share], count)
            plan.append([[share[place] for place in part] for part in parts])
        if all(sum(lengths[i] for i in batch) <= BUDGET for rank in plan for batch in rank):
            return plan
        count += 1


def differencing(values: Sequence[float], parts: int) -> list[list[int]]:
    """Karmarkar and Karp: join the two partitions of the widest spread, largest part to smallest, until one is left."""
    heap = [(-value, i, [(value, [i]), *([(0, [])] * (parts - 1))]) for i, value in enumerate(values)]
    heapify(heap)
    while len(heap) > 1:
        _, i, one = heappop(heap)
        _, _, other = heappop(heap)
        joined = [(a + b, p + q) for (a, p), (b, q) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heappush(heap, (joined[-1][0] - joined[0][0], i, joined))
    return [part for _, part in heap[0][2]]


PLANNERS: dict[str, Callable[[list[int], int], Plan]] = {
    "plan": our_plan,
    "kk": partial(differenced_plan, weight=float),
    "kk_flops": partial(differenced_plan, weight=flops),
}


def measure(plan: Plan, lengths: list[int], ranks: int) -> Row:
    # The costliest micro-batch first: the order that suits rounds best, whatever the planner's own.
    costs = [sorted((sum(flops(lengths[i]) for i in batch) for batch in rank), reverse=True) for rank in plan]
    mean = sum(map(sum, costs)) / ranks
    capacity = ranks * BUDGET
    return {
        "rank": max(map(sum, costs)) / mean,
        "rounds": sum(map(max, zip(*costs, strict=True))) / mean,
        "limit": max(1.0, flops(max(lengths)) / mean),
        "unused": 1 - sum(lengths) / (capacity * len(plan[0])),
        "batches": len(plan[0]) / -(-sum(lengths) // capacity),
    }


def three(values: list[float]) -> tuple[float, float, float]:
    return statistics.median(values), statistics.quantiles(values, n=20, method="inclusive")[-1], max(values)


def spread(rows: list[Row], column: str) -> str:
    return " ".join(f"{value:.3f}" for value in three([row[column] for row in rows]))


def large_batch_seconds(ranks: int) -> float:
    """CPU seconds of planning 100,000 sequences: one thread, so also the time that it takes on an idle core."""
    generator = random.Random(0)
    lengths = up([log_normal(generator, 0.8) for _ in range(100_000)])
    start = time.process_time()
    our_plan(lengths, ranks)
    return time.process_time() - start


def headline(rows: dict[str, list[Row]], seconds: float) -> str:
    """Over all lengths and numbers of ranks; over_limit is what a planner can be blamed for."""
    series = {f"{name}_rank": [row["rank"] for row in some] for name, some in rows.items()}
    series["limit"] = [row["limit"] for row in rows["plan"]]
    series |= {f"{name}_over_limit": [row["rank"] / row["limit"] for row in some] for name, some in rows.items()}
    series |= {
        f"{name}_rounds_over_limit": [row["rounds"] / row["limit"] for row in some] for name, some in rows.items()
    }
    figures = {
        f"{name}_{word}": value
        for name, values in series.items()
        for word, value in zip(("median", "p95", "worst"), three(values), strict=True)
    }
    figures |= {f"{name}_unused": statistics.mean(row["unused"] for row in some) for name, some in rows.items()}
    figures["plan_100k_cpu_s"] = seconds
    return " ".join(f"{name}={value:.4f}" for name, value in figures.items())


if __name__ == "__main__":
    main()

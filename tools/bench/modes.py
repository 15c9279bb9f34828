#!/usr/bin/env python
"""Synchronous, one-step-off and asynchronous training of carry addition in each placement: speed and reward.

    python tools/bench/modes.py             26 steps of each mode: some 10 minutes
    python tools/bench/modes.py --quick     3 steps of two modes: within two minutes on 2 quiet cores

Of two ranks, each with a core of its own, one trains and one has an engine (placement disaggregated); or (--placement)
both do both, or one does both and the other has an engine. Data, checkpoint and batch are the quickstart's. All modes
generate and train as many samples, and all of their steps are counted: from the first, in which nothing is under way
yet, to the last, in which nothing more is generated.

Columns:
  samples/s      generated and trained;  over sync: as a ratio
  trainer idle   share of the time in which the trainer waited for groups, or for engines to take new weights
  engine idle    share of the time in which the engine had no request under way
  lag            mean versions by which the oldest token of a step lags;  stall: seconds of engines for each publication
  reward         mean of the last third of the steps
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from megarl.observe import read_metrics

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "launch/recipes/carry_addition_rl.yaml"
MODES = {
    "sync": "{max_lag: 0}",
    "one_step_off": "{max_lag: 1}",
    "async_1": "{max_lag: 1, interrupt: true}",
    "async_2": "{max_lag: 2, interrupt: true}",
    "async_4": "{max_lag: 4, interrupt: true}",
}
QUICK = ("sync", "async_2")
PLACEMENTS = {
    "disaggregated": "{type: disaggregated, train_ranks: 1}",
    "colocated": "{type: colocated}",
    "hybrid": "{type: hybrid, train_ranks: 1}",
}
TAKES_TURNS = ("sync", "async_1", "async_2", "async_4")
"""Where rollouts and training take turns there is nothing between."""
CORRECTION = "algorithm.correction={type: importance, level: token, action: truncate, high: 2.0}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 steps of sync and async_2")
    parser.add_argument("--model", type=Path, default=Path("runs/carry_addition_sft/hf"), help="a Hugging Face model")
    parser.add_argument("--steps", type=int, help="steps of each mode (default 26, quick 3)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each mode, with seeds from 0 on (1)")
    parser.add_argument("--placement", choices=PLACEMENTS, default="disaggregated")
    given = parser.parse_args()
    modes = QUICK if given.quick else MODES if given.placement == "disaggregated" else TAKES_TURNS
    steps = given.steps or (3 if given.quick else 26)
    out = ROOT / "runs" / f"modes-{time.strftime('%Y%m%d-%H%M%S')}"
    out.mkdir(parents=True)
    rows: dict[str, list[dict[str, float]]] = {}
    for seed in range(given.seeds):
        for mode in modes:
            run = out / f"{mode}-{seed}"
            train(run, mode, PLACEMENTS[given.placement], given.model, steps=steps, seed=seed)
            rows.setdefault(mode, []).append(measured(run))
    found = {mode: {name: statistics.median(row[name] for row in of) for name in of[0]} for mode, of in rows.items()}
    names = list(found["sync"])
    print(f"{given.placement}, {steps} steps, {given.seeds} seeds; load average {os.getloadavg()[0]:.1f}")
    print(f"{'':14}" + "".join(f"{name:>13}" for name in ("over sync", *names)))
    base = found["sync"]["samples/s"]
    for mode, row in found.items():
        print(f"{mode:14}" + "".join(f"{value:13.3f}" for value in (row["samples/s"] / base, *row.values())))
    print(
        " ".join(f"{mode}_over_sync={row['samples/s'] / base:.3f}" for mode, row in found.items() if mode != "sync")
        + " "
        + " ".join(f"{mode}_reward={row['reward']:.3f}" for mode, row in found.items())
    )


def train(run: Path, mode: str, placement: str, model: Path, *, steps: int, seed: int) -> None:
    overrides = [
        f"run_dir={run}",
        f"model.path={model}",
        "layout.tensor=1",
        f"placement={placement}",
        f"mode={MODES[mode]}",
        CORRECTION,
        f"steps={steps}",
        f"optimizer.warmup_steps={min(5, steps)}",
        "evaluation.problems=0",
        "checkpoint.final=false",
        f"seed={seed}",
    ]
    with run.with_suffix(".log").open("w") as log:
        command = ["bash", "launch/local.sh", "-n", "2", RECIPE, *overrides]
        ended = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False)
    if ended.returncode:
        raise SystemExit(f"{mode} failed, see {log.name}")


def measured(run: Path) -> dict[str, float]:
    rows = read_metrics(run)
    last = rows[-max(len(rows) // 3, 1) :]
    times = [sum(row["seconds"].values()) for row in rows]
    return {
        "samples/s": sum(_samples(row) for row in rows) / sum(times),
        "trainer idle": sum(row["seconds"]["generate"] + row["seconds"]["publish"] for row in rows) / sum(times),
        "engine idle": statistics.fmean([row["rollout/idle"] for row in rows], times),
        "lag": statistics.fmean(row.get("rollout/lag_max", 0.0) for row in rows),
        "stall": statistics.median(row["publish/stall_s"] for row in rows),
        "reward": statistics.fmean(row["reward"] for row in last),
    }


def _samples(row: dict[str, Any]) -> float:
    return row["tokens"] / row["length"]


if __name__ == "__main__":
    main()

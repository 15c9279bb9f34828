#!/usr/bin/env python
"""Whether each algorithm learns: short runs on carry addition from one supervised checkpoint, and their table.

    python tools/learning_curves.py                          eight algorithms, two seeds each: half an hour on 2 cores
    python tools/learning_curves.py --only rloo gspo         of these alone
    python tools/learning_curves.py --steps 10 --seeds 1     shorter

Runs lie in runs/learning_curves; those that are there are not made again. Accuracies are of the first 256 held-out
problems at temperature 1, before and after; the reward is the mean over the first and the last quarter of the steps.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

from megarl.observe import read_evaluations, read_metrics

ROOT = Path(__file__).resolve().parents[1]
RUNS = Path("runs/learning_curves")
CHECKPOINT = Path("runs/carry_addition_sft/hf")
RECIPE = "launch/recipes/carry_addition_rl.yaml"
DIVERGENCE = "algorithm.kl={coefficient: 0.01, estimator: k1, where: reward}"

ALGORITHMS = {
    "GRPO": ["algorithm.normalizer.type=sequence", "algorithm.minibatches=2", "algorithm.kl.coefficient=0.001"],
    "Dr. GRPO": ["algorithm.advantage.type=dr_grpo", "algorithm.normalizer={type: constant, tokens: 160}"],
    "RLOO": ["algorithm.advantage.type=rloo", "algorithm.loss.type=policy_gradient"],
    "REINFORCE++": ["algorithm.advantage.type=reinforce_plus_plus", DIVERGENCE],
    "DAPO": [
        "algorithm.loss.clip_high=0.28",
        "algorithm.minibatches=2",
        "algorithm.skip_truncated=true",
        "batch.sampling.type=informative",
        "reward.overlong_buffer=40",
    ],
    "GSPO": ["algorithm.loss.type=gspo", "algorithm.normalizer.type=sequence", "algorithm.minibatches=2"],
    "CISPO": ["algorithm.loss.type=cispo", "algorithm.minibatches=2"],
    "PPO": [
        "algorithm.advantage.type=gae",
        "algorithm.minibatches=2",
        f"critic={{type: critic, model: {{path: {CHECKPOINT}}}, optimizer: {{learning_rate: 1e-3}}, warmup_steps: 3}}",
        DIVERGENCE,
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), help="algorithms to run")
    parser.add_argument("--steps", type=int, default=26, help="steps of each run (default 26)")
    parser.add_argument("--seeds", type=int, default=2, help="seeds of each algorithm (default 2)")
    args = parser.parse_args()
    if args.steps < 4 or args.seeds < 1:
        parser.error(f"--steps {args.steps} --seeds {args.seeds}: expected at least 4 steps and 1 seed")
    if not (ROOT / CHECKPOINT).is_dir():
        sys.exit(f"{CHECKPOINT} is not there; make it with launch/quickstart.sh or the recipe carry_addition_sft.yaml")
    print("| algorithm | seed | accuracy | greedy | reward | answer's tokens |", flush=True)
    print("|---|---|---|---|---|---|", flush=True)
    gains = [row(name, seed, args.steps) for name in args.only for seed in range(args.seeds)]
    print(f"runs={len(gains)} least_gain={min(gains):.3f} median_gain={statistics.median(gains):.3f}")


def row(name: str, seed: int, steps: int) -> float:
    """Make a run, if it is not there, and print what it came to; returns by how much the accuracy rose."""
    run = RUNS / f"{name.replace(' ', '').replace('.', '_')}_{steps}_seed{seed}"
    path = ROOT / run
    if not path.is_dir() or len(read_evaluations(path)) < 2:
        make(name, run, seed, steps)
    before, after = (read_evaluations(path)[i] for i in (0, -1))
    rows, quarter = read_metrics(path), steps // 4
    first, last = ([r[key] for key in ("reward", "length")] for r in (mean(rows[:quarter]), mean(rows[-quarter:])))
    arrows = [
        f"{before['accuracy']:.2f} -> {after['accuracy']:.2f}",
        f"{before['accuracy_greedy']:.2f} -> {after['accuracy_greedy']:.2f}",
        f"{first[0]:.2f} -> {last[0]:.2f}",
        f"{first[1]:.0f} -> {last[1]:.0f}",
    ]
    print(f"| {name} | {seed} | {' | '.join(arrows)} |", flush=True)
    return float(after["accuracy"] - before["accuracy"])


def mean(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.fmean(row[key] for row in rows) for key in ("reward", "length")}


def make(name: str, run: Path, seed: int, steps: int) -> None:
    subprocess.run(["rm", "-rf", ROOT / run], check=True)
    log = (ROOT / run).with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        options = [f"run_dir={run}", f"seed={seed}", f"steps={steps}", "optimizer.warmup_steps=3", *ALGORITHMS[name]]
        command = ["bash", "launch/local.sh", "-n", "2", RECIPE, *options, "checkpoint.final=false"]
        if subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, stdin=subprocess.DEVNULL).returncode:
            sys.exit(f"{name}, seed {seed}: the run failed; see {log}")


if __name__ == "__main__":
    main()

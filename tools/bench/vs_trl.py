#!/usr/bin/env python
"""GRPO on carry addition: megarl against TRL's GRPOTrainer, one after the other, on this machine's CPU.

    python tools/bench/vs_trl.py             26 steps each, with accuracies
    python tools/bench/vs_trl.py --quick     3 steps each, no accuracies

Same checkpoint, problems in the same order, batch (32 prompts x 8), learning rate, warm-up and optimizer. megarl runs
as its users run it, with 2 data-parallel ranks and an engine on each; TRL runs in an environment of its own with as
many threads as there are cores. Reported are medians of the seconds of a step and their ratio, and beside them the
least time that a step's multiplications would take on these cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from megarl.config import read_model_shape
from megarl.observe import read_evaluations, read_metrics

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "data/carry_addition"
TRL_ENVIRONMENT = ROOT / ".venv-trl"
BATCH = {"prompts": 32, "group_size": 8, "max_new_tokens": 160, "learning_rate": 1e-4, "warmup_steps": 5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 steps each and no accuracies: under a minute")
    parser.add_argument("--checkpoint", type=Path, help="Hugging Face directory to start from (default: made by SFT)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    steps, problems = (3, 0) if args.quick else (26, 256)
    make_trl_environment()
    checkpoint = args.checkpoint or supervised_checkpoint()
    out = ROOT / "runs" / f"vs_trl-{time.strftime('%Y%m%d-%H%M%S')}"
    out.mkdir(parents=True)
    ours = run_megarl(checkpoint, out / "megarl", steps=steps, problems=problems, seed=args.seed)
    theirs = run_trl(checkpoint, out / "trl.log", steps=steps, problems=problems, seed=args.seed)
    report(ours, theirs, least_seconds(checkpoint, ours["tokens"]))


def make_trl_environment() -> None:
    """TRL wants other versions of its libraries than megarl, so it gets an environment of its own, once."""
    stamp = TRL_ENVIRONMENT / "complete"
    if stamp.exists():
        return
    print("making .venv-trl (a few minutes, once)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", TRL_ENVIRONMENT], check=True)
    pip = [TRL_ENVIRONMENT / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "-r", ROOT / "tools/bench/requirements-trl.txt"], check=True)
    stamp.touch()


def supervised_checkpoint() -> Path:
    """The result of the SFT recipe; trained now if it is not there."""
    path = ROOT / "runs/carry_addition_sft/hf"
    if not path.exists():
        print("training the supervised checkpoint (about two minutes, once)", flush=True)
        subprocess.run([sys.executable, "launch/prepare_carry_addition.py", DATA], cwd=ROOT, check=True)
        run_job("launch/recipes/carry_addition_sft.yaml", path.parent, "checkpoint.final=false")
    return path


def run_job(recipe: str, run_dir: Path, *overrides: str) -> None:
    log = run_dir.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        command = ["bash", "launch/local.sh", "-n", "2", recipe, f"run_dir={run_dir}", *overrides]
        if subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, stdin=subprocess.DEVNULL).returncode:
            sys.exit(f"megarl's run failed; see {log}")


def run_megarl(checkpoint: Path, run_dir: Path, *, steps: int, problems: int, seed: int) -> dict[str, Any]:
    run_job(
        "launch/recipes/carry_addition_rl.yaml",
        run_dir,
        f"model.path={checkpoint}",
        f"data.train={DATA}/train.jsonl",
        f"data.test={DATA}/test.jsonl",
        f"steps={steps}",
        f"seed={seed}",
        "layout.tensor=1",
        f"batch.prompts={BATCH['prompts']}",
        f"batch.group_size={BATCH['group_size']}",
        f"rollout.max_new_tokens={BATCH['max_new_tokens']}",
        f"optimizer.learning_rate={BATCH['learning_rate']}",
        f"optimizer.warmup_steps={min(BATCH['warmup_steps'], steps)}",
        f"evaluation.problems={problems}",
        "checkpoint.final=false",
    )
    rows, evaluations = read_metrics(run_dir), read_evaluations(run_dir)
    return {
        "step_seconds": [sum(row["seconds"].values()) for row in rows],
        "phases": {name: statistics.median(row["seconds"][name] for row in rows) for name in rows[0]["seconds"]},
        "tokens": statistics.median(row["tokens"] for row in rows),
        "before": [evaluations[0][key] for key in ("accuracy", "accuracy_greedy")] if evaluations else [0.0, 0.0],
        "after": [evaluations[-1][key] for key in ("accuracy", "accuracy_greedy")] if evaluations else [0.0, 0.0],
    }


def run_trl(checkpoint: Path, log: Path, *, steps: int, problems: int, seed: int) -> dict[str, Any]:
    options = {**BATCH, "warmup_steps": min(BATCH["warmup_steps"], steps)}
    options |= {"steps": steps, "problems": problems, "seed": seed, "threads": os.cpu_count()}
    flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [TRL_ENVIRONMENT / "bin/python", ROOT / "tools/bench/trl_grpo.py", checkpoint, DATA, *flags]
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    with log.open("w") as errors:
        done = subprocess.run(
            command, cwd=log.parent, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    if done.returncode:
        sys.exit(f"TRL's run failed; see {log}")
    return json.loads(done.stdout.splitlines()[-1])


def least_seconds(checkpoint: Path, tokens: float) -> float:
    """The multiplications of a step at the speed of a large matrix product on all cores.

    A token costs 2 operations a weight to generate, and 6 to learn from.
    """
    shape = read_model_shape(checkpoint)
    torch.set_num_threads(os.cpu_count() or 1)
    a = torch.randn(2048, 2048)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return tokens * 8 * shape.parameters / (2 * 2048**3 / statistics.median(times))


def report(ours: dict[str, Any], theirs: dict[str, Any], least: float) -> None:
    our_s, their_s = statistics.median(ours["step_seconds"]), statistics.median(theirs["step_seconds"])
    print("megarl, seconds of a step by phase:", {name: round(s, 3) for name, s in ours["phases"].items()})
    for name, result in [("megarl", ours), ("trl", theirs)] if theirs["after"][0] else []:
        print(
            f"{name}: {sum(result['step_seconds']):.1f} s for {len(result['step_seconds'])} steps; accuracy"
            f" {result['before'][0]:.3f} -> {result['after'][0]:.3f} (temperature 1),"
            f" {result['before'][1]:.3f} -> {result['after'][1]:.3f} (greedy)"
        )
    figures = {
        "megarl_step_s": f"{our_s:.3f}",
        "trl_step_s": f"{their_s:.3f}",
        "speedup": f"{their_s / our_s:.2f}",
        "limit_step_s": f"{least:.3f}",
    }
    if theirs["after"][0]:
        figures["accuracy_ratio"] = f"{ours['after'][0] / theirs['after'][0]:.2f}"
    print(" ".join(f"{name}={value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()

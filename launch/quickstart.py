#!/usr/bin/env python
"""The main job from start to end: a tiny Qwen3 learns to add, by demonstrations and then by reward.

Started by launch/quickstart.sh. Each stage is an ordinary job of launch/local.sh; this script starts them, shows their
metrics and sums up.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megarl.observe import read_evaluations, read_metrics, watch

RANKS = 2
DATA = Path("data/carry_addition")
SHOWN_SAMPLES = 3
END_S = 10.0

console = Console(highlight=False)
interrupted = threading.Event()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the run (default 0)")
    parser.add_argument("--steps", type=int, default=26, metavar="N", help="GRPO steps (default 26)")
    args = parser.parse_args()
    if args.seed < 0 or args.steps < 1:
        parser.error(f"--seed must be at least 0 and --steps at least 1, got {args.seed} and {args.steps}")
    start = time.monotonic()
    run = Path("runs") / f"quickstart-{datetime.now():%Y%m%d-%H%M%S}"
    run.mkdir(parents=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interrupted.set())
    try:
        prepare(run)
        shared = [f"seed={args.seed}", "checkpoint.final=false"]
        stage(run / "sft", "SFT", "launch/recipes/carry_addition_sft.yaml", shared)
        warmup = min(5, args.steps)
        rl = [f"model.path={run}/sft/hf", f"steps={args.steps}", f"optimizer.warmup_steps={warmup}"]
        stage(run / "rl", "GRPO", "launch/recipes/carry_addition_rl.yaml", [*shared, *rl])
    except KeyboardInterrupt:
        sys.exit("\nquickstart: interrupted; everything it started has ended")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    summarise(run, seconds=time.monotonic() - start)


def prepare(run: Path) -> None:
    """Make the task's data and initial model, once."""
    with (run / "prepare.log").open("w") as log:
        command = [sys.executable, "launch/prepare_carry_addition.py", str(DATA)]
        failed = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
        stop_if_interrupted()
        if failed:
            fail(run / "prepare.log", "the task's data could not be made")


def stage(run_dir: Path, name: str, recipe: str, overrides: list[str]) -> None:
    """Run one recipe as a job of its own and show it; on failure show its last words and end."""
    steps = int(next((o.split("=")[1] for o in overrides if o.startswith("steps=")), recipe_steps(recipe)))
    log = run_dir.with_suffix(".log")

    def running() -> bool:
        stop_if_interrupted()
        return job.poll() is None

    with log.open("w") as output:
        job = subprocess.Popen(
            ["bash", "launch/local.sh", "-n", str(RANKS), recipe, f"run_dir={run_dir}", *overrides],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that Ctrl-C comes here, and the whole job can be ended from here
        )
        try:
            watch(run_dir, name=name, steps=steps, running=running, console=console)
        except BaseException:
            end(job)
            raise
    if job.returncode:
        fail(log, f"the {name} stage ended with exit code {job.returncode}")


def stop_if_interrupted() -> None:
    """Only here: raised by the signal's handler, an exception might come at a place that swallows it."""
    if interrupted.is_set():
        raise KeyboardInterrupt


def recipe_steps(recipe: str) -> int:
    from megarl.config import load_recipe

    return load_recipe(Path(recipe), []).steps


def end(job: subprocess.Popen[bytes]) -> None:
    """End a job's launcher, which ends its ranks, which end their children."""
    os.killpg(job.pid, signal.SIGTERM)
    try:
        job.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def fail(log: Path, what: str) -> None:
    lines = log.read_text(errors="replace").splitlines()[-30:]
    sys.exit("\n".join([*lines, f"quickstart: {what}; everything it printed is in {log}"]))


def summarise(run: Path, seconds: float) -> None:
    """Accuracies, samples, the reward curve, where everything lies; the last line has the figures."""
    before, after = read_evaluations(run / "rl")[0], read_evaluations(run / "rl")[-1]
    table = Table(title=f"accuracy on held-out problems, before and after {after['step']} GRPO steps")
    for column in ("", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    for name, key in [("temperature 1", "accuracy"), ("greedy", "accuracy_greedy")]:
        table.add_row(name, f"{before[key]:.3f}", f"{after[key]:.3f}")
    console.print(table)
    for sample in after["samples"][:SHOWN_SAMPLES]:
        verdict = "right" if sample["score"] else f"wrong, it is {sample['answer']}"
        console.print(f"[bold]{sample['prompt']}[/bold]  ({verdict})")
        console.print("\n".join(f"    {line}" for line in sample["response"].splitlines()), markup=False)
    rows = read_metrics(run / "rl")
    draw(rows, [before, after], run / "reward.png")
    mismatch = max(row["mismatch/logprob_max"] for row in rows)
    console.print(f"largest difference between trainer's and engines' logprobs: {mismatch:.1e}")
    for what, path in [
        ("reward curve", run / "reward.png"),
        ("trained model (Hugging Face directory)", run / "rl" / "hf"),
        ("metrics, evaluations, logs", run / "rl"),
    ]:
        console.print(f"{what}: {path}", soft_wrap=True)
    print(
        f"quickstart: accuracy {before['accuracy']:.2f} -> {after['accuracy']:.2f} (temperature 1),"
        f" {before['accuracy_greedy']:.2f} -> {after['accuracy_greedy']:.2f} (greedy), {seconds:.0f} s"
    )


def draw(rows: list[dict[str, Any]], evaluations: list[dict[str, Any]], path: Path) -> None:
    """The reward of each step, and the held-out accuracy where it was measured."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([row["step"] for row in rows], [row["reward"] for row in rows], label="reward of the step's rollouts")
    steps = [evaluation["step"] for evaluation in evaluations]
    for key, label in [("accuracy", "held out, temperature 1"), ("accuracy_greedy", "held out, greedy")]:
        axes.plot(steps, [evaluation[key] for evaluation in evaluations], "o--", label=label)
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="GRPO on carry addition")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()

"""How far the layout tuner's models of time and memory are from published training runs.

    python tools/bench/layout_accuracy.py [CSV]                      seconds; the default is the project's own table
    python tools/bench/layout_accuracy.py [CSV] --fit                fits megarl.layout.Shares to it: half a minute
    python tools/bench/layout_accuracy.py [CSV] --leave-out model    fits without each model in turn: many minutes

Errors of step time are |predicted / measured - 1| of rows of quality A or B that give a time. Model-parallel rows are
those whose tensor, pipeline, context or expert size is above 1. A grid is one model on so many GPUs of one kind, with
one batch and precision, in one source, measured in at least 8 layouts; its rank correlation is Spearman's. Rows that
cannot be asked, for want of sizes or of a layout, are counted and named.

--leave-out predicts each model with shares that were fitted to the rows of all others; so each program, GPU or scale.
Every fit starts from neutral guesses, so that nothing of what is left out is remembered.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megarl.layout import Shares, fits, step_time  # noqa: E402
from tools.bench.layout_fit import fit, show  # noqa: E402
from tools.bench.published_layouts import Run, machine, read_rows, read_runs  # noqa: E402

TABLE = ROOT / "tests/unit/published_layouts.csv"
GRID = 8
"""Layouts that make a grid."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("csv", type=Path, nargs="?", default=TABLE)
    parser.add_argument("--fit", action="store_true", help="fit the shares and print them; report with those")
    parser.add_argument("--leave-out", choices=GROUPS, action="append", default=[], help="fit without each; repeatable")
    arguments = parser.parse_args()
    runs, left_out = read_runs(read_rows(arguments.csv))
    print(f"{len(runs) + len(left_out)} rows, {len(left_out)} of which cannot be asked:")
    for (model, why), count in Counter((row["model"], why) for row, why in left_out).items():
        print(f"  {model}: {why} ({count})")
    shares = fit(runs) if arguments.fit else Shares()
    if arguments.fit:
        print(show(shares))
    results = time_errors(runs, shares) | grid_correlations(runs, shares) | memory_errors(runs, shares)
    for group in arguments.leave_out:
        results |= left_out_errors(runs, group)
    print(*(f"{name}={value:.3f}" for name, value in results.items()))


def timed(runs: Sequence[Run]) -> list[Run]:
    """Those whose step time is known and to be compared."""
    return [run for run in runs if run.seconds is not None and run.row["quality"] in ("A", "B")]


def error(run: Run, shares: Shares) -> float:
    """Signed, relative."""
    assert run.seconds is not None
    return step_time(run.training, machine(run.row, shares)).seconds / run.seconds - 1


def summary(errors: Sequence[float]) -> tuple[float, float]:
    """Median and 90th percentile of their sizes."""
    if not errors:
        return math.nan, math.nan
    sizes = np.abs(errors)
    return float(np.median(sizes)), float(np.percentile(sizes, 90))


def time_errors(runs: Sequence[Run], shares: Shares) -> dict[str, float]:
    groups: dict[str, list[float]] = defaultdict(list)
    chosen: list[float] = []
    for run in timed(runs):
        one = error(run, shares)
        kind = "model-parallel" if run.model_parallel else "data-parallel"
        groups[f"{kind}, all"].append(one)
        groups[f"{kind}, {run.row['framework']}, {run.row['gpu']}"].append(one)
        groups[f"{kind}, {run.training.decoder.name}"].append(one)
        if run.model_parallel:
            chosen.append(one)
    print("step time: rows, median error, 90th percentile, median of the signed error")
    for name, errors in sorted(groups.items()):
        median, most = summary(errors)
        print(f"  {len(errors):4d} {median:6.1%} {most:6.1%} {statistics.median(errors):+6.1%}  {name}")
    median, most = summary(chosen)
    return {"time_median": median, "time_p90": most}


def grid_correlations(runs: Sequence[Run], shares: Shares) -> dict[str, float]:
    grids: dict[tuple[str, ...], list[Run]] = defaultdict(list)
    names = ("source", "gpu", "n_gpus", "seq", "gbs", "precision", "kind")
    for run in timed(runs):
        source = run.row["source"].split(";")[0]
        decoder = run.training.decoder
        grids[(f"{decoder.name} of width {decoder.hidden}", source, *(run.row[name] for name in names[1:]))].append(run)
    found, spreads = [], repeats(runs)
    print(f"rank correlation in grids of {GRID} layouts or more")
    for key, members in sorted(grids.items()):
        if len({(run.training.layout, run.training.micro_batch, run.training.software) for run in members}) < GRID:
            continue
        found.append(correlation(members, shares))
        print(f"  {found[-1]:.3f} {len(members):4d} rows, {', '.join(key)}")
        sure = [run for run in members if not run.doubtful]
        if len(sure) < len(members):
            print(f"        {correlation(sure, shares):.3f} without {len(members) - len(sure)} doubtful ones")
        if spread := spreads.get(members[0].row["framework"]):
            best = expected_correlation([run.seconds or 0.0 for run in members], spread[0])
            print(f"        {best:.3f} is expected of the same runs on another day")
    print("the same question measured again: standard deviation of log seconds, rows beyond the first of each")
    for name, (spread, count) in sorted(spreads.items()):
        print(f"  {spread:6.1%} {count:4d}  {name}")
    return {"grid_lowest": min(found, default=math.nan)}


def correlation(runs: Sequence[Run], shares: Shares) -> float:
    measured = [run.seconds or 0.0 for run in runs]
    predicted = [(1 + error(run, shares)) * seconds for run, seconds in zip(runs, measured, strict=True)]
    return spearman(predicted, measured)


def expected_correlation(seconds: Sequence[float], spread: float, draws: int = 1000) -> float:
    """Of seconds and themselves with their logarithms' errors: what a model that knows all about a run can reach."""
    source = np.random.default_rng(0)
    again = np.array(seconds) * np.exp(source.normal(0.0, spread, (draws, len(seconds))))
    return statistics.fmean(spearman(list(one), seconds) for one in again)


def repeats(runs: Sequence[Run]) -> dict[str, tuple[float, int]]:
    """By program: what no model of time can foresee, for its rows ask the same. Releases and days differ."""
    same: dict[object, list[Run]] = defaultdict(list)
    for run in timed(runs):
        same[(run.training, run.row["gpu"], run.row["framework"])].append(run)
    squares: dict[str, list[float]] = defaultdict(list)
    for members in same.values():
        logs = np.log([run.seconds or math.nan for run in members])
        if len(logs) > 1:
            each = float(((logs - logs.mean()) ** 2).sum()) / (len(logs) - 1)
            squares[members[0].row["framework"]] += [each] * (len(logs) - 1)
    return {name: (math.sqrt(statistics.fmean(values)), len(values)) for name, values in squares.items()}


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Correlation of ranks, of which equal values share the mean."""
    ranks = [
        (np.searchsorted(np.sort(values), values) + np.searchsorted(np.sort(values), values, side="right")) / 2
        for values in (np.array(left), np.array(right))
    ]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def memory_errors(runs: Sequence[Run], shares: Shares) -> dict[str, float]:
    """Shares of rows that ran out of memory and are predicted so, and of those that ran and would be refused."""
    found: dict[str, list[bool]] = {"ok": [], "oom": []}
    refused: Counter[str] = Counter()
    for run in runs:
        if run.row["quality"] in ("A", "B") and run.row["status"] in found:
            too_much = not fits(run.training, machine(run.row, shares))
            found[run.row["status"]].append(too_much)
            refused[run.row["framework"]] += too_much and run.row["status"] == "ok"
    share = {status: sum(flags) / len(flags) if flags else math.nan for status, flags in found.items()}
    print(f"memory: {share['oom']:.1%} of {len(found['oom'])} rows that ran out of it are predicted so;")
    by_program = ", ".join(f"{count} of {name}" for name, count in refused.items() if count) or "none"
    print(f"  {share['ok']:.1%} of {len(found['ok'])} rows that ran would be refused: {by_program}")
    return {"oom_found": share["oom"], "ok_refused": share["ok"]}


def model(run: Run) -> str:
    """BigScience's are variants of one, which are left out together."""
    program = run.row["framework"]
    return program if program.startswith("Megatron-DeepSpeed") else run.training.decoder.name


def scale(run: Run) -> str:
    """Powers of four GPUs."""
    return f"{4 ** int(math.log(run.training.gpus, 4)):5d} GPUs or more"


GROUPS: dict[str, Callable[[Run], str]] = {
    "model": model,
    "program": lambda run: run.row["framework"],
    "gpu": lambda run: run.row["gpu"],
    "scale": scale,
}
"""What can be left out."""


def left_out_errors(runs: Sequence[Run], group: str) -> dict[str, float]:
    members: dict[str, list[Run]] = defaultdict(list)
    name = GROUPS[group]
    for run in timed(runs):
        if run.model_parallel:
            members[name(run)].append(run)
    errors: list[float] = []
    print(f"step time of each {group}, from shares fitted to the others: rows, median error, 90th percentile")
    for key, mine in sorted(members.items()):
        others = fit([run for run in runs if name(run) != key])
        found = [error(run, others) for run in mine]
        errors += found
        median, most = summary(found)
        print(f"  {len(found):4d} {median:6.1%} {most:6.1%} {statistics.median(found):+6.1%}  {key}", flush=True)
    median, most = summary(errors)
    return {f"{group}_left_out_median": median, f"{group}_left_out_p90": most}


if __name__ == "__main__":
    main()

"""The models of time and memory agree with published training runs; see tools/bench/layout_accuracy.py."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.layout import Shares, step_time
from tools.bench.layout_accuracy import TABLE, error, left_out_errors, memory_errors, repeats, spearman, timed
from tools.bench.layout_fit import BOUNDS, fit, neutral
from tools.bench.published_layouts import Run, machine, read_rows, read_runs

ROOT = Path(__file__).parents[2]


def runs() -> list[Run]:
    return read_runs(read_rows(TABLE))[0]


def test_errors_are_within_what_the_tuner_promises() -> None:
    command = [sys.executable, str(ROOT / "tools/bench/layout_accuracy.py")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    found = {name: float(value) for name, value in (part.split("=") for part in printed.splitlines()[-1].split())}
    assert found["time_median"] <= 0.10
    assert found["time_p90"] <= 0.25
    assert found["oom_found"] >= 0.90
    assert found["ok_refused"] <= 0.05


@pytest.mark.parametrize("status", ["ok", "oom", ""])
def test_another_table_may_have_rows_of_one_kind_or_none(status: str, tmp_path: Path) -> None:
    lines = TABLE.read_text().splitlines(keepends=True)
    file = tmp_path / "other.csv"
    file.write_text("".join([lines[0], *(line for line in lines[1:200] if status and f",{status}," in line)]))
    command = [sys.executable, str(ROOT / "tools/bench/layout_accuracy.py"), str(file)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    found = dict(part.split("=") for part in printed.splitlines()[-1].split())
    assert (found["time_median"] == "nan") == (status != "ok")
    assert (found["oom_found"] == "nan") == (status != "oom")


def test_the_fit_finds_shares_that_made_the_times() -> None:
    """Nothing of the shares in use is known to it: it starts from the middle of its bounds."""
    chosen = [run for run in runs() if run.model == "llama-65b" and run.seconds is not None]
    truth = replace(neutral(), memory=0.85, collective_s=5e-5, kernel_s=3e-6)
    made = [Run(run.row, run.training, step_time(run.training, machine(run.row, truth)).seconds) for run in chosen[::6]]
    found = fit(made)
    before, after = (sum(abs(error(run, shares)) for run in made) / len(made) for shares in (neutral(), found))
    assert after < before / 4
    for name, (low, high) in BOUNDS.items():
        value = getattr(found, name)
        kinds = (
            [one for kind, one in value.items() if kind not in ("fp32", "bf16")] if isinstance(value, dict) else [value]
        )
        assert all(low * 0.999 <= one <= high * 1.001 for one in kinds), name


def test_what_no_row_tells_stays_at_the_guess() -> None:
    chosen = [run for run in runs() if run.model == "llama-65b" and run.seconds is not None]
    found = fit(chosen[::12], rounds=2)
    assert found.gemm["A100"] != neutral().gemm["A100"]
    assert found.gemm["B200"] == pytest.approx(neutral().gemm["B200"])
    assert found.scan == pytest.approx(neutral().scan)


def test_a_group_is_predicted_from_the_others_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """With one model's times doubled, its errors are those of a fit that never saw them."""
    names = {"llama-65b": 8, "llama-13b": 8}
    chosen = [run for name, step in names.items() for run in timed(runs()) if run.model == name][::5]
    doubled = [replace(run, seconds=2 * run.seconds) if run.model == "llama-65b" else run for run in chosen]  # type: ignore[operator]
    for each in (chosen, doubled):
        left_out_errors(each, "model")
    plain, twice = (
        next(line.split() for line in text.splitlines() if line.endswith("llama-65b"))
        for text in capsys.readouterr().out.split("step time of each model")[1:]
    )
    signed = [float(words[3].rstrip("%")) / 100 for words in (plain, twice)]
    assert (1 + signed[0]) / (1 + signed[1]) == pytest.approx(2, rel=0.01)


def test_rows_that_failed_otherwise_say_nothing_of_memory() -> None:
    some = [run for run in runs() if run.model == "llama-65b"][:40]
    failed = [replace(run, row=run.row | {"status": "failed"}) for run in some]
    assert memory_errors(some + failed, Shares()) == memory_errors(some, Shares())


def test_repeats_are_rows_that_ask_the_same() -> None:
    one, other = (next(run for run in timed(runs()) if run.model == name) for name in ("llama-65b", "llama-13b"))
    seconds = [100.0, 110.0, 105.0]
    made = [replace(one, seconds=each) for each in seconds] + [replace(other, seconds=1.0)]
    ((spread, count),) = repeats(made).values()
    assert count == 2
    assert spread == pytest.approx(float(np.std(np.log(seconds), ddof=1)))


def test_ranks_that_are_equal_share_their_mean() -> None:
    assert spearman([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]) == pytest.approx(1)
    assert spearman([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1)
    assert spearman([1.0, 1.0, 2.0], [1.0, 2.0, 2.0]) == pytest.approx(0.5)

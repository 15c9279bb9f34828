"""The models of time and memory agree with published training runs; see tools/bench/layout_accuracy.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megarl.layout import Shares, step_time
from tools.bench.layout_accuracy import TABLE, error, spearman
from tools.bench.layout_fit import BOUNDS, fit
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


def test_sizes_that_a_row_leaves_open_follow_from_its_parameters() -> None:
    for run in runs():
        billions = float(run.row["params_b"])
        # MPT's positions are as long as the sequences; the others are parts of models, named without the embedding
        if run.row["hidden"] and not run.model.startswith(("mpt", "gpt-18b", "gpt-20b")):
            assert run.training.decoder.parameters / 1e9 == pytest.approx(billions, rel=0.08), run.model


def test_a_row_that_cannot_be_asked_is_named_with_the_reason() -> None:
    good = next(run.row for run in runs() if run.model == "llama-65b")
    bad = [good | change for change in ({"gpu": "V100"}, {"n_gpus": "100"}, {"tp": ""}, {"hidden": ""}, {"seq": "x"})]
    kept, left_out = read_runs([good, *bad])
    assert len(kept) == 1
    reasons = [why for _, why in left_out]
    assert reasons[0] == "GPU V100 is not known"
    assert "cannot be divided" in reasons[1]
    assert reasons[2:4] == ["tp is not given", "the model's sizes are not given"]


def test_the_fit_finds_shares_that_made_the_times() -> None:
    chosen = [run for run in runs() if run.model == "llama-65b" and run.seconds is not None]
    truth = Shares(memory=0.8, collective_s=3e-5)
    made = [Run(run.row, run.training, step_time(run.training, machine(run.row, truth)).seconds) for run in chosen[::6]]
    found = fit(made, Shares(), rounds=6)
    before, after = (sum(abs(error(run, shares)) for run in made) / len(made) for shares in (Shares(), found))
    assert after < before / 4
    for name, (low, high) in BOUNDS.items():
        value = getattr(found, name)
        kinds = (
            [one for kind, one in value.items() if kind not in ("fp32", "bf16")] if isinstance(value, dict) else [value]
        )
        assert all(low <= one <= high for one in kinds), name


def test_ranks_that_are_equal_share_their_mean() -> None:
    assert spearman([1.0, 2.0, 3.0], [10.0, 20.0, 30.0]) == pytest.approx(1)
    assert spearman([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1)
    assert spearman([1.0, 1.0, 2.0], [1.0, 2.0, 2.0]) == pytest.approx(0.5)

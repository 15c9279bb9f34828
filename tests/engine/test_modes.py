"""Rollouts that run ahead of training: no token lags too far, and a run that was killed trains on the same groups."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import assert_all_gone, local_job

pytestmark = pytest.mark.engine

RECIPE = "launch/recipes/carry_addition_rl.yaml"
MISMATCH_LIMIT = 1e-4
APART = [
    "layout.tensor=1",
    "placement={type: disaggregated, train_ranks: 1}",
    "optimizer.learning_rate=1e-3",
    "algorithm.entropy_coefficient=0.1",  # all answers are wrong, and versions should differ
]


def check(rows: list[dict[str, Any]], *, max_lag: int) -> None:
    assert all(0 <= row["rollout/lag_max"] <= max_lag for row in rows)
    assert any(row["rollout/stale_fraction"] > 0 for row in rows), "nothing ran ahead"
    assert all(row.get("mismatch/logprob_max", 0.0) <= MISMATCH_LIMIT for row in rows)
    assert all(row["publish/stall_s"] > 0 for row in rows)


def test_an_asynchronous_run_that_is_killed_goes_on_with_the_same_groups(
    tmp_path: Path, rl_overrides: list[str]
) -> None:
    run, steps = tmp_path / "run", 7
    longer = ["batch.prompts=8", "rollout.max_new_tokens=64", "rollout.chunk_tokens=8", "checkpoint.every=2"]
    overrides = [*rl_overrides, *APART, *longer, f"steps={steps}", "mode={max_lag: 2, interrupt: true}"]
    with local_job(run, RECIPE, *overrides) as job:
        job.wait_for_step(3)
        processes = job.processes()
        processes["rank 0"].send_signal(signal.SIGKILL)
        assert job.wait() != 0
        assert_all_gone(processes)
        before = job.metrics()
    with local_job(run, RECIPE, *overrides, "--resume") as job:
        assert job.wait() == 0, job.output()[-3000:]
        rows = job.metrics()
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    check(rows, max_lag=2)
    assert "journal: steps " in (run / "logs/coordinator.log").read_text()
    for row, again in zip(before, rows, strict=False):
        assert [row[name] for name in ("reward", "tokens", "length_max")] == [
            again[name] for name in ("reward", "tokens", "length_max")
        ]
        assert row["grad_norm"] > 0
        assert row["grad_norm"] == pytest.approx(again["grad_norm"], rel=1e-4)


def test_one_step_off(tmp_path: Path, rl_overrides: list[str]) -> None:
    """Each response is of one version, and no step has any of its own version but the first."""
    with local_job(tmp_path / "run", RECIPE, *rl_overrides, *APART, "steps=3", "mode.max_lag=1") as job:
        assert job.wait() == 0, job.output()[-3000:]
        rows = job.metrics()
    assert "mode.max_lag is 1 and algorithm.correction is none" in job.output()
    check(rows, max_lag=1)
    assert [row["rollout/stale_fraction"] for row in rows] == [0.0, 1.0, 1.0]
    assert all("publish/wait_s" in row for row in rows)

"""A gradient that is not finite ends the run with a line that says so, and the run can go on from its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import local_job

pytestmark = pytest.mark.distributed

RECIPE = "launch/recipes/carry_addition_sft.yaml"


def test_a_gradient_that_is_not_finite_is_told_plainly(tmp_path: Path, addition: Path) -> None:
    run_dir = tmp_path / "run"
    small = [
        f"model.path={addition}/model",
        f"data.train={addition}/demonstrations.jsonl",
        "batch.sequences=8",
        "optimizer.warmup_steps=0",
        "checkpoint.every=1",
    ]
    with local_job(run_dir, RECIPE, *small, "steps=1") as job:
        assert job.wait() == 0, job.output()
    with local_job(run_dir, RECIPE, *small, "steps=4", "optimizer.learning_rate=1e30", "--resume") as job:
        assert job.wait() == 1
        last = job.output().splitlines()[-1]
        assert "the gradient norm of update 3 is nan, expected a finite number" in last
        assert "Traceback" not in job.output()
    (run_dir / "checkpoints/step_000002").rename(tmp_path / "overflown")
    with local_job(run_dir, RECIPE, *small, "steps=3", "--resume") as job:
        assert job.wait() == 0, job.output()
        assert "resumed from" in job.output()
        assert [row["step"] for row in job.metrics()] == [1, 2, 3]

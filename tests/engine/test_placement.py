"""Jobs whose second rank has an engine and does not train: with the first one's engine beside it, or alone."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import local_job

pytestmark = pytest.mark.engine

RECIPE = "launch/recipes/carry_addition_rl.yaml"
MISMATCH_LIMIT = 1e-4
# answers that are all wrong are learned from all the same, so that each version has other weights
LEARNING = ["layout.tensor=1", "algorithm.entropy_coefficient=0.1", "optimizer.learning_rate=1e-3"]


def check_rows(rows: list[dict[str, Any]], steps: int) -> None:
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(row["grad_norm"] > 0 and row["mismatch/logprob_max"] <= MISMATCH_LIMIT for row in rows)


def test_apart_an_engine_is_replaced_and_the_run_stops_and_resumes(tmp_path: Path, rl_overrides: list[str]) -> None:
    run, apart = tmp_path / "run", "placement={type: disaggregated, train_ranks: 1}"
    with local_job(run, RECIPE, *rl_overrides, *LEARNING, apart, "steps=1000") as job:
        job.wait_for_step(1)
        processes = job.processes()
        assert "engine 1" not in processes
        for name in ("scheduler 0", "engine 0"):
            processes[name].kill()
        killed_at = len(job.metrics())
        job.wait_for_step(killed_at + 2)
        job.processes()["rank 1"].send_signal(signal.SIGUSR1)
        assert job.wait(60) == 0, job.output()[-3000:]
        done = len(job.metrics())
    check_rows(job.metrics(), done)
    assert "engine 0 is started anew" in job.output()
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step_{done:06d}"]
    resumed = [*rl_overrides, *LEARNING, apart, f"steps={done + 2}", "--resume"]
    with local_job(run, RECIPE, *resumed, launcher="torchrun") as job:
        assert job.wait() == 0, job.output()[-3000:]
    check_rows(job.metrics(), done + 2)
    assert f"{done} steps are done" in job.output()
    assert (run / "hf/model.safetensors").exists()


def test_an_engine_beside_the_trainer_and_one_elsewhere(tmp_path: Path, rl_overrides: list[str]) -> None:
    """Both read each version from disk, and the trainer has a reference, a critic and exports."""
    run, model = tmp_path / "run", rl_overrides[0].partition("=")[2]
    critic = f"critic={{type: critic, model: {{path: {model}}}, optimizer: {{learning_rate: 1e-3}}}}"
    options = [
        "placement={type: hybrid, train_ranks: 1}",
        "publish.type=disk",
        "steps=2",
        "checkpoint={final: true, export_every: 1}",
        critic,
        "algorithm={advantage: {type: gae}, kl: {coefficient: 0.01}, entropy_coefficient: 0.1}",
    ]
    with local_job(run, RECIPE, *rl_overrides, *LEARNING, *options) as job:
        assert job.wait() == 0, job.output()[-3000:]
    assert "2 engines are healthy" in job.output()
    check_rows(job.metrics(), 2)
    assert sorted(path.name for path in run.glob("hf_step_*")) == ["hf_step_000001", "hf_step_000002"]
    assert (run / "checkpoints/step_000002/critic").is_dir()
    assert not list(run.glob("version_*"))

"""What goes wrong while weights are on their way: a new engine serves, or the job ends with a name; never a mixture.

That each step's log-probabilities are those of its own version is seen by the mismatch with the trainer's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs import END_LIMIT_S, START_LIMIT_S, assert_all_gone, local_job, wait_until

pytestmark = pytest.mark.engine

RECIPE = "launch/recipes/carry_addition_rl.yaml"
MISMATCH_LIMIT = 1e-4
DEADLINE_S = 30.0


def sabotage(fault: str, rank: int) -> list[str]:
    """In the first step. Ranks keep half of the model each, so that all have something to send."""
    own = f"algorithm.advantage={{type: own, function: 'tests.engine.sabotage:advantage', options: {{fault: {fault}"
    return [
        f"{own}, step: 1, rank: {rank}}}}}",
        "layout.tensor=2",
        "publish.bucket_mib=1",
        f"runtime.deadline_s={DEADLINE_S:g}",
        "steps=3",
        "optimizer.learning_rate=1e-3",
    ]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("the engine is killed", "did not answer /update_weights_from_tensor"),
        ("the engine is stopped", "did not answer /update_weights_from_tensor: TimeoutError"),
        ("a bit is flipped", "has other weights than the trainer in 1 tensors"),
    ],
)
def test_an_engine_that_fails_is_replaced_and_gets_the_version(
    fault: str, said: str, tmp_path: Path, rl_overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = run_with(fault, tmp_path, rl_overrides, monkeypatch, said)
    assert [row["publish/engines_replaced"] for row in rows] == [1, 0, 0]
    assert all(row["mismatch/logprob_max"] <= MISMATCH_LIMIT for row in rows)


def run_with(
    fault: str, tmp_path: Path, overrides: list[str], monkeypatch: pytest.MonkeyPatch, said: str
) -> list[dict[str, Any]]:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    with local_job(tmp_path / "run", RECIPE, *overrides, *sabotage(fault, rank=1)) as job:
        assert job.wait() == 0, job.output()[-3000:]
        assert f"engine 1 did not take new weights, and is started anew: engine 1 {said}" in job.output().replace(
            "rank 0 of the engine: ", "engine 1 "
        )
        return job.metrics()


def test_an_engine_that_fails_again_and_again_ends_the_job(
    tmp_path: Path, rl_overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    overrides = [*rl_overrides, *sabotage("the engine is killed", rank=0), "rollout.restarts=0"]
    with local_job(tmp_path / "run", RECIPE, *overrides) as job:
        assert job.wait() != 0
        assert "engine 0 failed after 0 restarts (rollout.restarts): engine 0 did not answer" in job.output()


def test_a_rank_that_is_stopped_is_named(
    tmp_path: Path, rl_overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No version was published: the job ends in its deadline."""
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    with local_job(tmp_path / "run", RECIPE, *rl_overrides, *sabotage("the rank is stopped", rank=1)) as job:
        wait_until(lambda: {"rank 1", "scheduler 1"} <= job.processes().keys(), START_LIMIT_S, job.output)
        processes = job.processes()
        assert job.wait() != 0
        assert f"rank 0 waited {DEADLINE_S:.0f} s for rank 1 to send" in job.output()
        assert_all_gone(processes, END_LIMIT_S)
        assert job.metrics() == []

"""What goes wrong while weights are on their way: a new engine serves, or the job ends with a name; never a mixture.

That each step's log-probabilities are those of its own version is seen by the mismatch with the trainer's.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.jobs import END_LIMIT_S, ROOT, START_LIMIT_S, assert_all_gone, local_job, wait_until

pytestmark = pytest.mark.engine

RECIPE = "launch/recipes/carry_addition_rl.yaml"
MISMATCH_LIMIT = 1e-4
DEADLINE_S = 20.0


FAULTS = {
    "the engine is killed": "engine 1 did not answer /update_weights_from_tensor",
    "the engine is stopped": "engine 1 did not answer /update_weights_from_tensor: TimeoutError",
    "a bit is flipped": "rank 0 of the engine: has other weights than the trainer in 1 tensors",
}
"""And what is said of them."""


def overrides(*faults: str) -> list[str]:
    """One in each step, in rank 1. Ranks have half of the model each, so that all have something to send."""
    own = f"{{type: own, function: 'tests.engine.sabotage:advantage', options: {{faults: {[*faults]}, rank: 1}}}}"
    return [
        f"algorithm.advantage={own}",
        "layout.tensor=2",
        "publish.bucket_mib=1",
        f"runtime.deadline_s={DEADLINE_S:g}",
        "optimizer.learning_rate=1e-3",
        f"steps={len(faults) + 1}",
    ]


def test_an_engine_that_fails_is_replaced_and_gets_the_version(
    tmp_path: Path, rl_overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with local_job(tmp_path / "run", RECIPE, *rl_overrides, *overrides(*FAULTS)) as job:
        assert job.wait() == 0, job.output()[-3000:]
        rows, output = job.metrics(), job.output()
    assert [row["publish/engines_replaced"] for row in rows] == [1, 1, 1, 0]
    assert all(row["mismatch/logprob_max"] <= MISMATCH_LIMIT for row in rows)
    for said in FAULTS.values():
        assert f"engine 1 did not take new weights, and is started anew: {said}" in output


def test_a_rank_that_is_stopped_is_named(
    tmp_path: Path, rl_overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version is not published: the job ends within its deadline."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with local_job(tmp_path / "run", RECIPE, *rl_overrides, *overrides("the rank is stopped")) as job:
        wait_until(lambda: {"rank 1", "scheduler 1"} <= job.processes().keys(), START_LIMIT_S, job.output)
        processes = job.processes()
        assert job.wait() != 0
        said = rf"rank 0 waited {DEADLINE_S:.0f} s for rank 1 to (take|send)"
        assert re.search(said, job.output()), job.output()[-3000:]
        assert_all_gone(processes, END_LIMIT_S)
        assert job.metrics() == []

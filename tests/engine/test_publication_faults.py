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
    "a bit is flipped": "rank 0 of the engine: has other weights than the trainer in 1 tensors",
    "the engine is killed in a rollout": "engine 1 was asked for ",
    "the engine is stopped in a rollout": "engine 1 made no progress for 4 s",
}
"""And what is said of them."""


def overrides(*faults: str, rank: int = 1) -> list[str]:
    """One in each step, in `rank`. Ranks have half of the model each, so that all have something to send."""
    own = f"{{type: own, function: 'tests.engine.sabotage:advantage', options: {{faults: {[*faults]}, rank: {rank}}}}}"
    return [
        f"algorithm.advantage={own}",
        "layout.tensor=2",
        "publish.bucket_mib=1",
        "optimizer.learning_rate=1e-3",
        f"steps={len(faults) + 1}",
    ]


def test_an_engine_that_fails_is_replaced_and_gets_the_version(
    tmp_path: Path, rl_overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts lose nothing: what a step lacks, or has twice, the queue does not give out."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    longer = ["batch.prompts=16", "batch.group_size=8", "rollout.max_new_tokens=64", "rollout.stall_s=4"]
    with local_job(tmp_path / "run", RECIPE, *rl_overrides, *longer, *overrides(*FAULTS)) as job:
        assert job.wait() == 0, job.output()[-3000:]
        rows, output = job.metrics(), job.output()
    assert all(row["mismatch/logprob_max"] <= MISMATCH_LIMIT for row in rows)
    assert [row["rollout/engines_lost"] for row in rows] == [0, 0, 0, 1, 1]
    for said in FAULTS.values():
        assert f"engine 1 is started anew: {said}" in output
    assert output.count("is started anew") == len(FAULTS)


def test_an_engine_that_is_lost_while_the_model_trains_is_not_waited_for(
    tmp_path: Path, rl_overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped, and would not answer whoever has weights for it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    apart = [
        "placement={type: disaggregated, train_ranks: 1}",
        "mode={max_lag: 2, interrupt: true}",
        "layout.tensor=1",
        "rollout.stall_s=4",
        "rollout.max_new_tokens=64",
        "rollout.server_args={max_running_requests: 4}",  # most of what is asked waits
    ]
    fault = overrides("the engine elsewhere is stopped", rank=0)
    with local_job(tmp_path / "run", RECIPE, *rl_overrides, *fault, *apart) as job:
        assert job.wait() == 0, job.output()[-3000:]
        rows, output = job.metrics(), job.output()
    assert all(row.get("mismatch/logprob_max", 0.0) <= MISMATCH_LIMIT for row in rows)
    assert output.count("is started anew") == 1
    assert "engine 0 is started anew: engine 0 made no progress for 4 s" in output


def test_a_rank_that_is_stopped_is_named(
    tmp_path: Path, rl_overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version is not published: the job ends within its deadline."""
    deadline = f"runtime.deadline_s={DEADLINE_S:g}"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with local_job(tmp_path / "run", RECIPE, *rl_overrides, *overrides("the rank is stopped"), deadline) as job:
        wait_until(lambda: {"rank 1", "scheduler 1"} <= job.processes().keys(), START_LIMIT_S, job.output)
        processes = job.processes()
        assert job.wait() != 0
        said = rf"rank 0 waited {DEADLINE_S:.0f} s for rank 1 to (take|send)"
        assert re.search(said, job.output()), job.output()[-3000:]
        assert_all_gone(processes, END_LIMIT_S)
        assert job.metrics() == []

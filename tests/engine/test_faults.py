"""Whatever dies takes the whole job along within seconds, says why, and leaves no process behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.jobs import END_LIMIT_S, assert_all_gone, local_job

pytestmark = pytest.mark.engine

RECIPE = "launch/recipes/carry_addition_rl.yaml"

# victim, launcher, what the last lines of the output must name
CASES = [
    ("rank 0", "mpirun", "signal 9"),
    ("rank 1", "torchrun", "Signal 9 (SIGKILL)"),
    ("coordinator 0", "mpirun", "coordinator (pid"),
]


@pytest.mark.parametrize(("victim", "launcher", "named"), CASES, ids=[f"{v} {launcher}" for v, launcher, _ in CASES])
def test_sigkill_ends_the_job(victim: str, launcher: str, named: str, tmp_path: Path, rl_overrides: list[str]) -> None:
    with local_job(tmp_path / "run", RECIPE, *rl_overrides, "steps=100000", launcher=launcher) as job:
        job.wait_for_step(2)
        processes = job.processes()
        assert {"rank 0", "rank 1", "engine 0", "engine 1", "coordinator 0", "reward worker 0"} <= processes.keys()
        processes[victim].kill()
        assert_all_gone(processes)
        assert job.wait(END_LIMIT_S) != 0
        last = "\n".join(job.output().splitlines()[-30:])
        assert named in last, last


@pytest.mark.parametrize("launcher", ["mpirun", "local.sh"])
def test_sigterm_to_the_launcher_ends_the_job(launcher: str, tmp_path: Path, rl_overrides: list[str]) -> None:
    with local_job(tmp_path / "run", RECIPE, *rl_overrides, "steps=100000") as job:
        job.wait_for_step(1)
        processes = job.processes()
        if launcher == "local.sh":
            job.process.send_signal(signal.SIGTERM)
        else:
            processes["mpirun 0" if "mpirun 0" in processes else "prterun 0"].send_signal(signal.SIGTERM)
        assert_all_gone(processes)
        assert job.wait(END_LIMIT_S) != 0


def test_a_rank_killed_while_engines_start_leaves_nothing(tmp_path: Path, rl_overrides: list[str]) -> None:
    with local_job(tmp_path / "run", RECIPE, *rl_overrides) as job:
        from tests.jobs import START_LIMIT_S, wait_until

        wait_until(lambda: any(name.startswith("engine 1") for name in job.processes()), START_LIMIT_S, job.output)
        # SGLang's own processes are still importing
        wait_until(lambda: len(job.processes()) >= 9, START_LIMIT_S, lambda: str(job.processes()))
        processes = job.processes()
        processes["rank 1"].kill()
        assert_all_gone(processes)
        assert job.wait(END_LIMIT_S) != 0

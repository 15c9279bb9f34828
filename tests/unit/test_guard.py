"""The guard ends a rank whose main thread is stuck, and says why; without a reason it leaves the rank alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.jobs import alive, wait_until

SLEEPER = "import time\ndef main():\n    print('the last words', flush=True)\n    time.sleep(600)\n"

RANK = """
import ctypes, os, socket, sys, time
from pathlib import Path
from megarl.runtime import Guard, start_child

def deadlock_in_c():
    mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)  # zeros are an unlocked mutex
    while True:
        libc.pthread_mutex_lock(mutex)

def work():
    while not guard.stop_requested:
        time.sleep(0.01)
    print("asked to stop", flush=True)
    time.sleep(0.3)
    guard.stop_children()

run_dir = Path(sys.argv[1])
guard = Guard(3)
guard.record_failures_in(run_dir)
child = start_child("sleeper:main", {}, name="engine 0", log=run_dir / "log", env={"PYTHONPATH": sys.argv[2]})
while not (run_dir / "log").read_text():
    time.sleep(0.01)
if sys.argv[3] == "die before the watch":
    os.kill(child.process.pid, 9)
    time.sleep(0.1)
print(child.process.pid, flush=True)
guard.watch(child, vital=sys.argv[3] != "not vital")
match sys.argv[3]:
    case "sleep": time.sleep(600)
    case "receive": ends = socket.socketpair(); ends[0].recv(1)
    case "deadlock in C": deadlock_in_c()
    case "die": guard.die("the cause, as told", code=5)
    case "work": work()
    case _: time.sleep(600)
"""


class Rank:
    """A process with a guard and one child, whose main thread does what `task` says."""

    def __init__(self, run_dir: Path, task: str) -> None:
        (run_dir / "sleeper.py").write_text(SLEEPER)
        path = os.pathsep.join([str(run_dir), *sys.path])
        self._run_dir = run_dir
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(run_dir), path, task],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        assert self.process.stdout is not None
        self.child = int(self.process.stdout.readline())
        time.sleep(0.1)  # until the main thread is stuck

    def end_within(self, limit_s: float) -> tuple[int, str, str]:
        """Exit code, output and errors of the process; its child must be gone."""
        output, errors = self.process.communicate(timeout=limit_s)
        end = time.monotonic() + 1
        while self._child_lives():
            assert time.monotonic() < end, "the child lives on"
            time.sleep(0.01)
        return self.process.returncode, output, errors

    def causes(self) -> list[dict[str, object]]:
        file = self._run_dir / "failure.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        if self._child_lives():
            os.kill(self.child, signal.SIGKILL)

    def _child_lives(self) -> bool:
        try:
            return "\nState:\tZ" not in Path(f"/proc/{self.child}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False


@pytest.fixture
def rank(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rank]:
    rank = Rank(tmp_path, request.param)
    yield rank
    rank.close()


LAUNCHER = """
import subprocess, sys
rank = (
    "import os, sys, time\\n"
    "from pathlib import Path\\n"
    "from megarl.runtime import Guard\\n"
    "guard = Guard(1, os.getppid())\\n"
    "guard.record_failures_in(Path(sys.argv[1]))\\n"
    "print(os.getpid(), flush=True)\\n"
    "time.sleep(600)\\n"
)
subprocess.run([sys.executable, "-c", rank, sys.argv[1]], start_new_session=True)
"""


def test_a_rank_ends_with_its_launcher(tmp_path: Path) -> None:
    """Though nothing tells it: it has a session of its own, and nobody reads its output."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert launcher.stdout is not None
    rank = psutil.Process(int(launcher.stdout.readline()))
    try:
        launcher.kill()
        launcher.communicate()
        wait_until(lambda: not alive(rank), 10, lambda: "the rank lives on")
        assert "the process that started this rank has ended" in (tmp_path / "failure.jsonl").read_text()
    finally:
        if alive(rank):
            rank.kill()


STUCK_RANKS = pytest.mark.parametrize("rank", ["sleep", "receive", "deadlock in C"], indirect=True)


@STUCK_RANKS
def test_the_death_of_a_child_ends_a_stuck_rank(rank: Rank) -> None:
    os.kill(rank.child, signal.SIGKILL)
    code, _, errors = rank.end_within(2)
    assert code == 1
    cause = f"engine 0 (pid {rank.child}) was killed by signal 9; last lines of"
    assert f"megarl: rank 3: {cause}" in errors
    assert "\n  | the last words" in errors
    (row,) = rank.causes()
    assert row["rank"] == 3
    assert cause in str(row["cause"])


@STUCK_RANKS
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_stuck_rank(rank: Rank, number: signal.Signals) -> None:
    rank.process.send_signal(number)
    code, _, errors = rank.end_within(1)
    assert code == 128 + number
    assert f"megarl: rank 3: ended by {number.name}" in errors
    assert [row["cause"] for row in rank.causes()] == [f"ended by {number.name}"]


@pytest.mark.parametrize("rank", ["work"], indirect=True)
def test_sigusr1_asks_and_does_no_more(rank: Rank) -> None:
    for _ in range(3):
        rank.process.send_signal(signal.SIGUSR1)
    code, output, errors = rank.end_within(5)
    assert (code, output, errors) == (0, "asked to stop\n", "")
    assert not rank.causes(), "children that are stopped at the end are no failure"


@STUCK_RANKS
def test_sigusr1_does_not_end_a_stuck_rank(rank: Rank) -> None:
    rank.process.send_signal(signal.SIGUSR1)
    with pytest.raises(subprocess.TimeoutExpired):
        rank.process.wait(0.5)
    assert not rank.causes()


@pytest.mark.parametrize("rank", ["die before the watch"], indirect=True)
def test_a_child_that_is_dead_already_is_noticed(rank: Rank) -> None:
    code, _, errors = rank.end_within(2)
    assert code == 1
    assert "was killed by signal 9" in errors


@pytest.mark.parametrize("rank", ["die"], indirect=True)
def test_a_cause_is_told_and_recorded(rank: Rank) -> None:
    code, _, errors = rank.end_within(2)
    assert code == 5
    assert errors == "megarl: rank 3: the cause, as told\n"
    assert [(row["rank"], row["cause"]) for row in rank.causes()] == [(3, "the cause, as told")]


@pytest.mark.parametrize("rank", ["not vital"], indirect=True)
def test_the_death_of_a_child_that_is_not_vital_ends_nothing(rank: Rank) -> None:
    os.kill(rank.child, signal.SIGKILL)
    time.sleep(0.3)
    assert rank.process.poll() is None
    assert rank.causes() == []


@pytest.mark.parametrize("rank", ["not vital"], indirect=True)
def test_a_child_that_is_not_vital_ends_with_its_rank(rank: Rank) -> None:
    rank.process.send_signal(signal.SIGTERM)
    assert rank.end_within(2)[0] == 128 + signal.SIGTERM

"""Child processes end with their parent however it ends, know no secret by their command line, and no launcher.

The rank here is a process of its own, and its child starts a grandchild as engines do: by multiprocessing's spawn.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.runtime import child_environment, start_child

SECRET = "key-of-test-children-5b1f"
DEADLINE_S = 20.0

# A module that takes its time to import, in the process that runs `main` and again in each that it spawns.
CHILD = """
import json, os, sys, time, multiprocessing

def note(name):
    path = os.path.join(os.environ["NOTES"], name)
    with open(path + ".partial", "w") as file:
        json.dump({"pid": os.getpid(), "environ": dict(os.environ), "affinity": len(os.sched_getaffinity(0))}, file)
    os.rename(path + ".partial", path)

in_grandchild = multiprocessing.parent_process() is not None
if os.environ.get("SLOW") == ("grandchild" if in_grandchild else "child"):
    note("grandchild" if in_grandchild else "child")
    time.sleep(600)

def grandchild():
    note("grandchild")
    time.sleep(600)

def main():
    config = json.loads(sys.stdin.readline())
    multiprocessing.get_context("spawn").Process(target=grandchild).start()
    with open(os.path.join(os.environ["NOTES"], "config"), "w") as file:
        json.dump(config, file)
    note("child")
    time.sleep(600)
"""

# Bound to one core, as mpirun binds ranks.
RANK = """
import os, sys, time
from pathlib import Path
from megarl.runtime import start_child
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

notes, slow = Path(sys.argv[1]), sys.argv[2]
child = start_child("slow_module:main", {"key": sys.stdin.readline().strip()}, name="the child", log=notes / "log",
                    env={"NOTES": str(notes), "PYTHONPATH": str(notes), "SLOW": slow})
time.sleep(600)
"""


def until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """The first true value of `condition`."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"{what}: not within {deadline_s:g} s"
        time.sleep(0.01)
    return value


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits to be reaped does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


class Rank:
    """The process that plays the rank, and what its child and grandchild note about themselves."""

    def __init__(self, notes: Path, *, slow: str = "", env: dict[str, str] | None = None) -> None:
        (notes / "slow_module.py").write_text(CHILD)
        self._notes = notes
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(notes), slow],
            stdin=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | (env or {}),
        )
        assert self.process.stdin is not None
        self.process.stdin.write(SECRET.encode() + b"\n")
        self.process.stdin.close()

    def note_of(self, name: str) -> dict[str, Any]:
        path = self._notes / name
        until(path.exists, f"note of the {name}")
        return json.loads(path.read_text())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for name in ("child", "grandchild"):
            if (self._notes / name).exists() and alive(pid := self.note_of(name)["pid"]):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def start_rank(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []

    def start(**options: Any) -> Rank:
        ranks.append(Rank(tmp_path, **options))
        return ranks[-1]

    yield start
    for rank in ranks:
        rank.end()


@pytest.mark.parametrize("slow", ["", "child", "grandchild"], ids=["running", "child imports", "grandchild imports"])
def test_a_killed_rank_takes_its_children_along(start_rank: Callable[..., Rank], slow: str) -> None:
    rank = start_rank(slow=slow)
    names = ["child"] if slow == "child" else ["child", "grandchild"]
    pids = [rank.note_of(name)["pid"] for name in names]
    assert all(map(alive, pids))
    rank.process.kill()
    until(lambda: not any(map(alive, pids)), f"end of {names}", deadline_s=2)


def test_a_secret_is_on_no_command_line_and_in_no_environment(start_rank: Callable[..., Rank], tmp_path: Path) -> None:
    rank = start_rank()
    pids = [rank.process.pid, rank.note_of("child")["pid"], rank.note_of("grandchild")["pid"]]
    assert json.loads((tmp_path / "config").read_text()) == {"key": SECRET}, "the child knows it"
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        for file in ("cmdline", "environ"):
            try:
                text = (directory / file).read_bytes()
            except OSError:  # ended meanwhile, or another user's
                assert int(directory.name) not in pids
                continue
            assert SECRET.encode() not in text, f"{file} of process {directory.name}"
            assert text or int(directory.name) not in pids
    assert SECRET not in json.dumps([rank.note_of("child"), rank.note_of("grandchild")])


def test_no_launcher_is_known_to_children(start_rank: Callable[..., Rank]) -> None:
    launcher = {
        "OMPI_COMM_WORLD_RANK": "0",
        "PMIX_NAMESPACE": "x",
        "PRTE_LAUNCHED": "1",
        "SLURM_PROCID": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "0",
        "ROLE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    rank = start_rank(env=launcher | {"KEPT_BY_CHILDREN": "yes"})
    for name in ("child", "grandchild"):
        environ = rank.note_of(name)["environ"]
        assert not launcher.keys() & environ.keys()
        assert environ["KEPT_BY_CHILDREN"] == "yes"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="there is one core")
def test_a_child_is_not_bound_to_the_core_of_its_rank(start_rank: Callable[..., Rank]) -> None:
    rank = start_rank()
    assert rank.note_of("child")["affinity"] > len(os.sched_getaffinity(rank.process.pid)) == 1


def test_extra_variables_replace_inherited_ones() -> None:
    environment = child_environment({"PATH": "/other", "NEW": "1"})
    assert (environment["PATH"], environment["NEW"]) == ("/other", "1")
    assert environment["MEGARL_PARENT_PID"] == str(os.getpid())


def test_a_child_can_be_killed_with_all_that_it_started(tmp_path: Path) -> None:
    (tmp_path / "slow_module.py").write_text(CHILD)
    env = {"NOTES": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    child = start_child("slow_module:main", {}, name="the child", log=tmp_path / "logs" / "log", env=env)
    try:
        until((tmp_path / "grandchild").exists, "note of the grandchild")
        grandchild = json.loads((tmp_path / "grandchild").read_text())["pid"]
    finally:
        child.kill()
    assert child.process.returncode == -signal.SIGKILL
    until(lambda: not alive(grandchild), "end of the grandchild", deadline_s=2)
    child.kill()  # harmless


def test_how_a_child_ended_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    module = "import sys\ndef main():\n    print(*range(20), sep='\\n')\n    sys.exit(3)\n"
    (tmp_path / "failing_module.py").write_text(module)
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    child = start_child("failing_module:main", {}, name="engine 2", log=tmp_path / "log", env=env)
    child.process.wait(DEADLINE_S)
    told = child.describe_end(log_lines=3)
    assert told.splitlines() == [
        f"engine 2 (pid {child.process.pid}) ended with exit code 3; last lines of {tmp_path / 'log'}:",
        *(f"  | {n}" for n in (17, 18, 19)),
    ]
    (tmp_path / "log").unlink()
    assert child.describe_end().endswith("(empty)")


def test_what_a_killed_child_said_is_in_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "talking.py").write_text("import time\ndef main():\n    print('on my way')\n    time.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    log = tmp_path / "log"
    child = start_child("talking:main", {}, name="child", log=log)
    try:
        end = time.monotonic() + DEADLINE_S
        while not log.read_text() and time.monotonic() < end:
            time.sleep(0.02)
    finally:
        child.kill()
    assert log.read_text() == "on my way\n"

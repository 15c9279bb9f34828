"""Starting ranks for tests: with mpirun or torchrun, under a time limit, and never leaving one behind.

Every process of a launch carries a mark in its environment, which its children inherit, so that all of them can be
found, also those that have lost their parent. They are ended by pid.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300.0  # on a busy machine; a quiet one takes a tenth
_MARK = "MEGARL_TEST_LAUNCH"

Launcher = Literal["mpirun", "torchrun"]


class Launch:
    """Ranks that run one module."""

    def __init__(self, process: subprocess.Popen[bytes], mark: str, log: Path) -> None:
        self.process, self._mark, self._log = process, mark, log

    def output(self) -> str:
        """What all ranks have printed so far."""
        return self._log.read_text(errors="replace")

    def processes(self) -> dict[int, str]:
        """Command lines of the living processes by pid: launcher, ranks and whatever they started."""
        found = {}
        for directory in Path("/proc").iterdir():
            # a process that ends meanwhile has no files; one that has ended but is not reaped has an empty environment
            with contextlib.suppress(OSError):
                if directory.name.isdigit() and self._mark.encode() in (directory / "environ").read_bytes():
                    line = (directory / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(directory.name)] = line.decode(errors="replace")
        return found

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """The launcher's exit code."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit_s:g} s: {self.processes()}\n{self.output()}") from None

    def wait_until_gone(self, limit_s: float) -> None:
        """Every process ends by itself within the limit."""
        end = time.monotonic() + limit_s
        while left := self.processes():
            assert time.monotonic() < end, f"still there after {limit_s:g} s: {left}\n{self.output()}"
            time.sleep(0.05)
            self.process.poll()

    def end(self) -> None:
        """Kill whatever is left, by pid."""
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
        self.process.wait()


@contextlib.contextmanager
def started(
    launcher: Launcher, ranks: int, module: str, *arguments: str | Path, log: Path, env: dict[str, str] | None = None
) -> Iterator[Launch]:
    """`main` of `module` on `ranks` ranks; all that it started is gone at the end of the block."""
    mark = uuid.uuid4().hex
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*_command(launcher, ranks), str(ROOT / "tests/distributed/rank.py"), module, *map(str, arguments)],
            cwd=ROOT,
            env=_environment() | {_MARK: mark} | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    launch = Launch(process, mark, log)
    try:
        yield launch
    finally:
        launch.end()


def run(launcher: Launcher, ranks: int, module: str, *arguments: str | Path, log: Path) -> None:
    """Run `main` of `module` to its end, which must be a good one and leave no process behind."""
    with started(launcher, ranks, module, *arguments, log=log) as launch:
        code = launch.wait()
        assert code == 0, f"exit code {code}:\n{launch.output()[-6000:]}"
        launch.wait_until_gone(limit_s=5)


def _command(launcher: Launcher, ranks: int) -> list[str]:
    if launcher == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    # the mpirun beside this python: another one on PATH would be another MPI. Ranks may outnumber cores.
    mpirun = Path(sys.executable).with_name("mpirun")
    return [str(mpirun), "-n", str(ranks), "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", sys.executable]


def _environment() -> dict[str, str]:
    """One thread a rank, nothing fetched, and mpirun willing to start as root, which a container's user often is."""
    names = [f"{prefix}_ALLOW_RUN_AS_ROOT{suffix}" for prefix in ("OMPI", "PRTE") for suffix in ("", "_CONFIRM")]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **os.environ,
        **dict.fromkeys(names, "1"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": path,
    }

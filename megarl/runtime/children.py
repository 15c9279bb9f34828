"""Child processes of a rank: engines, coordinator. Their environment, start and end are decided here alone.

Start them from the main thread: the kernel's parent-death signal fires when the *thread* that forked ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A child that inherits its rank's launcher variables would join MPI as the rank's double, or mistake torchrun's
# rendezvous for its own.
_LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "MPI_", "SLURM_", "TORCHELASTIC_", "LOCAL_", "GROUP_", "ROLE_")
_PARENT_VARIABLE = "MEGARL_PARENT_PID"  # read by child.py, which must not be imported where it is also run
_LAUNCHER_NAMES = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


def child_command(target: str) -> list[str]:
    """Command line that runs `target` ("package.module:function") as a child that ends with its parent."""
    return [sys.executable, "-m", "megarl.runtime.child", target]


def child_environment(extra: Mapping[str, str] = {}) -> dict[str, str]:
    """This process's environment without its launcher's variables, plus `extra`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHER_PREFIXES) and k not in _LAUNCHER_NAMES}
    return {**kept, **extra, _PARENT_VARIABLE: str(os.getpid())}


@dataclass(frozen=True)
class Child:
    """A running child. It leads a session of its own, so that `kill` reaches all that it started."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        """End the child and its session at once, and reap it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def describe_end(self, log_lines: int = 8) -> str:
        """How it ended, and the last lines of its log."""
        code = self.process.poll()
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        lines = self.log.read_text(errors="replace").splitlines()[-log_lines:] if self.log.exists() else []
        tail = "".join(f"\n  | {line}" for line in lines)
        return f"{self.name} (pid {self.process.pid}) {how}; last lines of {self.log}:{tail or ' (empty)'}"


@contextlib.contextmanager
def without_usr1() -> Iterator[None]:
    """Processes started inside do not receive SIGUSR1, which Slurm may send to all processes of a step."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def start_child(
    target: str,
    config: Mapping[str, Any],
    *,
    name: str,
    log: Path,
    env: Mapping[str, str] = {},
    pass_fds: Sequence[int] = (),
) -> Child:
    """Start `target` with `config` as a JSON line on its stdin, so secrets are on no command line; output to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output, without_usr1():
        process = subprocess.Popen(
            child_command(target),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=child_environment(env),
            start_new_session=True,
            pass_fds=pass_fds,
        )
    assert process.stdin is not None
    process.stdin.write(json.dumps(config).encode() + b"\n")
    process.stdin.close()
    return Child(name, process, log)

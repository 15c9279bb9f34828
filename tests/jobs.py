"""Jobs for tests: the real launcher on small inputs, watched through its files and ended by pid."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from megarl.observe import read_metrics

ROOT = Path(__file__).resolve().parents[1]
START_LIMIT_S = 400.0  # two engines on two busy cores
END_LIMIT_S = 10.0  # what a dying job may take; the promise to users


class Job:
    """A job of launch/local.sh, in a session of its own."""

    def __init__(self, run_dir: Path, log: Path, process: subprocess.Popen[bytes]) -> None:
        self.run_dir, self.log, self.process = run_dir, log, process

    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.run_dir)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, limit_s: float = START_LIMIT_S) -> int:
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job has not ended in {limit_s} s:\n{self.output()[-3000:]}") from None

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: len(self.metrics()) >= step or self.process.poll() is not None, START_LIMIT_S, self.output)
        assert self.process.poll() is None, self.output()[-3000:]

    def processes(self) -> dict[str, psutil.Process]:
        """All living processes of the job by what they are: rank 0, engine 0, scheduler 0, coordinator 0, ..."""
        found: dict[str, psutil.Process] = {}
        for process in [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                kind = _kind(process)
                found[f"{kind} {sum(name.startswith(kind) for name in found)}"] = process
        return found


def _kind(process: psutil.Process) -> str:
    line, name = " ".join(process.cmdline()), process.name()
    for mark, kind in [
        ("sglang::scheduler", "scheduler"),
        ("sglang::detoken", "detokenizer"),
        ("rollout_engine.server", "engine"),
        ("trainer.coordinator", "coordinator"),
        ("rewards.worker", "reward worker"),
    ]:
        if mark in line or mark in name:
            return kind
    if "python" in name and "launch/train.py" in line and "torch.distributed.run" not in line:
        return "rank"
    return name


@contextlib.contextmanager
def local_job(
    run_dir: Path, recipe: Path | str, *arguments: str, ranks: int = 2, launcher: str = "mpirun"
) -> Iterator[Job]:
    """Start a job and end it at the end of the block, whatever happened."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    log = run_dir.with_suffix(".log")
    flags = ["--torchrun"] if launcher == "torchrun" else []
    with log.open("ab") as output:
        process = subprocess.Popen(
            ["bash", "launch/local.sh", "-n", str(ranks), *flags, str(recipe), f"run_dir={run_dir}", *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    job = Job(run_dir, log, process)
    try:
        yield job
    finally:
        if process.poll() is None:
            victims = job.processes().values()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for victim in victims:
                with contextlib.suppress(psutil.Error):
                    victim.kill()
            process.wait()


def wait_until(condition: Callable[[], bool], limit_s: float, describe: Callable[[], str]) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not reached in {limit_s} s:\n{describe()[-3000:]}"
        time.sleep(0.1)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def assert_all_gone(processes: dict[str, psutil.Process], limit_s: float = END_LIMIT_S) -> None:
    """Every one of the processes has ended within the limit."""
    left = lambda: [name for name, process in processes.items() if alive(process)]  # noqa: E731
    wait_until(lambda: not left(), limit_s, lambda: f"still there: {left()}")

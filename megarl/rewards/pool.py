"""Reward workers: processes that score responses, each response under a hard time limit.

The coordinator's door to rewards. A worker that takes too long on one response is killed, one that dies is buried; in
both cases that response is scored 0 and counted, and a new worker goes on with the next one. Whoever uses the pool
decides the command and the environment of the workers; the pool reads neither.

The limit is measured from answer to answer: a worker is sent all its items at once and answers them one by one, so
that quick rules lose no time on round trips and a slow item is known by its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import psutil

from megarl.rewards.worker import SCORE, Setup, message

if TYPE_CHECKING:
    from megarl.config import Reward

# Starting python and importing sympy takes a second, and much longer from a busy parallel file system.
START_LIMIT_S = 120.0
START_ATTEMPTS = 3
EXIT_LIMIT_S = 10.0
KILL_LIMIT_S = 2.0

Item = tuple[str, str, str]
"""Rule, response and true answer."""


class RewardError(RuntimeError):
    """No worker can be started, so nothing can be scored."""


class RewardPool:
    """`config.workers` processes between `async with` and its end; `score_many` may be awaited by many tasks at once.

    Every item gets a score: its rule's, or 0 and counted in `timeouts` (killed at the limit) or `crashes` (the worker
    died by itself). A cancelled call leaves no trace: the worker that was busy with it is replaced.
    """

    def __init__(self, config: Reward, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.timeouts = 0
        self.crashes = 0
        self._limit_s = config.timeout_s
        setup = message(Setup({name: rule.model_dump() for name, rule in config.rules.items()}))
        count = config.workers if config.rules else 0
        self._workers = [_Worker(command, environment, setup) for _ in range(count)]
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._open = False

    async def __aenter__(self) -> Self:
        try:
            _raise_first(await asyncio.gather(*(w.start() for w in self._workers), return_exceptions=True))
        except BaseException:
            await self._close()
            raise
        for worker in self._workers:
            self._idle.put_nowait(worker)
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def score_many(self, items: Sequence[Item]) -> list[float]:
        """The scores of many items, divided among the workers."""
        if not items:
            return []
        size = math.ceil(len(items) / len(self._workers))
        parts = [items[start : start + size] for start in range(0, len(items), size)]
        results = await asyncio.gather(*(self._score_part(part) for part in parts), return_exceptions=True)
        _raise_first(results)
        return [score for part in results if isinstance(part, list) for score in part]

    async def _score_part(self, items: Sequence[Item]) -> list[float]:
        """Scores of `items` by one worker and, where it must be, its successors."""
        if not self._open:
            raise RewardError("the reward pool is not open; score inside its `async with`")
        scores: list[float] = []
        worker = await self._idle.get()
        try:
            while len(scores) < len(items):
                if not worker.alive:
                    await worker.start()
                scores += await self._until_trouble(worker, items[len(scores) :])
        finally:
            if len(scores) < len(items):
                worker.kill()  # it owes answers that nobody waits for
            self._idle.put_nowait(worker)
        return scores

    async def _until_trouble(self, worker: _Worker, items: Sequence[Item]) -> list[float]:
        """Scores of the first of `items`: all of them, or up to and including the first that cost the worker."""
        worker.send(items)
        scores: list[float] = []
        while worker.alive and len(scores) < len(items):
            received, killed = await worker.receive(len(items) - len(scores), self._limit_s)
            if not received:
                self.timeouts += killed
                self.crashes += not killed
                received = [0.0]
            scores += received
        return scores

    async def _close(self) -> None:
        self._open = False
        await asyncio.gather(*(worker.close() for worker in self._workers))


class _Worker:
    """One place in the pool: a process, and how to start the next one when it has ended."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], setup: bytes) -> None:
        self._command = command
        self._environment = environment
        self._setup = setup
        self._process: asyncio.subprocess.Process | None = None
        self._usable = False
        self._closed = False

    @property
    def alive(self) -> bool:
        """Whether there is a process that can be sent items, as far as is known."""
        return self._usable and self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start a process and wait until it is ready. Raises RewardError after START_ATTEMPTS failures in a row."""
        how = ""
        for _ in range(START_ATTEMPTS):
            process = await self._spawn()
            ready, killed = await self.receive(1, START_LIMIT_S)
            if ready and not killed:
                return
            how = f"was not ready after {START_LIMIT_S:g} s" if killed else f"ended with {await _exit_code(process)}"
        raise RewardError(
            f"reward worker {how} before it was ready, {START_ATTEMPTS} times in a row; what it printed is in this"
            f" process's error output; command: {' '.join(self._command)}"
        )

    def send(self, items: Sequence[Item]) -> None:
        """Send all `items`; their scores come in order."""
        self._write(b"".join(message(item) for item in items))

    async def receive(self, most: int, limit_s: float) -> tuple[list[float], bool]:
        """At least one and at most `most` scores, or none if the process has ended; and whether it was killed here.

        It is killed when nothing has come for `limit_s`. What it had written by then still counts: this loop may have
        been too busy to read it.
        """
        process = self._process
        assert process is not None
        assert process.stdout is not None
        reading = asyncio.ensure_future(process.stdout.read(most * SCORE.size))
        try:
            done, _ = await asyncio.wait({reading}, timeout=limit_s)
            if not done:
                self.kill()
                done_late, _ = await asyncio.wait({reading}, timeout=KILL_LIMIT_S)
                # what it started may hold its output open; that is not waited for
                data = await reading if done_late else b""
            else:
                data = await reading
        finally:
            reading.cancel()
        if not data:
            self._usable = False
            if self._closed:
                raise RewardError("the reward pool was closed while it scored")
        # a write of 8 bytes to a pipe is whole, and so is what is read
        return [score for (score,) in SCORE.iter_unpack(data)], not done

    def kill(self) -> None:
        """End the process at once, if it still runs."""
        self._usable = False
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for started in psutil.Process(self._process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        started.kill()
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        """End the process at once, wait until it is gone, and start no other."""
        self._closed = True
        self.kill()
        if self._process is not None:
            await self._process.wait()

    async def _spawn(self) -> asyncio.subprocess.Process:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=dict(self._environment),
            )
        except OSError as error:
            raise RewardError(f"reward worker cannot be started: {error}; command: {self._command}") from error
        self._process = process
        self._usable = True
        if self._closed:
            await self.close()
            raise RewardError("the reward pool was closed while a worker started")
        self._write(self._setup)
        return process

    def _write(self, data: bytes) -> None:
        # not drained: the worker reads while it answers, and its death is noticed where answers are awaited
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._process.stdin.write(data)


async def _exit_code(process: asyncio.subprocess.Process) -> str:
    """How a process that has closed its output ends. It is given time to: a signal would hide its own exit code."""
    try:
        return f"exit code {await asyncio.wait_for(process.wait(), EXIT_LIMIT_S)}"
    except TimeoutError:
        process.kill()
        return "its output closed but itself alive"


def _raise_first(results: Sequence[object]) -> None:
    """Raise the first exception among what `asyncio.gather` has gathered."""
    for result in results:
        if isinstance(result, BaseException):
            raise result

"""Units of work in several processes, forked so that what they work on need not be sent to them."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

import torch

from megarl.config import RecipeError

_POLL_S = 0.25
Result = TypeVar("Result")
Work = Callable[[int], Result]


def each_unit(
    work: Work[Result], units: Sequence[int], workers: int, worker_start: Callable[[], None]
) -> Iterator[dict[int, Result]]:
    """Call `work` with each of `units` and yield what it returned, in the order they end, with pauses of nothing.

    `worker_start` is called in each process; a single worker is this process itself. Raises what `work` raises, once
    the others have ended what they are at.
    """
    torch.set_num_threads(1)
    if workers == 1:
        for unit in units:
            yield {unit: work(unit)}
        return
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(min(workers, len(units) or 1), context, _start, (work, worker_start))
    try:
        waiting: dict[Future[Result], int] = {pool.submit(_call, unit): unit for unit in units}
        while waiting:
            done, _ = wait(waiting, _POLL_S, FIRST_COMPLETED)
            yield {waiting.pop(future): future.result() for future in done}
    except BrokenProcessPool:
        raise RecipeError(
            "a worker process was killed, perhaps for its memory; run the same command again, with fewer --workers:"
            " what is finished is kept"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start(work: Work[Any], worker_start: Callable[[], None]) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent, which gets it too, ends the workers
    worker_start()


def _call(unit: int) -> Any:
    return _work(unit)


_work: Work[Any]

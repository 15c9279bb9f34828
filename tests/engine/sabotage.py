"""An advantage that a recipe names, which on its way makes something fail in the rank that computes it.

It knows where in a publication or a rollout it is, which a test outside the job does not.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from torch import Tensor

from megarl.algorithms import ADVANTAGES, Outcomes
from megarl.checkpoint_engine.exchange import Exchange
from megarl.checkpoint_engine.slot import Head, Slot
from megarl.rollout_engine import Engine

_IN_A_ROLLOUT_S = 0.5
_calls = 0
_engines: list[Engine] = []
"""Those that this rank has started since the first fault."""
_start = Engine.__init__


def _started(self: Engine, *arguments: Any, **options: Any) -> None:
    _start(self, *arguments, **options)
    _engines.append(self)


Engine.__init__ = _started  # type: ignore[method-assign]


def advantage(outcomes: Outcomes, *, faults: list[str], rank: int) -> Tensor:
    """GRPO's; in step n rank `rank` prepares the n-th of its `faults`."""
    global _calls
    if _calls < len(faults) and int(os.environ.get("OMPI_COMM_WORLD_RANK", "0")) == rank:
        while _engines and not _engines[-1].is_healthy():  # it takes the place of the one that failed before
            time.sleep(0.5)
        FAULTS[faults[_calls]]()
    _calls += 1
    return ADVANTAGES["grpo"](outcomes)


def _engine_gets(number: int) -> None:
    """The engine's processes get a signal when it is asked to take its second bucket."""
    original, buckets = Engine.load_slots, 0

    def load_slots(self: Engine, handles: list[bytes], *, last: bool) -> None:
        nonlocal buckets
        buckets += 1
        if buckets == 2:
            Engine.load_slots = original  # type: ignore[method-assign]
            _send(self, number)
        original(self, handles, last=last)

    Engine.load_slots = load_slots  # type: ignore[method-assign]


def _engine_gets_in_a_rollout(number: int) -> None:
    """Soon after it has the new weights."""
    original = Engine.end_update

    def end_update(self: Engine, version: int) -> None:
        Engine.end_update = original  # type: ignore[method-assign]
        original(self, version)
        threading.Timer(_IN_A_ROLLOUT_S, _send, (self, number)).start()

    Engine.end_update = end_update  # type: ignore[method-assign]


def _send(engine: Engine, number: int) -> None:
    leader = psutil.Process(engine.child.process.pid)
    for process in [*leader.children(recursive=True), leader]:
        process.send_signal(number)


def _flip_a_bit() -> None:
    original = Slot.write

    def write(self: Slot, head: Head) -> None:
        if head.pieces:
            Slot.write = original  # type: ignore[method-assign]
            self.payload[head.pieces[0].offset] ^= 1
        original(self, head)

    Slot.write = write  # type: ignore[method-assign]


def _stop_this_rank() -> None:
    def bucket(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    Exchange.bucket = bucket  # type: ignore[method-assign]


def _stop_an_engine_elsewhere() -> None:
    """That of another rank, while this one trains; returns when the coordinator has given it up."""
    others = psutil.Process(os.getppid()).children(recursive=True)
    (leader,) = (one for one in others if "megarl.rollout_engine.server:main" in one.cmdline())
    logs = Path(os.readlink(f"/proc/{leader.pid}/fd/1")).parent
    for process in [*leader.children(recursive=True), leader]:
        process.send_signal(signal.SIGSTOP)
    while "is given up" not in (logs / "coordinator.log").read_text():
        time.sleep(0.1)


FAULTS: dict[str, Callable[[], None]] = {
    "the engine is killed": lambda: _engine_gets(signal.SIGKILL),
    "the engine is killed in a rollout": lambda: _engine_gets_in_a_rollout(signal.SIGKILL),
    "the engine is stopped in a rollout": lambda: _engine_gets_in_a_rollout(signal.SIGSTOP),
    "the engine elsewhere is stopped": _stop_an_engine_elsewhere,
    "a bit is flipped": _flip_a_bit,
    "the rank is stopped": _stop_this_rank,
}

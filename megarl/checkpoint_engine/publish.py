"""Publishing a version of the weights: from the trainer's shards into every engine, checked, all or nothing.

An engine pauses; weights come in buckets, the next one travelling while the engine takes the last; the engine compares
the fingerprints of all that it holds with those that the trainer's ranks took of their own shards; then its version
changes and it goes on. One that fails on the way stays paused and is named in the result: it must not serve again.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megarl.checkpoint_engine.check_plan import check
from megarl.checkpoint_engine.exchange import Amount, Delivery, Exchange, Precision, ShardSource
from megarl.checkpoint_engine.plan import make_plan
from megarl.checkpoint_engine.sides import Engines, Training
from megarl.checkpoint_engine.slot import Head, Slot
from megarl.config import DirectPublish, DiskPublish, FullPublish, ModelShape, Publish
from megarl.rollout_engine import EngineError
from megarl.runtime import ControlPlane, Links
from megarl.types import WeightVersion
from megarl.weights import BLOCK

_SLOTS = 2
_MIB = 1 << 20
_COMPARED_MIB = 256  # where only fingerprints travel, so that this takes no memory


class WeightSource(ShardSource, Protocol):
    """The trainer's side."""

    def hf_buckets(self, limit_bytes: int) -> Iterator[list[tuple[Any, list[Tensor]]]]:
        """Each parameter with its whole Hugging Face tensors; a collective of the ranks that train."""


class EngineTarget(Protocol):
    """An engine, on the rank that leads it; every call may raise EngineError."""

    def begin_update(self) -> None: ...
    def load_slots(self, handles: list[bytes], *, last: bool) -> None: ...
    def load_tensors(self, payload: bytes) -> None: ...
    def load_directory(self, path: Path) -> None: ...
    def end_update(self, version: WeightVersion) -> None: ...


@dataclass(frozen=True)
class Published:
    """The outcome, the same on every rank: what is wrong with engines, by number.

    `nbytes` came for all of them, of `planned` that their weights have. Engines did nothing else for `stall_s` seconds,
    as this rank saw it.
    """

    failed: dict[int, str]
    nbytes: int
    planned: int
    stall_s: float


class Publisher:
    """Made alike on every rank. Engine `number` is on the GPUs of ranks `engines.ranks[number]`; the first leads it."""

    def __init__(
        self,
        method: Publish,
        shape: ModelShape,
        training: Training,
        engines: Engines,
        control: ControlPlane,
        links: Links,
        *,
        precision: Precision,
        device: torch.device,
        ranks_per_node: int,
        timeout_s: float,
    ) -> None:
        """`precision` is the engines'; `timeout_s` says how long a rank waits for another.

        Raises PlanError: it is not known where an engine keeps a parameter, or sizes do not divide.
        """
        self._method, self._engines, self._control, self._device = method, engines, control, device
        bucket = (method.bucket_mib if isinstance(method, DirectPublish) else _COMPARED_MIB) * _MIB

        def exchange(numbers: tuple[int, ...]) -> Exchange:
            some = Engines(tuple(engines.ranks[number] for number in numbers), engines.expert)
            # a rank has two slots of a bucket, and packs as much for others
            sizes = {"bucket_bytes": bucket * 2 // 3, "item_bytes": precision.dtype.itemsize}
            together = BLOCK if precision.fp8 else 1
            plan = make_plan(shape, training, some, ranks_per_node=ranks_per_node, rows_together=together, **sizes)
            check(plan)
            precision.check(plan)
            return Exchange(plan, control.rank, precision, links, device=device, timeout_s=timeout_s)

        self._make_exchange = exchange
        self._everyone = tuple(range(len(engines.ranks)))
        self._exchange = exchange(self._everyone)
        self._all_hold_the_last = False
        self._kept: list[Slot] = []

    def publish(
        self,
        version: WeightVersion,
        source: WeightSource | None,
        engine: EngineTarget | None,
        *,
        directory: Path | None = None,
        only: Sequence[int] | None = None,
    ) -> Published:
        """Give `version` to all engines, or to `only` some; a collective of all ranks.

        `source` is what this rank trains, `engine` the one that it leads. `directory` has the version as a Hugging Face
        model, for engines that read it. Raises what ends the job: a rank that was waited for in vain.
        """
        numbers = self._everyone if only is None else tuple(sorted(only))
        exchange = self._exchange if numbers == self._everyone else self._make_exchange(numbers)
        slots = self._slots(exchange, numbers)
        update = _Update(self._control, self._engines, exchange, slots, numbers, engine, version)
        try:
            match self._method:
                case DirectPublish(changed_only=changed_only):
                    changed = changed_only and self._all_hold_the_last and numbers == self._everyone
                    update.direct(source, "changed" if changed else "all")
                case FullPublish(bucket_mib=bucket_mib):
                    update.full(source, bucket_mib * _MIB)
                case DiskPublish():
                    assert directory is not None, "what engines read must have been written"
                    update.disk(source, directory)
            outcome = update.finish()
        finally:
            update.close()
            if slots is not self._kept:
                for slot in slots:
                    slot.close()
        self._all_hold_the_last = not outcome.failed and numbers == self._everyone
        return outcome

    def _slots(self, exchange: Exchange, numbers: Sequence[int]) -> list[Slot]:
        """A GPU's memory is given back after each publication; a CPU's is kept, since new memory takes it longer."""
        here = any(self._control.rank in self._engines.ranks[number] for number in numbers)
        nbytes = exchange.slot_bytes if here and isinstance(self._method, DirectPublish) else 0
        if self._device.type != "cpu":
            return [Slot(nbytes, self._device) for _ in range(_SLOTS)]
        if not self._kept or len(self._kept[0].payload) < nbytes:
            for slot in self._kept:
                slot.close()
            self._kept = [Slot(nbytes, self._device) for _ in range(_SLOTS)]
        return self._kept


class _Update:
    """One publication as a rank takes part in it. The rank that leads an engine talks to it in a thread."""

    def __init__(
        self,
        control: ControlPlane,
        engines: Engines,
        exchange: Exchange,
        slots: Sequence[Slot],
        numbers: Sequence[int],
        engine: EngineTarget | None,
        version: WeightVersion,
    ) -> None:
        self._control, self._exchange, self._slots, self._version = control, exchange, slots, version
        rank, self._groups = control.rank, engines.ranks
        self._number = next((number for number in numbers if rank in self._groups[number]), None)
        team = () if self._number is None else self._groups[self._number]
        self._engine = engine if team[:1] == (rank,) else None
        self._delivery, self._failed = Delivery(), dict[int, str]()
        self._asked: Slot | None = None  # which this rank's process of the engine looks at
        self._wrong = ""  # what it said
        self._thread, self._loading = ThreadPoolExecutor(1), Future[str]()
        self._loading.set_result("")
        handles = control.allgather([slot.handle for slot in slots], list[bytes], what=self._what("memory"))
        self._handles = [[handles[one][i] for one in team] for i in range(_SLOTS)]
        self._began = time.monotonic()
        self._ask(methodcaller("begin_update"))

    def direct(self, source: ShardSource | None, amount: Amount) -> None:
        """A bucket goes to ranks while engines take the one before."""
        last = self._exchange.buckets - 1
        for number in range(self._exchange.buckets):
            slot = self._slots[number % _SLOTS]
            self._exchange.bucket(number, source, slot.payload, self._delivery, amount)
            sums = self._delivery.sums if number == last else {}
            self._load(number % _SLOTS, Head(self._delivery.pieces, sums), what=f"bucket {number}")

    def full(self, source: WeightSource | None, bucket_bytes: int) -> None:
        """A rank that leads an engine sends it everything, so it trains."""
        assert source is not None, "a rank that does not train has no whole tensors"
        for bucket in source.hf_buckets(bucket_bytes):
            if self._engine is not None:
                named = [pair for parameter, parts in bucket for pair in zip(parameter.hf, parts, strict=True)]
                self._delivery.nbytes += sum(tensor.nbytes for _, tensor in named)
                self._ask(methodcaller("load_tensors", serialised(named)))
                self._loading.result()
        self._compare(source)

    def disk(self, source: ShardSource | None, directory: Path) -> None:
        """Engines read while ranks exchange fingerprints."""
        self._ask(methodcaller("load_directory", directory))
        self._compare(source)

    def finish(self) -> Published:
        """Engines that hold the version go on."""
        self._meet("comparison")
        self._meet("answers")
        self._ask(methodcaller("end_update", self._version))
        nbytes, planned = self._meet("end")
        return Published(self._failed, nbytes, planned, time.monotonic() - self._began)

    def close(self) -> None:
        # after an error the engine may take long to answer, and nobody waits for that
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compare(self, source: ShardSource | None) -> None:
        """Only fingerprints travel."""
        for number in range(self._exchange.buckets):
            self._exchange.bucket(number, source, self._slots[0].payload, self._delivery, "nothing")
        self._load(0, Head(sums=self._delivery.sums), what="fingerprints")

    def _load(self, number: int, head: Head, *, what: str) -> None:
        """When all ranks have come here, the engine's processes look at their slots of that number, and answer."""
        self._slots[number].write(head)
        self._meet(what)
        self._ask(methodcaller("load_slots", self._handles[number], last=bool(head.sums)))
        self._asked = None if self._number is None else self._slots[number]

    def _ask(self, action: Callable[[EngineTarget], None]) -> None:
        """Of the engine that this rank leads, after what it is at, unless it has failed."""
        engine, before = self._engine, self._loading
        if engine is None or self._number in self._failed:
            return

        def run() -> str:
            if error := before.result():
                return error
            try:
                action(engine)
            except EngineError as error:
                return str(error)
            return ""

        self._loading = self._thread.submit(run)

    def _meet(self, what: str) -> tuple[int, int]:
        """Wait for this rank's engine, then for all ranks, and learn whose engine has failed.

        Returns the bytes that came for all so far, and those that their weights have.
        """
        mine = self._loading.result() or self._wrong, self._delivery.nbytes, self._delivery.planned
        told = self._control.allgather(mine, tuple[str, int, int], what=self._what(what))
        for number, ranks in enumerate(self._groups):
            if errors := [told[rank][0] for rank in ranks if told[rank][0]]:
                self._failed.setdefault(number, errors[0])
        if self._asked is not None and self._number is not None and (error := self._asked.answer()):
            place = self._groups[self._number].index(self._control.rank)
            self._wrong = f"rank {place} of the engine: {error}"
        self._asked = None
        return sum(nbytes for _, nbytes, _ in told), sum(planned for *_, planned in told)

    def _what(self, what: str) -> str:
        return f"publication of version {self._version}: {what}"


def serialised(named: Sequence[tuple[str, Tensor]]) -> bytes:
    """What SGLang unpickles; clones, because a view would carry its whole storage along."""
    pairs = [(name, tensor.detach().cpu().clone()) for name, tensor in named]
    return pickle.dumps(pairs, protocol=pickle.HIGHEST_PROTOCOL)

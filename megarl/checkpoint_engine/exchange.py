"""Carrying out a reshard plan between ranks, bucket by bucket: what a rank's engine needs arrives in a slot.

Each rank casts and packs what others need and takes fingerprints, which travel ahead of it. All ranks go through the
buckets in one order, and in each exchange all fingerprints before any piece, so that none waits in a circle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from megarl.checkpoint_engine.plan import Plan, Transfer
from megarl.checkpoint_engine.sides import PlanError
from megarl.checkpoint_engine.slot import ALIGNMENT, Piece, Sum, dtype_of
from megarl.runtime import Links
from megarl.weights import BLOCK, Parameter, combined, fingerprint, is_quantised, quantise

Amount = Literal["all", "changed", "nothing"]
"""Of the pieces of a plan, what is sent: all, those that changed since they were last sent, or fingerprints alone."""


class ShardSource(Protocol):
    """The trainer's side on this rank."""

    def shard(self, parameter: Parameter) -> Tensor:
        """This rank's part of a parameter, not to be kept."""


class ExchangeError(RuntimeError):
    """Another rank did not send or take its part in time."""


@dataclass
class Delivery:
    """What came for this rank's engine: the pieces of the last bucket, the sums of all; and bytes.

    `nbytes` came, of `planned` that the weights have.
    """

    pieces: list[Piece] = field(default_factory=list)
    sums: dict[str, Sum] = field(default_factory=dict)
    nbytes: int = 0
    planned: int = 0


class _Message(NamedTuple):
    """From one rank to another in a bucket. `heads` (blocks, 2) int64: a fingerprint, and whether bytes follow."""

    peer: int
    heads: Tensor
    data: Tensor


@dataclass(frozen=True)
class Precision:
    """What engines hold: parameters of `dtype`, but for those that are always float32; linear layers maybe in `fp8`."""

    dtype: torch.dtype
    fp8: bool = False

    def check(self, plan: Plan) -> None:
        """Raise PlanError: what is quantised does not travel in whole blocks."""
        for cell in plan.cells if self.fp8 else ():
            if not any(map(is_quantised, cell.parameters)):
                continue
            pieces, name = cell.pattern.pieces, cell.parameters[0].engine
            for column in ("to_row", "to_column", "rows", "columns"):
                wrong = pieces[column][pieces[column] % BLOCK != 0]
                if len(wrong):
                    raise PlanError(
                        f"{name}: FP8 has blocks of {BLOCK} x {BLOCK}, and with these layouts a rank has parts of other"
                        f" sizes ({column} {wrong[0]}); split less, or leave out rollout.fp8"
                    )

    def blocks(self, one: Transfer) -> list[Piece]:
        """What arrives of a transfer: a block, and of one that is quantised its scales."""
        name = str(one.parameter.engine).partition("[")[0]
        place = (one.to_row, one.to_column, one.rows, one.columns)
        if not (self.fp8 and is_quantised(one.parameter)):
            dtype = torch.float32 if one.parameter.float32 else self.dtype
            return [Piece(name, one.slot, *place, _name(dtype), 0)]
        row, column, rows, columns = (number // BLOCK for number in place)
        return [
            Piece(name, one.slot, *place, _name(torch.float8_e4m3fn), 0),
            Piece(f"{name}_scale_inv", one.slot, row, column, rows, columns, _name(torch.float32), 0),
        ]

    def encode(self, part: Tensor, blocks: Sequence[Piece]) -> Sequence[Tensor]:
        """The elements of each of the blocks, of a part of a shard."""
        return [part.to(dtype_of(blocks[0]))] if len(blocks) == 1 else quantise(part)


Route = dict[int, list[tuple[Transfer, list[Piece]]]]
"""By rank what comes from it, or goes to it, and what of it arrives."""


class Exchange:
    """This rank's part in a plan; each rank of the job has one of the same plan."""

    def __init__(
        self, plan: Plan, rank: int, precision: Precision, links: Links, *, device: torch.device, timeout_s: float
    ) -> None:
        self._rank, self._precision, self._links = rank, precision, links
        self._device, self._timeout_s = device, timeout_s
        self._relays = [_relay(plan, rank, number) for number in range(len(plan.relays))]
        first = _first(plan, rank)
        self._served = first == rank
        self._routes = [self._route(plan, bucket, first) for bucket in range(len(plan.buckets))]
        self._last: dict[tuple[int, int], Tensor] = {}
        """Heads that were last sent, by bucket and rank."""

    @property
    def buckets(self) -> int:
        return len(self._routes)

    @property
    def slot_bytes(self) -> int:
        """The largest bucket that comes for this rank's engine."""
        return max(
            (sum(_nbytes(_blocks(some)) for some in incoming.values()) for incoming, _ in self._routes), default=0
        )

    @torch.no_grad()
    def bucket(
        self, number: int, source: ShardSource | None, payload: Tensor, delivery: Delivery, amount: Amount
    ) -> None:
        """Fill `payload` with bucket `number`, and say in `delivery` what it holds. A rank that trains has a `source`.

        Raises ExchangeError: it names the rank that was waited for.
        """
        incoming, outgoing = self._routes[number]
        others = [peer for peer in outgoing if peer != self._rank]
        room = sum(_nbytes(_blocks(outgoing[peer])) for peer in others) if amount != "nothing" else 0
        staging = torch.empty(room, dtype=torch.uint8, device=self._device)
        away, came, free = [], [], payload
        for peer in others:
            away.append(self._packed(number, peer, outgoing[peer], source, staging, amount))
            staging = staging[len(away[-1].data) :]
        senders = [peer for peer in incoming if peer != self._rank] if self._served else []
        heads = {peer: self._heads(len(_blocks(incoming[peer]))) for peer in senders}
        with self._travelling(number, [(m.heads, m.peer) for m in away], [(heads[peer], peer) for peer in senders]):
            pass
        for peer in senders:
            nbytes = _nbytes(_sent(_blocks(incoming[peer]), heads[peer]))
            came.append(_Message(peer, heads[peer], free[:nbytes]))
            free = free[nbytes:]
        with self._travelling(number, *([(m.data, m.peer) for m in some] for some in (away, came))):
            if self._rank in outgoing:
                own = self._packed(number, self._rank, outgoing[self._rank], source, free, amount)
        came += [own] if self._rank in outgoing else []
        blocks = [block for some in incoming.values() for block in _blocks(some)]
        all_heads = torch.cat([message.heads for message in came]) if came else self._heads(len(blocks))
        for getter, giver in self._relays:
            self._pass_on(number, all_heads, getter, giver)
            self._pass_on(number, payload[: _nbytes(_sent(blocks, all_heads))], getter, giver)
        self._tell(blocks, all_heads, delivery)

    def _pass_on(self, bucket: int, data: Tensor, getter: int | None, giver: int | None) -> None:
        with self._travelling(bucket, *([] if peer is None else [(data, peer)] for peer in (getter, giver))):
            pass

    def _route(self, plan: Plan, bucket: int, first: int) -> tuple[Route, Route]:
        """What comes for rank `first`, its own last, and so in the end for this rank; and what goes from this one."""
        incoming: Route = {}
        outgoing: Route = {}
        for one in sorted(plan.transfers(bucket, first), key=lambda one: one.source == first):  # stable
            if one.target == first:
                incoming.setdefault(one.source, []).append((one, self._precision.blocks(one)))
        for one in plan.transfers(bucket, self._rank):
            if one.source == self._rank:
                outgoing.setdefault(one.target, []).append((one, self._precision.blocks(one)))
        return incoming, outgoing

    def _packed(
        self,
        bucket: int,
        peer: int,
        some: list[tuple[Transfer, list[Piece]]],
        source: ShardSource | None,
        room: Tensor,
        amount: Amount,
    ) -> _Message:
        """Blocks one behind the other from the start of `room`; one that need not be sent is written over."""
        assert source is not None, "a rank that does not train is asked for weights"
        heads, at, end = torch.zeros(len(_blocks(some)), 2, dtype=torch.int64), 0, 0
        last = self._last.get((bucket, peer)) if amount == "changed" else None
        for one, blocks in some:
            shard = source.shard(one.parameter)
            rows = shard.view(shard.shape[0], -1)[one.from_row : one.from_row + one.rows]
            part = rows[:, one.from_column : one.from_column + one.columns]
            for block, elements in zip(blocks, self._precision.encode(part, blocks), strict=True):
                value = fingerprint(elements, block.row, block.column, block.slot or 0)
                send = amount == "all" or (amount == "changed" and (last is None or int(last[at, 0]) != value))
                heads[at, 0], heads[at, 1] = value, send
                at += 1
                if send:
                    view = room[end : end + elements.nbytes].view(elements.dtype)
                    view.view(elements.shape).copy_(elements)
                    end += _aligned(elements.nbytes)
        if amount != "nothing":
            self._last[bucket, peer] = heads
        return _Message(peer, heads.to(self._device), room[:end])

    @contextmanager
    def _travelling(
        self, bucket: int, out: Sequence[tuple[Tensor, int]], into: Sequence[tuple[Tensor, int]]
    ) -> Iterator[None]:
        """Send and receive at once, while the block runs."""
        moves = [(True, *one) for one in out if len(one[0])] + [(False, *one) for one in into if len(one[0])]
        works = self._links.start(moves) if moves else []
        yield
        for work, (send, data, peer) in zip(works, moves, strict=False):  # NCCL has one for all
            try:
                work.wait(timedelta(seconds=self._timeout_s))
            except RuntimeError as error:
                raise ExchangeError(
                    f"rank {self._rank} waited {self._timeout_s:.0f} s for rank {peer} to"
                    f" {'take' if send else 'send'} {data.nbytes} bytes of new weights (bucket {bucket}): {error}"
                ) from error

    def _tell(self, blocks: list[Piece], heads: Tensor, delivery: Delivery) -> None:
        delivery.pieces, start = [], 0
        for block, (value, sent) in zip(blocks, heads.tolist(), strict=True):
            before = delivery.sums.get(block.name, Sum(block.dtype, 0))
            delivery.sums[block.name] = Sum(block.dtype, combined(before.value, value))
            if sent:
                delivery.pieces.append(msgspec.structs.replace(block, offset=start))
                start += _nbytes([block])
        delivery.nbytes += start
        delivery.planned += _nbytes(blocks)

    def _heads(self, count: int) -> Tensor:
        return torch.empty(count, 2, dtype=torch.int64, device=self._device)


def _relay(plan: Plan, rank: int, number: int) -> tuple[int | None, int | None]:
    """To which rank this one passes on what it has in a round, and from which it gets it."""
    to = origin = None
    for giver, getter in plan.relays[number]:
        for one, other in zip(plan.engines.ranks[giver], plan.engines.ranks[getter], strict=True):
            to = other if one == rank else to
            origin = one if other == rank else origin
    return to, origin


def _first(plan: Plan, rank: int) -> int:
    """The rank that the trainer serves, from which in the end this one gets what it needs."""
    for number in reversed(range(len(plan.relays))):
        _, giver = _relay(plan, rank, number)
        rank = rank if giver is None else giver
    return rank


def _blocks(some: list[tuple[Transfer, list[Piece]]]) -> list[Piece]:
    return [block for _, blocks in some for block in blocks]


def _sent(blocks: list[Piece], heads: Tensor) -> list[Piece]:
    return [block for block, (_, sent) in zip(blocks, heads.tolist(), strict=True) if sent]


def _nbytes(blocks: Iterable[Piece]) -> int:
    return sum(_aligned(block.rows * block.columns * dtype_of(block).itemsize) for block in blocks)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

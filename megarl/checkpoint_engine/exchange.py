"""Carrying out a reshard plan between ranks, bucket by bucket: what a rank's engine needs arrives in a slot.

Each rank casts and packs what others need and takes fingerprints, which travel ahead of it. All ranks go through the
buckets in one order, and in each exchange all fingerprints before any piece, so that none waits in a circle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.checkpoint_engine.plan import Plan, Transfer
from megarl.checkpoint_engine.slot import ALIGNMENT, Piece, Sum
from megarl.weights import Parameter, combined, fingerprint

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
    """What came for this rank's engine: the pieces of the last bucket, the sums of all; and the bytes of all."""

    pieces: list[Piece] = field(default_factory=list)
    sums: dict[str, Sum] = field(default_factory=dict)
    nbytes: int = 0


class _Message(NamedTuple):
    """From one rank to another in a bucket. `heads` (transfers, 2) int64: a fingerprint, and whether bytes follow."""

    peer: int
    transfers: list[Transfer]
    heads: Tensor
    data: Tensor

    def sent(self) -> list[Transfer]:
        return [one for one, (_, sent) in zip(self.transfers, self.heads.tolist(), strict=True) if sent]


class Exchange:
    """This rank's part in a plan; each rank of torch's default group has one of the same plan."""

    def __init__(self, plan: Plan, rank: int, *, dtype: torch.dtype, device: torch.device, timeout_s: float) -> None:
        """`dtype` is that of the engines' parameters, but for those that are always float32."""
        self._rank, self._dtype, self._device, self._timeout_s = rank, dtype, device, timeout_s
        self._routes = [self._route(list(plan.transfers(bucket, rank))) for bucket in range(len(plan.buckets))]
        self._last: dict[tuple[int, int], Tensor] = {}
        """Fingerprints that were last sent, by bucket and rank."""

    @property
    def buckets(self) -> int:
        return len(self._routes)

    @property
    def slot_bytes(self) -> int:
        """The largest bucket that comes for this rank's engine."""
        return max((sum(map(self._nbytes, incoming.values())) for incoming, _ in self._routes), default=0)

    @torch.no_grad()
    def bucket(self, number: int, source: ShardSource, payload: Tensor, delivery: Delivery, amount: Amount) -> None:
        """Fill `payload` with bucket `number`, and say in `delivery` what it holds.

        Raises ExchangeError: it names the rank that was waited for.
        """
        incoming, outgoing = self._routes[number]
        room = sum(self._nbytes(some) for peer, some in outgoing.items() if peer != self._rank)
        staging = torch.empty(room if amount != "nothing" else 0, dtype=torch.uint8, device=self._device)
        away, own = [], []
        for peer, transfers in outgoing.items():
            if peer == self._rank:
                own = [self._packed(number, peer, transfers, source, payload, amount)]
            else:
                away.append(self._packed(number, peer, transfers, source, staging, amount))
                staging = staging[len(away[-1].data) :]
        heads = {peer: self._heads(len(some)) for peer, some in incoming.items() if peer != self._rank}
        self._travel(number, [(m.heads, m.peer) for m in away], [(head, peer) for peer, head in heads.items()])
        came, free = own, payload[sum(len(m.data) for m in own) :]
        for peer, head in heads.items():
            message = _Message(peer, incoming[peer], head, free)
            nbytes = self._nbytes(message.sent())
            came.append(message._replace(data=free[:nbytes]))
            free = free[nbytes:]
        self._travel(number, *([(m.data, m.peer) for m in some if m.peer != self._rank] for some in (away, came)))
        self._tell(came, delivery)

    def _route(self, transfers: list[Transfer]) -> tuple[dict[int, list[Transfer]], dict[int, list[Transfer]]]:
        """By rank what comes from it, and what goes to it; this rank's own comes first."""
        incoming: dict[int, list[Transfer]] = {}
        outgoing: dict[int, list[Transfer]] = {}
        for one in sorted(transfers, key=lambda one: one.source != self._rank):  # stable
            if one.target == self._rank:
                incoming.setdefault(one.source, []).append(one)
            if one.source == self._rank:
                outgoing.setdefault(one.target, []).append(one)
        return incoming, outgoing

    def _packed(
        self, bucket: int, peer: int, transfers: list[Transfer], source: ShardSource, room: Tensor, amount: Amount
    ) -> _Message:
        """Pieces one behind the other from the start of `room`; one that need not be sent is written over."""
        heads, end = torch.zeros(len(transfers), 2, dtype=torch.int64), 0
        last = self._last.get((bucket, peer)) if amount == "changed" else None
        for i, one in enumerate(transfers):
            dtype, shard = self._dtype_of(one), source.shard(one.parameter)
            rows = shard.view(shard.shape[0], -1)[one.from_row : one.from_row + one.rows]
            piece = rows[:, one.from_column : one.from_column + one.columns].to(dtype)
            value = fingerprint(piece, one.to_row, one.to_column, one.slot or 0)
            send = amount == "all" or (amount == "changed" and (last is None or int(last[i, 0]) != value))
            heads[i, 0], heads[i, 1] = value, send
            if send:
                nbytes = one.rows * one.columns * dtype.itemsize
                room[end : end + nbytes].view(dtype).view(one.rows, one.columns).copy_(piece)
                end += _aligned(nbytes)
        if amount != "nothing":
            self._last[bucket, peer] = heads
        return _Message(peer, transfers, heads.to(self._device), room[:end])

    def _travel(self, bucket: int, out: Sequence[tuple[Tensor, int]], into: Sequence[tuple[Tensor, int]]) -> None:
        """Send and receive at once."""
        moves = [(True, *one) for one in out] + [(False, *one) for one in into]
        moves = [one for one in moves if len(one[1])]
        if not moves:
            return
        operations = [dist.P2POp(dist.isend if send else dist.irecv, data, peer) for send, data, peer in moves]
        works = dist.batch_isend_irecv(operations)
        for work, (send, data, peer) in zip(works, moves, strict=False):  # NCCL has one for all
            try:
                work.wait(timedelta(seconds=self._timeout_s))
            except RuntimeError as error:
                raise ExchangeError(
                    f"rank {self._rank} waited {self._timeout_s:.0f} s for rank {peer} to"
                    f" {'take' if send else 'send'} {data.nbytes} bytes of new weights (bucket {bucket}): {error}"
                ) from error

    def _tell(self, came: Iterable[_Message], delivery: Delivery) -> None:
        delivery.pieces, start = [], 0
        for message in came:
            for one, (value, sent) in zip(message.transfers, message.heads.tolist(), strict=True):
                dtype = self._dtype_of(one)
                name, kind = str(one.parameter.engine).partition("[")[0], str(dtype).removeprefix("torch.")
                before = delivery.sums.get(name, Sum(kind, 0))
                delivery.sums[name] = Sum(kind, combined(before.value, value))
                if sent:
                    place = (one.to_row, one.to_column, one.rows, one.columns)
                    delivery.pieces.append(Piece(name, one.slot, *place, kind, start))
                    start += _aligned(one.rows * one.columns * dtype.itemsize)
        delivery.nbytes += start

    def _nbytes(self, transfers: Iterable[Transfer]) -> int:
        return sum(_aligned(one.rows * one.columns * self._dtype_of(one).itemsize) for one in transfers)

    def _dtype_of(self, one: Transfer) -> torch.dtype:
        return torch.float32 if one.parameter.float32 else self._dtype

    def _heads(self, count: int) -> Tensor:
        return torch.empty(count, 2, dtype=torch.int64, device=self._device)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT

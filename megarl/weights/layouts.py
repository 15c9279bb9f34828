"""How the tensors of a Hugging Face checkpoint lie in a Megatron parameter, and how both are split over ranks.

Pure tensor arithmetic. Each layout converts between the Hugging Face tensors of a parameter, the whole Megatron
parameter, and one rank's shard of it. Those of dense models also say which part one rank of an engine holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class Layout(ABC):
    """`parts` are the Hugging Face tensors in the table's order."""

    @abstractmethod
    def to_megatron(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole Megatron parameter."""

    @abstractmethod
    def to_hf(self, whole: Tensor) -> list[Tensor]:
        """The inverse of `to_megatron`."""

    def whole_shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """That of the whole Megatron parameter of parts of these `shapes`."""
        return (sum(rows for rows, *_ in shapes), *shapes[0][1:])

    @abstractmethod
    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Tensor-parallel rank `rank`'s shard of the whole."""

    @abstractmethod
    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The inverse of `shard` over all ranks."""


class EngineLayout(Layout):
    """A layout that SGLang has too, fused in the same way."""

    @abstractmethod
    def engine_shard(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """What rank `rank` of an engine with `size` ranks holds under its fused name."""


class Replicated(EngineLayout):
    """One tensor, the same on every rank."""

    def to_megatron(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0]

    def to_hf(self, whole: Tensor) -> list[Tensor]:
        return [whole]

    def whole_shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return shapes[0]

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        return whole

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return shards[0]

    def engine_shard(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return parts[0]


@dataclass(frozen=True)
class Split(EngineLayout):
    """One tensor, divided evenly along `dim`."""

    dim: int

    def to_megatron(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0]

    def to_hf(self, whole: Tensor) -> list[Tensor]:
        return [whole]

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        return whole.chunk(size, self.dim)[rank]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(shards), self.dim)

    def engine_shard(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return parts[0].chunk(size, self.dim)[rank]


@dataclass(frozen=True)
class Vocabulary(Split):
    """Rows of tokens; Megatron's and the engine's are padded with zeros to divide evenly."""

    vocab: int
    padded: int
    engine_multiple: int = 64  # SGLang pads its vocabulary to this

    def to_megatron(self, parts: Sequence[Tensor]) -> Tensor:
        return _pad_rows(parts[0], self.padded)

    def to_hf(self, whole: Tensor) -> list[Tensor]:
        return [whole[: self.vocab]]

    def whole_shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return (self.padded, *shapes[0][1:])

    def engine_shard(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        rows = -(-self.vocab // self.engine_multiple) * self.engine_multiple
        return _pad_rows(parts[0], -(-rows // size) * size).chunk(size)[rank]


@dataclass(frozen=True)
class QueryKeyValue(EngineLayout):
    """Query, key and value rows, interleaved by key-value group: a group's queries, its key, its value."""

    heads: int
    kv_heads: int
    head_dim: int

    def to_megatron(self, parts: Sequence[Tensor]) -> Tensor:
        grouped = [part.unflatten(0, (self.kv_heads, -1)) for part in parts]
        return torch.cat(grouped, 1).flatten(0, 1)

    def to_hf(self, whole: Tensor) -> list[Tensor]:
        grouped = whole.unflatten(0, (self.kv_heads, -1))
        query_rows = self.heads // self.kv_heads * self.head_dim
        return [part.flatten(0, 1) for part in grouped.split([query_rows, self.head_dim, self.head_dim], 1)]

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        return whole.chunk(size)[rank]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(shards))

    def engine_shard(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        query, *key_value = parts
        # an engine with more ranks than key-value heads repeats them
        copies = max(1, size // self.kv_heads)
        return torch.cat([query.chunk(size)[rank], *(x.chunk(size // copies)[rank // copies] for x in key_value)])


class GateUp(EngineLayout):
    """Gate rows over up rows; a rank holds its part of both."""

    def to_megatron(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))

    def to_hf(self, whole: Tensor) -> list[Tensor]:
        return list(whole.chunk(2))

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        return _shard_halves(whole, rank, size)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return _unshard_halves(shards)

    def engine_shard(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        return torch.cat([part.chunk(size)[rank] for part in parts])


class InterleavedGateUp(Layout):
    """One tensor (inputs, 2 * width), or a bias (2 * width), whose outputs are gate, up, gate, up; then as GateUp."""

    def to_megatron(self, parts: Sequence[Tensor]) -> Tensor:
        rows = parts[0].movedim(-1, 0)
        return torch.cat([rows[0::2], rows[1::2]])

    def to_hf(self, whole: Tensor) -> list[Tensor]:
        return [torch.stack(whole.chunk(2), 1).flatten(0, 1).movedim(0, -1).contiguous()]

    def whole_shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return shapes[0][::-1]

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        return _shard_halves(whole, rank, size)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return _unshard_halves(shards)


class TransposedInputs(Layout):
    """One matrix (inputs, outputs), Megatron's transposed; a rank has its part of the inputs."""

    def to_megatron(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].T

    def to_hf(self, whole: Tensor) -> list[Tensor]:
        return [whole.T.contiguous()]

    def whole_shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return shapes[0][::-1]

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        return whole.chunk(size, 1)[rank]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(shards), 1)


@dataclass(frozen=True)
class RopePairs(Layout):
    """One tensor, divided by rows; of every `period` rows the last `rope` are rotated as two halves.

    Megatron's latent attention rotates neighbours, so that the halves' rows alternate there.
    """

    period: int
    rope: int

    def to_megatron(self, parts: Sequence[Tensor]) -> Tensor:
        return self._reorder(parts[0], (2, self.rope // 2))

    def to_hf(self, whole: Tensor) -> list[Tensor]:
        return [self._reorder(whole, (self.rope // 2, 2))]

    def shard(self, whole: Tensor, rank: int, size: int) -> Tensor:
        return whole.chunk(size)[rank]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(shards))

    def _reorder(self, rows: Tensor, grid: tuple[int, int]) -> Tensor:
        """The rotated rows of each period, seen as a `grid`, are read column by column."""
        still, rotated = rows.unflatten(0, (-1, self.period)).split([self.period - self.rope, self.rope], 1)
        return torch.cat([still, rotated.unflatten(1, grid).transpose(1, 2).flatten(1, 2)], 1).flatten(0, 1)


def _shard_halves(whole: Tensor, rank: int, size: int) -> Tensor:
    return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])


def _unshard_halves(shards: Sequence[Tensor]) -> Tensor:
    firsts, seconds = zip(*(shard.chunk(2) for shard in shards), strict=True)
    return torch.cat([*firsts, *seconds])


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor

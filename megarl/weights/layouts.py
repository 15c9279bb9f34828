"""How the tensors of a Hugging Face checkpoint lie in a Megatron parameter, and how both are split over ranks.

Pure tensor arithmetic. Each layout converts between the Hugging Face tensors of a parameter, the whole Megatron
parameter, and one rank's shard of it. Those that an engine has too say in boxes what a rank of either holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.weights.boxes import Box, cut, matrix, share

Shapes = Sequence[tuple[int, ...]]
"""Those of a parameter's Hugging Face tensors."""


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
    """A layout that SGLang has too, fused in the same way. Sizes that ranks cannot divide raise ValueError."""

    @abstractmethod
    def boxes(self, shapes: Shapes, rank: int, size: int) -> list[Box]:
        """What tensor-parallel rank `rank` of the trainer holds: its `shard`."""

    def engine_boxes(self, shapes: Shapes, rank: int, size: int) -> list[Box]:
        """What rank `rank` of an engine with `size` ranks holds under its fused name."""
        return self.boxes(shapes, rank, size)

    def engine_shape(self, shapes: Shapes, size: int) -> tuple[int, ...]:
        """The shape of what one of the engine's ranks holds; it is zero where no box lies."""
        boxes = self.engine_boxes(shapes, 0, size)
        rows, columns = max(box.at_row + box.rows for box in boxes), max(box.at_column + box.columns for box in boxes)
        return (rows, columns) if len(shapes[0]) > 1 else (rows,)

    def engine_shard(self, parts: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """What `engine_boxes` say, as a tensor."""
        shapes = [tuple(part.shape) for part in parts]
        return cut(parts, self.engine_boxes(shapes, rank, size), self.engine_shape(shapes, size))


@dataclass(frozen=True)
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

    def boxes(self, shapes: Shapes, rank: int, size: int) -> list[Box]:
        return [_whole(shapes[0])]


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

    def boxes(self, shapes: Shapes, rank: int, size: int) -> list[Box]:
        rows, columns = matrix(shapes[0])
        if self.dim == 0:
            return _whole(shapes[0]).in_rows(*share(rows, rank, size))
        start, count = share(columns, rank, size)
        return [Box(0, 0, start, rows, count, 0, 0)]


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

    def boxes(self, shapes: Shapes, rank: int, size: int) -> list[Box]:
        return _whole(shapes[0]).in_rows(*share(self.padded, rank, size))

    def engine_boxes(self, shapes: Shapes, rank: int, size: int) -> list[Box]:
        rows = self.engine_shape(shapes, size)[0]
        return _whole(shapes[0]).in_rows(rank * rows, rows)

    def engine_shape(self, shapes: Shapes, size: int) -> tuple[int, ...]:
        rows = -(-self.vocab // self.engine_multiple) * self.engine_multiple
        if rows % size:
            multiple = self.engine_multiple * size
            rows = -(-self.vocab // multiple) * multiple
        return (rows // size, *shapes[0][1:])


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

    def boxes(self, shapes: Shapes, rank: int, size: int) -> list[Box]:
        in_group = [rows // self.kv_heads for rows, *_ in shapes]
        mine = share(self.kv_heads * sum(in_group), rank, size)
        return [
            box
            for group in range(self.kv_heads)
            for part, rows in enumerate(in_group)
            for box in Box(
                part, group * rows, 0, rows, matrix(shapes[part])[1], group * sum(in_group) + sum(in_group[:part]), 0
            ).in_rows(*mine)
        ]

    def engine_boxes(self, shapes: Shapes, rank: int, size: int) -> list[Box]:
        # an engine with more ranks than key-value heads repeats them
        copies = max(1, size // self.kv_heads)
        start, count = share(self.kv_heads * copies, rank, size)
        shares = [share(self.heads, rank, size), *[(start // copies, count)] * 2]
        return _stacked(shapes, [(start * self.head_dim, count * self.head_dim) for start, count in shares])


@dataclass(frozen=True)
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

    def boxes(self, shapes: Shapes, rank: int, size: int) -> list[Box]:
        return _stacked(shapes, [share(rows, rank, size) for rows, *_ in shapes])


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
class RopePairs(EngineLayout):
    """One tensor, divided by rows; of every `period` rows the last `rope` are rotated as two halves.

    Megatron's latent attention rotates neighbours, so that the halves' rows alternate there. An engine leaves them.
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

    def boxes(self, shapes: Shapes, rank: int, size: int) -> list[Box]:
        rows, columns = matrix(shapes[0])
        still, half = self.period - self.rope, self.rope // 2
        mine = share(rows, rank, size)
        boxes = []
        for start in range(0, rows, self.period):
            boxes += Box(0, start, 0, still, columns, start, 0).in_rows(*mine)
            for at in range(self.rope):
                row = start + still + at // 2 + at % 2 * half
                boxes += Box(0, row, 0, 1, columns, start + still + at, 0).in_rows(*mine)
        return boxes

    def engine_boxes(self, shapes: Shapes, rank: int, size: int) -> list[Box]:
        return Split(dim=0).boxes(shapes, rank, size)

    def _reorder(self, rows: Tensor, grid: tuple[int, int]) -> Tensor:
        """The rotated rows of each period, seen as a `grid`, are read column by column."""
        still, rotated = rows.unflatten(0, (-1, self.period)).split([self.period - self.rope, self.rope], 1)
        return torch.cat([still, rotated.unflatten(1, grid).transpose(1, 2).flatten(1, 2)], 1).flatten(0, 1)


def _whole(shape: tuple[int, ...]) -> Box:
    return Box(0, 0, 0, *matrix(shape), 0, 0)


def _stacked(shapes: Shapes, rows: Sequence[tuple[int, int]]) -> list[Box]:
    """Of each part `rows`, a start and a count, one part under the other."""
    boxes: list[Box] = []
    at = 0
    for part, (start, count) in enumerate(rows):
        boxes.append(Box(part, start, 0, count, matrix(shapes[part])[1], at, 0))
        at += count
    return boxes


def _shard_halves(whole: Tensor, rank: int, size: int) -> Tensor:
    return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])


def _unshard_halves(shards: Sequence[Tensor]) -> Tensor:
    firsts, seconds = zip(*(shard.chunk(2) for shard in shards), strict=True)
    return torch.cat([*firsts, *seconds])


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    missing = rows - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor

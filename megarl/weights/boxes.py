"""Which elements of a parameter's Hugging Face tensors lie where in a shard, said in boxes.

The one language for shards of the trainer and of an engine, so that what both hold is the overlap of their boxes.
A tensor counts as a matrix here: a vector is one column.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor


class Box(NamedTuple):
    """`rows` x `columns` elements of Hugging Face tensor `part` from (row, column) on.

    They lie in the shard from (at_row, at_column) on.
    """

    part: int
    row: int
    column: int
    rows: int
    columns: int
    at_row: int
    at_column: int

    def in_rows(self, start: int, count: int) -> list[Box]:
        """What lies in the shard's rows [start, start + count), which become a shard of their own; maybe nothing."""
        first, stop = max(self.at_row, start), min(self.at_row + self.rows, start + count)
        if first >= stop:
            return []
        return [self._replace(row=self.row + first - self.at_row, rows=stop - first, at_row=first - start)]


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns."""
    return shape[0], prod(shape[1:])


def share(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Start and length of rank `rank`'s even part. Raises ValueError: it is not even."""
    if size % ranks:
        raise ValueError(f"{size} cannot be divided evenly over {ranks} ranks")
    return size // ranks * rank, size // ranks


def cut(parts: Sequence[Tensor], boxes: Iterable[Box], shape: tuple[int, ...]) -> Tensor:
    """The shard of that `shape`; what no box fills is zero."""
    shard = parts[0].new_zeros(shape)
    for part, row, column, rows, columns, at_row, at_column in boxes:
        source = parts[part].reshape(matrix(parts[part].shape))[row : row + rows, column : column + columns]
        shard.view(matrix(shape))[at_row : at_row + rows, at_column : at_column + columns] = source
    return shard

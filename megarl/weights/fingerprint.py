"""A checksum of a tensor that is the sum of those of its parts, so that whoever has a part can add his share.

Element (row, column) of slice `slot`, its bits taken as an integer, is multiplied by one odd 64-bit number for its row,
one for its column and one for its slot, all fixed and random; the products are summed modulo 2^64. One wrong element
always shows. Two tensors that differ in several agree by chance once in some 2^32: the numbers do not depend on them,
and an element has at most 32 bits (universal hashing by random inner products, Carter and Wegman 1979).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_ROWS, _COLUMNS, _SLOTS = range(3)
_AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 22}  # elements that are 64-bit integers at a time; a CPU's stay in its cache
_MODULUS = 1 << 64


def fingerprint(part: Tensor, row: int = 0, column: int = 0, slot: int = 0) -> int:
    """That of a (rows, columns) `part`, which begins at (row, column) of slice `slot`; a signed 64-bit number."""
    rows, columns = part.shape
    integers = part.contiguous().view(_INTEGERS[part.element_size()])
    by_column = _numbers(_COLUMNS, column, columns, part.device)
    step = max(1, _AT_ONCE[part.device.type] // columns)
    # the same memory each time: a CPU takes longer to be given new memory than to multiply
    products = torch.empty(min(step, rows), columns, dtype=torch.int64, device=part.device)
    sums = torch.empty(rows, dtype=torch.int64, device=part.device)
    for start in range(0, rows, step):
        chunk = integers[start : start + step]
        torch.mul(chunk, by_column, out=products[: len(chunk)])
        torch.sum(products[: len(chunk)], 1, out=sums[start : start + step])
    total = (sums * _numbers(_ROWS, row, rows, part.device)).sum() * _numbers(_SLOTS, slot, 1, part.device)
    return int(total)


def combined(one: int, other: int) -> int:
    """The fingerprint of two parts together."""
    return (one + other + _MODULUS // 2) % _MODULUS - _MODULUS // 2


def _numbers(axis: int, start: int, count: int, device: torch.device) -> Tensor:
    enough = 1 << max(10, (start + count - 1).bit_length())
    return _all_numbers(axis, enough, device)[start : start + count]


@lru_cache(maxsize=32)
def _all_numbers(axis: int, count: int, device: torch.device) -> Tensor:
    """The first `count` odd numbers of an axis: SplitMix64 (Steele, Lea and Flood 2014), each axis from a start of its
    own."""
    bits = torch.arange(count, device=device) + (axis << 40)
    bits = (bits + 1) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ _shifted(bits, shift)) * _signed(factor)
    return (bits ^ _shifted(bits, 31)) | 1


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, zeros coming in; torch's shift brings in the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - _MODULUS if number >> 63 else number

"""Fingerprints: those of parts add up, in any cut, and a change shows."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megarl.weights import combined, fingerprint

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]
MASK = (1 << 64) - 1


def written_out(tensor: Tensor, slot: int) -> int:
    """Element by element, with Python's integers."""

    def number(axis: int, index: int) -> int:
        bits = ((axis << 40) + index + 1) * 0x9E3779B97F4A7C15 & MASK
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & MASK
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & MASK
        return (bits ^ bits >> 31) | 1

    size = tensor.element_size()
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    columns, total = tensor.shape[1], 0
    for i in range(tensor.numel()):
        value = int.from_bytes(raw[i * size : (i + 1) * size], "little", signed=size > 1)
        total += value * number(0, i // columns) * number(1, i % columns) * number(2, slot)
    total &= MASK
    return total - (1 << 64) if total >> 63 else total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slot", [0, 5])
def test_it_is_the_sum_that_is_described(dtype: torch.dtype, slot: int) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(7, 11).to(dtype)
    assert fingerprint(tensor, slot=slot) == written_out(tensor, slot)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_add_up_however_a_tensor_is_cut(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source, tensor = random.Random(0), torch.randn(53, 1500).to(dtype)
    whole = fingerprint(tensor)
    for _ in range(10):
        rows = sorted({0, 53, *source.sample(range(1, 53), 3)})
        columns = sorted({0, 1500, *source.sample(range(1, 1500), 3)})
        total = 0
        for top, bottom in pairwise(rows):
            for left, right in pairwise(columns):
                total = combined(total, fingerprint(tensor[top:bottom, left:right], top, left))
        assert total == whole


def test_any_change_shows() -> None:
    """One bit, two elements exchanged, two rows, two blocks, a part one place off."""
    torch.manual_seed(0)
    tensor = torch.randn(40, 40)
    whole, source = fingerprint(tensor), random.Random(0)
    for _ in range(200):
        i, j, k, m = (source.randrange(40) for _ in range(4))
        changed = tensor.clone()
        changed.view(torch.int32)[i, j] ^= 1 << source.randrange(31)
        assert fingerprint(changed) != whole
        if (i, j) != (k, m):
            changed = tensor.clone()
            changed[i, j], changed[k, m] = tensor[k, m], tensor[i, j]
            assert fingerprint(changed) != whole
        if i != k:
            changed = tensor.clone()
            changed[[i, k]] = tensor[[k, i]]
            assert fingerprint(changed) != whole
    assert fingerprint(tensor.T.contiguous()) != whole
    assert fingerprint(tensor, 1, 0) != whole != fingerprint(tensor, 0, 1)
    assert fingerprint(torch.roll(tensor, (20, 20), (0, 1))) != whole


def test_large_tensors_are_the_sums_of_their_rows() -> None:
    """More than is worked on at a time."""
    torch.manual_seed(0)
    tensor = torch.randn(1100, 700)
    total = 0
    for row in range(1100):
        total = combined(total, fingerprint(tensor[row : row + 1], row))
    assert total == fingerprint(tensor)


def test_padding_of_zeros_counts_nothing() -> None:
    tensor = torch.randn(5, 4)
    assert fingerprint(torch.cat([tensor, torch.zeros(3, 4)])) == fingerprint(tensor)

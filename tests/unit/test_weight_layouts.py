"""Layouts: every conversion has its inverse, every element lies in one place, and that place is the right one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.weights.boxes import cut
from megarl.weights.layouts import (
    EngineLayout,
    GateUp,
    InterleavedGateUp,
    Layout,
    QueryKeyValue,
    Replicated,
    RopePairs,
    Split,
    TransposedInputs,
    Vocabulary,
)

fixed = settings(derandomize=True, deadline=None)  # the same examples each time; the machine may be busy

small = st.integers(1, 5)
Case = tuple[Layout, list[Tensor], int]


def numbered(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Tensors of these shapes whose elements are all different, and none is 0, which is padding."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    numbers = torch.arange(1, sum(sizes) + 1).split(sizes)
    return [part.view(shape) for part, shape in zip(numbers, shapes, strict=True)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A layout, the Hugging Face tensors of one parameter, and a tensor-parallel size that divides it."""
    size, rows, columns = draw(small), draw(small), draw(small)
    trailing = draw(st.sampled_from([(), (columns,)]))
    kinds = ["replicated", "rows", "columns", "vocabulary", "qkv", "gate_up", "interleaved", "transposed", "pairs"]
    match draw(st.sampled_from(kinds)):
        case "replicated":
            return Replicated(), numbered((rows, *trailing)), size
        case "rows":
            return Split(dim=0), numbered((size * rows, *trailing)), size
        case "columns":
            return Split(dim=1), numbered((rows, size * columns)), size
        case "vocabulary":
            vocab = draw(st.integers(1, 200))
            return Vocabulary(dim=0, vocab=vocab, padded=-(-vocab // size) * size), numbered((vocab, columns)), size
        case "qkv":
            kv_heads, queries, head_dim = size * rows, draw(small), draw(small)
            heads = kv_heads * queries
            shapes = [(n * head_dim, *trailing) for n in (heads, kv_heads, kv_heads)]
            return QueryKeyValue(heads, kv_heads, head_dim), numbered(*shapes), size
        case "interleaved":
            return InterleavedGateUp(), numbered((*trailing, 2 * size * rows)), size
        case "transposed":
            return TransposedInputs(), numbered((size * rows, columns)), size
        case "pairs":
            rope = 2 * draw(small)
            period = rope + draw(st.integers(0, 3))
            return RopePairs(period, rope), numbered((size * rows * period, *trailing)), size
        case _:
            return GateUp(), numbered(*[(size * rows, *trailing)] * 2), size


def elements(tensors: list[Tensor]) -> list[int]:
    """All elements that are not padding, sorted."""
    return sorted(x for tensor in tensors for x in tensor.flatten().tolist() if x)


@fixed
@given(cases())
def test_to_hf_inverts_to_megatron(case: Case) -> None:
    layout, parts, _ = case
    back = layout.to_hf(layout.to_megatron(parts))
    assert len(back) == len(parts)
    assert all(torch.equal(a, b) for a, b in zip(back, parts, strict=True))


@fixed
@given(cases())
def test_unshard_inverts_shard(case: Case) -> None:
    layout, parts, size = case
    whole = layout.to_megatron(parts)
    shards = [layout.shard(whole, rank, size) for rank in range(size)]
    assert len({shard.shape for shard in shards}) == 1
    assert torch.equal(layout.unshard(shards), whole)


@fixed
@given(cases())
def test_every_element_lies_in_exactly_one_shard(case: Case) -> None:
    layout, parts, size = case
    whole = layout.to_megatron(parts)
    assert elements([whole]) == elements(parts)
    shards = [layout.shard(whole, rank, size) for rank in range(size)]
    for shard in shards if isinstance(layout, Replicated) else [torch.cat([x.flatten() for x in shards])]:
        assert elements([shard]) == elements(parts)


@fixed
@given(cases())
def test_every_element_lies_in_exactly_one_engine_rank(case: Case) -> None:
    layout, parts, size = case
    if not isinstance(layout, EngineLayout):
        return
    shards = [layout.engine_shard(parts, rank, size) for rank in range(size)]
    for shard in shards if isinstance(layout, Replicated) else [torch.cat([x.flatten() for x in shards])]:
        assert elements([shard]) == elements(parts)


@fixed
@given(cases())
def test_boxes_say_what_a_shard_holds(case: Case) -> None:
    layout, parts, size = case
    if not isinstance(layout, EngineLayout):
        return
    whole, shapes = layout.to_megatron(parts), [tuple(part.shape) for part in parts]
    for rank in range(size):
        shard = layout.shard(whole, rank, size)
        assert torch.equal(cut(parts, layout.boxes(shapes, rank, size), tuple(shard.shape)), shard)


@fixed
@given(kv_heads=small, queries=small, head_dim=small, columns=st.sampled_from([(), (3,)]))
def test_query_key_value_rows_lie_by_group(
    kv_heads: int, queries: int, head_dim: int, columns: tuple[int, ...]
) -> None:
    """Row by row: a group is its `queries` query heads, then its key head, then its value head."""
    heads = kv_heads * queries
    query, key, value = numbered(*[(n * head_dim, *columns) for n in (heads, kv_heads, kv_heads)])
    whole = QueryKeyValue(heads, kv_heads, head_dim).to_megatron([query, key, value])
    for row in range((heads + 2 * kv_heads) * head_dim):
        group, slot = divmod(row // head_dim, queries + 2)
        within = row % head_dim
        if slot < queries:
            expected = query[(group * queries + slot) * head_dim + within]
        else:
            expected = (key if slot == queries else value)[group * head_dim + within]
        assert torch.equal(whole[row], expected)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "queries_of", "key_values_of"),
    [
        (8, 4, 2, [range(4), range(4, 8)], [(0, 1), (2, 3)]),
        (8, 4, 4, [(0, 1), (2, 3), (4, 5), (6, 7)], [(0,), (1,), (2,), (3,)]),
        (8, 2, 4, [(0, 1), (2, 3), (4, 5), (6, 7)], [(0,), (0,), (1,), (1,)]),
        (8, 1, 4, [(0, 1), (2, 3), (4, 5), (6, 7)], [(0,), (0,), (0,), (0,)]),
        (8, 2, 8, [(n,) for n in range(8)], [(0,), (0,), (0,), (0,), (1,), (1,), (1,), (1,)]),
    ],
)
def test_an_engine_rank_holds_its_queries_and_the_keys_they_need(
    heads: int, kv_heads: int, size: int, queries_of: list[range], key_values_of: list[tuple[int, ...]]
) -> None:
    head_dim = 3
    parts = numbered(*[(n * head_dim, 2) for n in (heads, kv_heads, kv_heads)])
    query, key, value = (part.view(-1, head_dim, 2) for part in parts)
    for rank in range(size):
        own, shared = list(queries_of[rank]), list(key_values_of[rank])
        expected = torch.cat([query[own], key[shared], value[shared]]).flatten(0, 1)
        assert torch.equal(QueryKeyValue(heads, kv_heads, head_dim).engine_shard(parts, rank, size), expected)


@fixed
@given(rows=small, size=small, columns=small)
def test_a_rank_holds_gates_over_their_ups(rows: int, size: int, columns: int) -> None:
    gate, up = numbered(*[(size * rows, columns)] * 2)
    whole = GateUp().to_megatron([gate, up])
    for rank in range(size):
        mine = slice(rank * rows, (rank + 1) * rows)
        expected = torch.cat([gate[mine], up[mine]])
        assert torch.equal(GateUp().shard(whole, rank, size), expected)
        assert torch.equal(GateUp().engine_shard([gate, up], rank, size), expected)


@fixed
@given(vocab=st.integers(1, 300), size=st.integers(1, 8))
def test_the_vocabulary_is_padded_with_zeros_at_its_end(vocab: int, size: int) -> None:
    padded = -(-vocab // size) * size
    (table,) = numbered((vocab, 2))
    layout = Vocabulary(dim=0, vocab=vocab, padded=padded)
    whole = layout.to_megatron([table])
    assert whole.shape == (padded, 2)
    assert torch.equal(whole[:vocab], table)
    assert not whole[vocab:].any()
    engine = [layout.engine_shard([table], rank, size) for rank in range(size)]
    assert len({shard.shape for shard in engine}) == 1
    together = torch.cat(engine)
    assert torch.equal(together[:vocab], table)
    assert not together[vocab:].any()
    if 64 % size == 0:  # else SGLang refuses the size
        assert len(together) == -(-vocab // 64) * 64


@fixed
@given(kv_heads=small, queries=small, copies=small, head_dim=small)
def test_more_ranks_than_key_value_heads_share_a_groups_rows(
    kv_heads: int, queries: int, copies: int, head_dim: int
) -> None:
    """Megatron gathers what such ranks compute, so that each has an equal part of the rows, wherever a head ends."""
    size = kv_heads * copies
    heads = kv_heads * queries * copies
    layout, rows = QueryKeyValue(heads, kv_heads, head_dim), (heads + 2 * kv_heads) * head_dim
    if rows % size:
        return
    whole = layout.to_megatron(numbered(*[(n * head_dim, 2) for n in (heads, kv_heads, kv_heads)]))
    shards = [layout.shard(whole, rank, size) for rank in range(size)]
    assert [len(shard) for shard in shards] == [rows // size] * size
    assert torch.equal(layout.unshard(shards), whole)


@fixed
@given(size=small, rows=small, columns=small)
def test_interleaved_outputs_are_told_apart(size: int, rows: int, columns: int) -> None:
    """Rank by rank: its gates, which were the even columns, over its ups, which were the odd ones."""
    width = size * rows
    weight, bias = numbered((columns, 2 * width), (2 * width,))
    for rank in range(size):
        mine = [*range(2 * rank * rows, 2 * (rank + 1) * rows)]
        order = mine[0::2] + mine[1::2]
        layout = InterleavedGateUp()
        assert torch.equal(layout.shard(layout.to_megatron([weight]), rank, size), weight[:, order].T)
        assert torch.equal(layout.shard(layout.to_megatron([bias]), rank, size), bias[order])


def test_a_transposed_matrix_is_split_by_its_inputs() -> None:
    (weight,) = numbered((6, 4))
    whole = TransposedInputs().to_megatron([weight])
    for rank in range(3):
        assert torch.equal(TransposedInputs().shard(whole, rank, 3), weight[2 * rank : 2 * rank + 2].T)


def test_only_rotated_rows_are_paired() -> None:
    """Two heads of 3 + 6 rows: of the 6, the first half's rows each before their partner in the second."""
    (weight,) = numbered((18, 2))
    order = [0, 1, 2, 3, 6, 4, 7, 5, 8]
    assert torch.equal(RopePairs(period=9, rope=6).to_megatron([weight]), weight[order + [9 + row for row in order]])

"""Packing: every token of every sequence is somewhere, once, beside its target, its place and what is said of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from megarl.model_engine.attention import PackedAttention, Packing, pack
from megarl.model_engine.microbatch import (
    Alignment,
    MicroBatch,
    RemoteTokens,
    TokenSequence,
    check_sequences,
    collate,
    load,
)

CPU = torch.device("cpu")
LENGTHS = [5, 2, 31, 17, 9, 64, 3, 8]


def batch_of(lengths: list[int]) -> list[TokenSequence]:
    """Sequences in which no two tokens are alike, with a column that names each response token."""
    made, first = [], 1000
    for length in lengths:
        prompt = max(1, length // 3)
        ids = list(range(first, first + length))
        made.append(TokenSequence(ids, prompt, {"own": torch.tensor(ids[prompt:]).float()}))
        first += length
    return made


def all_ranks(
    batch: list[TokenSequence], plan: list[list[int]], context: int, tensor: int, *, equal: bool = False
) -> list[list[MicroBatch]]:
    """[context rank][micro-batch]."""
    alignments = [Alignment(context=context, context_rank=rank, tensor=tensor) for rank in range(context)]
    return [collate(batch, plan, alignment, CPU, equal=equal) for alignment in alignments]


layouts = pytest.mark.parametrize(("context", "tensor"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1)])


@layouts
def test_each_token_is_fed_once_with_its_successor_as_target(context: int, tensor: int) -> None:
    batch, plan = batch_of(LENGTHS), [[0, 3, 1], [2], [4, 5, 6, 7]]
    pairs: list[tuple[int, int]] = []
    for rank in all_ranks(batch, plan, context, tensor):
        for micro in rank:
            real = micro.input_ids > 0
            pairs += zip(micro.input_ids[real].tolist(), micro.targets[real].tolist(), strict=True)
            assert len(micro.input_ids) % tensor == 0
    expected = [pair for sequence in batch for pair in itertools.pairwise(sequence.input_ids)]
    assert sorted(pairs) == sorted(expected)


@layouts
def test_masks_columns_and_indices_belong_to_the_target(context: int, tensor: int) -> None:
    batch = batch_of(LENGTHS)
    flat = torch.cat([sequence.columns["own"] for sequence in batch])
    seen = []
    for rank in all_ranks(batch, [[7, 2], [0, 1, 3], [6, 5, 4]], context, tensor):
        for micro in rank:
            predicted = micro.mask > 0
            torch.testing.assert_close(micro.columns["own"][predicted], micro.targets[predicted].float())
            torch.testing.assert_close(flat[micro.response_index[predicted]], micro.targets[predicted].float())
            assert not micro.columns["own"][~predicted].any()
            seen += micro.response_index[predicted].tolist()
    assert sorted(seen) == list(range(len(flat)))


@layouts
def test_positions_are_those_within_the_sequence(context: int, tensor: int) -> None:
    batch = batch_of(LENGTHS)
    place = {token: i for sequence in batch for i, token in enumerate(sequence.input_ids)}
    for rank in all_ranks(batch, [list(range(len(batch)))], context, tensor):
        for micro in rank:
            real = micro.input_ids > 0
            assert micro.packing.positions[real].tolist() == [place[t] for t in micro.input_ids[real].tolist()]


def test_a_rank_without_sequences_keeps_step() -> None:
    for batch, plan in [(batch_of([4, 4]), [[]]), ([], [[]])]:
        ((micro,),) = all_ranks(batch, plan, 1, 4)
        assert len(micro.input_ids) == 4
        assert not micro.mask.any()
        assert micro.columns.keys() == (batch[0].columns.keys() if batch else set())


def test_microbatches_can_be_made_equally_long() -> None:
    """Interleaved pipeline stages tell each other no lengths."""
    (microbatches,) = all_ranks(batch_of(LENGTHS), [[5], [1], [], [0, 2]], 1, 2, equal=True)
    assert len({len(micro.input_ids) for micro in microbatches}) == 1


def test_without_need_only_the_alignment_is_padding() -> None:
    (microbatches,) = all_ranks(batch_of(LENGTHS), [[5], [1, 0]], 1, 2)
    assert [len(micro.input_ids) for micro in microbatches] == [64, 6]  # 63, and 1 + 4, to multiples of 2


@pytest.mark.parametrize("size", [1, 2, 4])
def test_blocks_find_all_keys_of_a_sequence_in_order(size: int) -> None:
    lengths = [8, 16, 8, 64, 40]
    packings = [pack(lengths, rank=rank, size=size) for rank in range(size)]
    positions = torch.cat([packing.positions for packing in packings])  # as gathered from the ranks
    starts = [sum(lengths[:i]) // size for i in range(len(lengths))]
    local = sum(lengths) // size
    for packing in packings:
        for block in packing.blocks:
            for keys, queries in zip(block.keys, block.queries, strict=True):
                sequence = max(i for i, start in enumerate(starts) if int(queries[0]) >= start)
                assert positions[keys][: lengths[sequence]].tolist() == list(range(lengths[sequence]))
                owners = keys // local
                assert owners.unique().tolist() == list(range(size))


def test_rows_of_blocks_are_padded_by_seven_tokens_or_a_fifth() -> None:
    lengths = [1, 7, 9, 30, 64, 65, 79, 127, 128, 200, 1000, 1024, 1030, 4096, 5000]
    packing = pack(lengths, rank=0, size=1)
    starts = torch.tensor([sum(lengths[:i]) for i in range(len(lengths))])
    rows = {int(row[0]): len(row) for block in packing.blocks for row in block.queries}
    assert rows.keys() == set(starts.tolist())
    for start, length in zip(starts.tolist(), lengths, strict=True):
        assert 0 <= rows[start] - length <= max(7, rows[start] / 5)


@pytest.mark.parametrize(
    ("context", "window", "sinks"), [(1, None, False), (1, 4, False), (1, None, True), (1, 4, True)]
)
def test_attention_is_that_of_each_sequence_alone(context: int, window: int | None, sinks: bool) -> None:
    """Forward and backward, against float64 written out for one sequence at a time."""
    torch.manual_seed(0)
    lengths, heads, kv_heads, size = [7, 1, 20, 33, 9], 4, 2, 8
    packing = pack(lengths, rank=0, size=1)
    query, key, value = (torch.randn(sum(lengths), n, size, requires_grad=True) for n in (heads, kv_heads, kv_heads))
    module = attention(window, heads if sinks else 0)
    upstream = torch.randn(sum(lengths), heads * size)
    out = module(query[:, None], key[:, None], value[:, None], packed_seq_params=packing)[:, 0]
    (out * upstream).sum().backward()
    exact = [x.detach().double().requires_grad_() for x in (query, key, value)]
    logits = module.softmax_offset.detach().double() if sinks else None
    parts = [alone(*(x[s] for x in exact), window, logits) for s in slices(lengths)]
    (torch.cat(parts) * upstream).sum().backward()
    torch.testing.assert_close(out.double(), torch.cat(parts), rtol=0, atol=1e-5)
    for mine, wanted in zip((query, key, value), exact, strict=True):
        torch.testing.assert_close(mine.grad.double(), wanted.grad, rtol=0, atol=2e-5)


def attention(window: int | None, sinks: int) -> PackedAttention:
    module = PackedAttention.__new__(PackedAttention)
    torch.nn.Module.__init__(module)
    module._context, module._tensor, module._scale, module.window = _Alone(), _Alone(), None, window
    module.softmax_offset = torch.nn.Parameter(torch.randn(sinks)) if sinks else None
    return module


class _Alone:
    def size(self) -> int:
        return 1


def slices(lengths: list[int]) -> list[slice]:
    ends = list(itertools.accumulate(lengths))
    return [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def alone(query: Tensor, key: Tensor, value: Tensor, window: int | None, sinks: Tensor | None) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    places = torch.arange(len(query))
    hidden = places[None] > places[:, None]
    if window is not None:
        hidden = hidden | (places[None] <= places[:, None] - window)
    exp = scores.masked_fill(hidden, float("-inf")).exp()
    total = exp.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    return torch.einsum("hqk,khd->qhd", exp / total, value).flatten(1)


def test_a_packing_is_what_megatron_hands_on() -> None:
    """It must not say that it is "thd", which Megatron would rotate sequence by sequence."""
    packing = pack([4], rank=0, size=1)
    assert isinstance(packing, Packing)
    assert packing.qkv_format is None


def column(values: int) -> dict[str, Tensor]:
    return {"own": torch.ones(values)}


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (TokenSequence([1] * 10, 9, column(1)), "sequence 1 has 9 tokens to read, more than the model's 8 positions"),
        (TokenSequence([1, 2, 3], 1, column(1)), r"columns of {'own': 1} values, expected 2 \(one for each"),
        (TokenSequence([1, 2, 3], 1), r"columns of {} values, expected 2 .* of each of \['own'\]"),
        (TokenSequence([1, 2], 1, column(1), fetched=("other",)), r"columns of {'own': 1, 'other': 1} values"),
    ],
)
def test_what_the_model_does_not_have_is_named(sequence: TokenSequence, message: str) -> None:
    good = [TokenSequence([99], 1, column(0)), TokenSequence([0] * 9, 1, column(8))]
    check_sequences(good, positions=8)
    with pytest.raises(ValueError, match=message):
        check_sequences([good[0], sequence], positions=8)


@pytest.mark.parametrize("remote", [False, True], ids=["here", "remote"])
@pytest.mark.parametrize("ids", [[1, 100], [100, 1], [1, -1]])
def test_a_token_that_the_model_does_not_have_is_named_where_it_is_read(ids: list[int], remote: bool) -> None:
    sequences = [TokenSequence([99, 0], 1), TokenSequence(ids, 1)]
    if remote:
        sequences, _ = remotely(sequences)
    load(sequences, [[0], []], vocab=100)
    with pytest.raises(ValueError, match=f"sequence 1 has token {ids[0] if ids[0] == 100 else ids[1]}, expected 0 to"):
        load(sequences, [[0], [1]], vocab=100)


class Elsewhere:
    """Has tokens and columns of all, and remembers what it was asked for."""

    def __init__(self, sequences: list[TokenSequence]) -> None:
        self.sequences, self.asked = sequences, list[Mapping[str, Sequence[int]]]()

    def load(self, wanted: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[Tensor]]:
        self.asked.append(wanted)
        return {name: [self.field(number, name) for number in numbers] for name, numbers in wanted.items()}

    def field(self, number: int, name: str) -> Tensor:
        sequence = self.sequences[number]
        return sequence.tokens.int() if name == "input_ids" else sequence.columns[name]


def remotely(batch: list[TokenSequence]) -> tuple[list[TokenSequence], Elsewhere]:
    source = Elsewhere(batch)
    sequences = [
        TokenSequence(
            RemoteTokens(source, number, len(sequence.tokens), (-1, 1)),
            sequence.prompt_length,
            fetched=tuple(sequence.columns),
        )
        for number, sequence in enumerate(batch)
    ]
    return sequences, source


@pytest.mark.parametrize("plan", [[[0, 3, 1], [2], []], [[], []]])
def test_what_lies_elsewhere_is_asked_for_once_and_packed_as_if_it_were_here(plan: list[list[int]]) -> None:
    batch = batch_of(LENGTHS)
    sequences, source = remotely(batch)
    check_sequences(sequences, positions=64)
    alignment = Alignment(context=1, context_rank=0, tensor=2)
    mine = [index for indices in plan for index in indices]
    for micro, wanted in zip(
        collate(load(sequences, plan, 2000), plan, alignment, CPU, equal=True),
        collate(batch, plan, alignment, CPU, equal=True),
        strict=True,
    ):
        for name in ("input_ids", "targets", "mask", "response_index", "sequence"):
            assert torch.equal(getattr(micro, name), getattr(wanted, name)), name
        assert micro.columns.keys() == wanted.columns.keys()
        assert torch.equal(micro.columns["own"], wanted.columns["own"])
        assert micro.packing.routing.batch_tokens == wanted.packing.routing.batch_tokens
    assert source.asked == ([{"input_ids": mine, "own": mine}] if mine else [])

"""Micro-batches: each sequence is in one of them, like lengths together, and every value stands at its token."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.model_engine import TokenSequence
from megarl.model_engine.microbatch import collate, idle_microbatch, partition

fixed = settings(derandomize=True, deadline=None)  # the same examples each time; the machine may be busy

CPU = torch.device("cpu")
lengths_of = st.lists(st.integers(2, 50), max_size=40)


def parts_of_all_ranks(lengths: list[int], data_size: int, most: int) -> list[list[list[int]]]:
    return [partition(lengths, data_rank=rank, data_size=data_size, most=most) for rank in range(data_size)]


@fixed
@given(lengths_of, st.integers(1, 6), st.integers(1, 9))
def test_each_sequence_is_in_one_micro_batch(lengths: list[int], data_size: int, most: int) -> None:
    ranks = parts_of_all_ranks(lengths, data_size, most)
    everywhere = [index for rank in ranks for batch in rank for index in batch]
    assert sorted(everywhere) == list(range(len(lengths)))
    assert all(0 < len(batch) <= most for rank in ranks for batch in rank)


@fixed
@given(lengths_of, st.integers(1, 6), st.integers(1, 9))
def test_like_lengths_share_a_micro_batch(lengths: list[int], data_size: int, most: int) -> None:
    for batches in parts_of_all_ranks(lengths, data_size, most):
        for shorter, longer in itertools.pairwise(batches):
            assert len(shorter) == most, "only the last may be less than full"
            assert max(lengths[i] for i in shorter) <= min(lengths[i] for i in longer)


@fixed
@given(lengths_of, st.integers(1, 6), st.integers(1, 9))
def test_ranks_have_like_work(lengths: list[int], data_size: int, most: int) -> None:
    """Taking turns in order of length, two ranks differ by less than the longest sequence, and by one sequence."""
    shares = [[i for batch in rank for i in batch] for rank in parts_of_all_ranks(lengths, data_size, most)]
    tokens = [sum(lengths[i] for i in share) for share in shares]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@st.composite
def sequences_of(draw: st.DrawFn) -> list[TokenSequence]:
    sequences = []
    for _ in range(draw(st.integers(1, 6))):
        prompt = draw(st.integers(1, 7))
        length = max(prompt + draw(st.integers(0, 9)), 2)
        response = length - prompt
        ids = draw(st.lists(st.integers(1, 99), min_size=length, max_size=length))
        values = torch.tensor(draw(st.lists(st.floats(1, 99, width=32), min_size=response, max_size=response)))
        sequences.append(TokenSequence(ids, prompt, {"advantage": values, "negative": -values}))
    return sequences


@fixed
@given(sequences_of(), st.data())
def test_values_stand_where_their_token_is_predicted(sequences: list[TokenSequence], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(sequences))))
    indices = order[: data.draw(st.integers(1, len(order)))]
    batch = collate(sequences, indices, CPU)
    assert batch.indices == indices
    width = max(len(sequences[i].input_ids) for i in indices) - 1
    assert batch.input_ids.shape == batch.targets.shape == batch.mask.shape == (len(indices), width)
    for row, index in enumerate(indices):
        sequence = sequences[index]
        for position in range(width):
            place = position + 1  # in the sequence, of the token that is predicted here
            inside = place < len(sequence.input_ids)
            learned = inside and place >= sequence.prompt_length
            assert batch.mask[row, position] == learned
            assert batch.targets[row, position] == (sequence.input_ids[place] if inside else 0)
            if position < len(sequence.input_ids):
                assert batch.input_ids[row, position] == sequence.input_ids[position]
            for name, values in sequence.columns.items():
                expected = values[place - sequence.prompt_length] if learned else 0
                assert batch.columns[name][row, position] == expected


def test_a_rank_without_sequences_has_something_to_compute() -> None:
    assert partition([7], data_rank=1, data_size=2, most=4) == []
    batch = idle_microbatch(CPU)
    assert batch.input_ids.shape == (1, 1)
    assert not batch.mask.any()
    assert not batch.columns

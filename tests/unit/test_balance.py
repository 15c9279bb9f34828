"""The plan of micro-batches: every sequence once, within the budget, as many for each rank, and costs balanced."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data import plan_microbatches

fixed = settings(derandomize=True, deadline=None)  # the same examples each time; the machine may be busy

BUDGET = 64
lengths_of = st.one_of(
    st.lists(st.integers(1, 80), max_size=60),  # some over the budget
    st.lists(st.integers(1, 8), max_size=200),
    st.builds(lambda length, number: [length] * number, st.integers(1, 80), st.integers(0, 60)),
    st.builds(lambda short: [64, *short], st.lists(st.integers(1, 3), max_size=150)),
)
ranks_of = st.integers(1, 9)


def cost(length: int) -> float:
    return length + length**2 / 50


def linear(length: int) -> float:
    return float(length)


def flat(length: int) -> float:
    return 1.0


def plan_of(lengths: list[int], ranks: int, cost: Callable[[int], float] = cost) -> list[list[list[int]]]:
    return plan_microbatches(lengths, max_tokens=BUDGET, ranks=ranks, cost=cost)


def rank_costs(plan: list[list[list[int]]], lengths: list[int]) -> list[float]:
    return [sum(cost(lengths[i]) for batch in rank for i in batch) for rank in plan]


@fixed
@given(lengths_of, ranks_of, st.sampled_from([cost, linear, flat]))
def test_every_sequence_once_within_the_budget_and_as_many_micro_batches_for_each_rank(
    lengths: list[int], ranks: int, cost: Callable[[int], float]
) -> None:
    plan = plan_of(lengths, ranks, cost)
    batches = [batch for rank in plan for batch in rank]
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(len(batch) <= 1 or sum(lengths[i] for i in batch) <= BUDGET for batch in batches)
    assert len(plan) == ranks
    assert {len(rank) for rank in plan} == {len(plan[0])}
    assert sum(not batch for batch in batches) == max(0, len(batches) - len(lengths)), "no emptier than need be"


@fixed
@given(lengths_of, ranks_of)
def test_few_micro_batches(lengths: list[int], ranks: int) -> None:
    """Never more than with each sequence alone, nor than with half-full micro-batches and two of each rank to spare."""
    count = len(plan_of(lengths, ranks)[0])
    assert count <= max(1, -(-len(lengths) // ranks))
    assert count <= 2 + -(-2 * sum(lengths) // (BUDGET * ranks))


@fixed
@given(st.lists(st.integers(1, 8), min_size=200, max_size=400), ranks_of)
def test_short_sequences_fill_micro_batches(lengths: list[int], ranks: int) -> None:
    bound = -(-sum(lengths) // (BUDGET * ranks))
    assert len(plan_of(lengths, ranks)[0]) <= bound + 2


@fixed
@given(lengths_of, ranks_of)
def test_no_rank_has_more_than_the_mean_and_one_sequence(lengths: list[int], ranks: int) -> None:
    costs = rank_costs(plan_of(lengths, ranks), lengths)
    assert max(costs) <= sum(costs) / ranks + max(map(cost, lengths), default=0) + 1e-9


@pytest.mark.parametrize("ranks", [2, 8, 32])
@pytest.mark.parametrize("sigma", [0.5, 0.8, 1.2])
def test_a_large_batch_is_balanced(ranks: int, sigma: float) -> None:
    random_ = random.Random(0)
    lengths = [min(BUDGET, max(1, round(random_.lognormvariate(1.5, sigma)))) for _ in range(4000)]
    plan = plan_of(lengths, ranks)
    costs = rank_costs(plan, lengths)
    mean = sum(costs) / ranks
    assert max(costs) < 1.01 * mean
    rounds = zip(*([sum(cost(lengths[i]) for i in batch) for batch in rank] for rank in plan), strict=True)
    assert sum(map(max, rounds)) < 1.1 * mean


def test_the_rank_of_one_long_sequence_gets_little_else() -> None:
    lengths = [*[2] * 60, BUDGET, *[2] * 60]
    plan = plan_of(lengths, 4)
    assert [len(rank) for rank in plan] == [2] * 4
    long = next(rank for rank in plan if [60] in rank)
    assert sorted(map(len, long)) == [1, 1]
    assert {sum(map(len, rank)) for rank in plan if rank is not long} <= {39, 40}


def test_a_round_with_a_long_sequence_is_filled_up_for_the_other_ranks() -> None:
    """They would wait in it, so what they compute then costs nothing."""
    plan = plan_of([BUDGET, *[4] * 80], 4)
    assert plan[0][0] == [0]
    assert all(len(rank[0]) == BUDGET // 4 for rank in plan[1:])


def test_exchanges_make_equal_what_dealing_leaves_unequal() -> None:
    """Costliest first to the rank with least gives 3 + 2 + 2 and 3 + 2."""
    plan = plan_microbatches([3, 3, 2, 2, 2], max_tokens=100, ranks=2, cost=linear)
    assert sorted(sum([3, 3, 2, 2, 2][i] for i in rank[0]) for rank in plan) == [6, 6]


@pytest.mark.parametrize(
    ("lengths", "ranks", "expected"),
    [
        ([], 2, [[[]], [[]]]),
        ([5], 1, [[[0]]]),
        ([5], 3, [[[0]], [[]], [[]]]),
        ([9, 9], 2, [[[0]], [[1]]]),
        ([100, 100], 1, [[[0], [1]]]),
        ([60, 60, 60], 2, [[[0], [2]], [[1], []]]),
        ([1, 100, 1], 2, [[[1]], [[0, 2]]]),
    ],
)
def test_small_plans(lengths: list[int], ranks: int, expected: list[list[list[int]]]) -> None:
    assert plan_of(lengths, ranks) == expected


@fixed
@given(lengths_of, ranks_of)
def test_the_same_arguments_give_the_same_plan(lengths: list[int], ranks: int) -> None:
    assert plan_of(list(lengths), ranks) == plan_of(list(lengths), ranks)


@pytest.mark.parametrize(("lengths", "max_tokens", "ranks"), [([1, 0], 8, 2), ([1], 0, 2), ([1], 8, 0)])
def test_what_cannot_be_planned_is_told(lengths: list[int], max_tokens: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"max_tokens is {max_tokens}, ranks {ranks} and the shortest length"):
        plan_microbatches(lengths, max_tokens=max_tokens, ranks=ranks, cost=cost)

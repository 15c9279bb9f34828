"""Advantages against the papers' equations, written as loops in float64; and what must not change them."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms import ADVANTAGES, advantages
from megarl.algorithms.advantages import Outcomes

SEEDS = range(6)
GROUP_METHODS = ["grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus_baseline"]
EVERY = [*ADVANTAGES, "reinforce_plus_plus_baseline"]

# the same examples each time; the machine may be busy
examples = settings(derandomize=True, deadline=None, max_examples=20)
seeds = st.integers(0, 10_000)


def outcomes_of(seed: int, *, binary: bool = False) -> Outcomes:
    """Groups of 1 to 6 in mixed order, some with equal rewards, lengths 0 to 9."""
    source = random.Random(seed)
    group = [number for number in range(5) for _ in range(source.randint(1, 6))]
    source.shuffle(group)
    equal = source.randrange(5)
    rewards = [
        0.1 if number == equal else float(source.random() < 0.4) if binary else source.gauss(0, 1) for number in group
    ]
    lengths = torch.tensor([source.randint(0, 9) for _ in group])
    noise = torch.Generator().manual_seed(seed)
    tokens = int(lengths.sum())
    return Outcomes(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group=torch.tensor(group),
        lengths=lengths,
        penalties=None if binary else 0.1 * torch.randn(tokens, generator=noise, dtype=torch.float64),
        values=torch.randn(tokens, generator=noise, dtype=torch.float64),
        greedy_rewards=torch.tensor([float(number) for number in group], dtype=torch.float64),
    )


def run(name: str, outcomes: Outcomes) -> Tensor:
    match name:
        case "reinforce_plus_plus_baseline":
            return advantages.reinforce_plus_plus(outcomes, group_baseline=True)
        case "pass_at_k":
            return advantages.pass_at_k(outcomes, k=int(outcomes.group.bincount().min()))
        case "gae":
            return advantages.gae(outcomes, discount=0.9, smoothing=0.8)[0]
    return ADVANTAGES[name](outcomes)  # type: ignore[no-any-return]


# --- the equations as loops


def token_lists(outcomes: Outcomes, flat: Tensor | None) -> list[list[float]]:
    if flat is None:
        return [[0.0] * length for length in outcomes.lengths.tolist()]
    return [part.tolist() for part in flat.split(outcomes.lengths.tolist())]


def totals(outcomes: Outcomes) -> list[float]:
    penalties = token_lists(outcomes, outcomes.penalties)
    return [reward - sum(part) for reward, part in zip(outcomes.rewards.tolist(), penalties, strict=True)]


def by_group(outcomes: Outcomes, one: Callable[[int, list[int], list[float]], float]) -> list[float]:
    """`one` gets a sequence, all of its group and everyone's rewards; its value is that of all its tokens."""
    group, rewards = outcomes.group.tolist(), totals(outcomes)
    values = []
    for i, number in enumerate(group):
        members = [j for j, other in enumerate(group) if other == number]
        values += [one(i, members, rewards)] * int(outcomes.lengths[i])
    return values


def grpo(i: int, members: list[int], rewards: list[float]) -> float:
    own = [rewards[j] for j in members]
    if max(own) == min(own):
        return 0.0
    return (rewards[i] - statistics.mean(own)) / (statistics.stdev(own) + 1e-4)


def dr_grpo(i: int, members: list[int], rewards: list[float]) -> float:
    return rewards[i] - statistics.mean(rewards[j] for j in members)


def rloo(i: int, members: list[int], rewards: list[float]) -> float:
    others = [rewards[j] for j in members if j != i]
    return rewards[i] - statistics.mean(others) if others else 0.0


def to_go(outcomes: Outcomes, rewards: list[float]) -> list[float]:
    values = []
    for reward, penalties in zip(rewards, token_lists(outcomes, outcomes.penalties), strict=True):
        values += [reward - sum(penalties[t:]) for t in range(len(penalties))]
    mean, deviation = statistics.mean(values), statistics.stdev(values)
    return [(value - mean) / (deviation + 1e-8) for value in values]


def expected(name: str, outcomes: Outcomes) -> list[float]:
    lengths, group = outcomes.lengths.tolist(), outcomes.group.tolist()

    def opo(i: int, members: list[int], rewards: list[float]) -> float:
        own = [rewards[j] for j in members]
        if max(own) == min(own):
            return 0.0
        weights = sum(lengths[j] for j in members)
        return rewards[i] - sum(lengths[j] * rewards[j] for j in members) / max(weights, 1)

    match name:
        case "opo":
            return by_group(outcomes, opo)
        case "remax":
            return by_group(outcomes, lambda i, _, rewards: rewards[i] - group[i])
        case "reinforce_plus_plus":
            return to_go(outcomes, outcomes.rewards.tolist())
        case "reinforce_plus_plus_baseline":
            plain = outcomes.rewards.tolist()
            means = [statistics.mean(plain[j] for j, other in enumerate(group) if other == number) for number in group]
            return to_go(outcomes, [reward - mean for reward, mean in zip(plain, means, strict=True)])
    return by_group(outcomes, globals()[name])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", [*GROUP_METHODS, "remax", "reinforce_plus_plus"])
def test_advantages_are_those_of_the_equations(name: str, seed: int) -> None:
    outcomes = outcomes_of(seed)
    found = run(name, outcomes)
    assert found.tolist() == pytest.approx(expected(name, outcomes), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("discount", "smoothing"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0), (0.5, 1.0)])
def test_gae_is_the_sum_of_discounted_errors(seed: int, discount: float, smoothing: float) -> None:
    outcomes = outcomes_of(seed)
    found, returns = advantages.gae(outcomes, discount=discount, smoothing=smoothing)
    values, penalties = (token_lists(outcomes, flat) for flat in (outcomes.values, outcomes.penalties))
    wanted = []
    for reward, own, taken in zip(outcomes.rewards.tolist(), values, penalties, strict=True):
        count = len(own)
        rewards = [-taken[t] + (reward if t == count - 1 else 0.0) for t in range(count)]
        after = [*own[1:], 0.0]
        errors = [rewards[t] + discount * after[t] - own[t] for t in range(count)]
        wanted += [
            sum((discount * smoothing) ** (later - t) * errors[later] for later in range(t, count))
            for t in range(count)
        ]
    assert found.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(returns, found + outcomes.values)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("right", range(7))
def test_pass_at_k_is_the_mean_over_all_choices(right: int, k: int) -> None:
    """The advantage of a sample is the mean, over the sets of k that have it, of the set's standardised reward."""
    rewards = [1.0] * right + [0.0] * (6 - right)
    sets = list(itertools.combinations(range(6), k))
    best = {chosen: max(rewards[i] for i in chosen) for chosen in sets}
    mean, deviation = statistics.mean(best.values()), statistics.pstdev(best.values())
    wanted = [
        statistics.mean((best[chosen] - mean) / deviation for chosen in sets if i in chosen) if deviation else 0.0
        for i in range(6)
    ]
    outcomes = Outcomes(torch.tensor(rewards, dtype=torch.float64), torch.zeros(6).long(), torch.ones(6).long())
    assert advantages.pass_at_k(outcomes, k=k).tolist() == pytest.approx(wanted, abs=1e-12)


def test_more_choices_than_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="pass@4 of a group of 2 samples"):
        advantages.pass_at_k(Outcomes(torch.zeros(2), torch.zeros(2).long(), torch.ones(2).long()), k=4)


# --- what changes nothing


@pytest.mark.parametrize("name", EVERY)
@examples
@given(seeds, st.booleans())
def test_the_order_of_sequences_does_not_matter(name: str, seed: int, binary: bool) -> None:
    outcomes = outcomes_of(seed, binary=binary)
    lengths = outcomes.lengths.tolist()
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed))

    def at_tokens(flat: Tensor | None) -> Tensor | None:
        return None if flat is None else torch.cat([flat.split(lengths)[i] for i in order])

    assert outcomes.greedy_rewards is not None
    moved = Outcomes(
        outcomes.rewards[order],
        outcomes.group[order],
        outcomes.lengths[order],
        at_tokens(outcomes.penalties),
        at_tokens(outcomes.values),
        outcomes.greedy_rewards[order],
    )
    torch.testing.assert_close(run(name, moved), at_tokens(run(name, outcomes)))


@pytest.mark.parametrize("name", [*GROUP_METHODS, "remax"])
@examples
@given(seeds, st.booleans(), st.floats(-10, 10))
def test_a_constant_added_to_a_groups_rewards_does_not_matter(
    name: str, seed: int, binary: bool, constant: float
) -> None:
    """Another one for each group; the greedy answer is one of its samples, too."""
    plain = outcomes_of(seed, binary=binary)
    assert plain.greedy_rewards is not None
    added = constant * plain.group
    shifted = replace(plain, rewards=plain.rewards + added, greedy_rewards=plain.greedy_rewards + added)
    torch.testing.assert_close(run(name, shifted), run(name, plain), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", [name for name in EVERY if name != "gae"])
@examples
@given(seeds, st.floats(0.5, 1e3))
def test_the_rewards_scale_matters_to_some_in_proportion_and_to_the_others_not(
    name: str, seed: int, scale: float
) -> None:
    plain = outcomes_of(seed, binary=True)
    assert plain.greedy_rewards is not None
    scaled = replace(plain, rewards=plain.rewards * scale, greedy_rewards=plain.greedy_rewards * scale)
    factor = scale if name in ("dr_grpo", "rloo", "opo", "remax") else 1.0
    torch.testing.assert_close(run(name, scaled), factor * run(name, plain), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", GROUP_METHODS[:-1])
def test_equal_rewards_teach_exactly_nothing(name: str) -> None:
    equal = Outcomes(torch.full((7,), 0.1), torch.tensor([0, 0, 0, 1, 1, 1, 1]), torch.full((7,), 3))
    assert not run(name, equal).any()


def test_nothing_gives_nothing() -> None:
    nothing = Outcomes(torch.zeros(0), torch.zeros(0).long(), torch.zeros(0).long())
    assert all(len(run(name, nothing)) == 0 for name in GROUP_METHODS)
    silent = Outcomes(torch.ones(2), torch.zeros(2).long(), torch.zeros(2).long(), values=torch.zeros(0))
    assert len(advantages.gae(silent, discount=1.0, smoothing=1.0)[0]) == 0
    assert math.isfinite(float(advantages.whiten(torch.ones(1))[0]))

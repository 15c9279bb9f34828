"""One reward of several sources' scores, against loops in float64."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from megarl.algorithms import mixed_reward
from megarl.config import Source

NAN = math.nan


def test_each_sequence_gets_the_weighted_sum_of_the_sources_that_score_it() -> None:
    scores = {"a": torch.tensor([1.0, NAN, 3.0, NAN]), "b": torch.tensor([10.0, 20.0, NAN, NAN])}
    sources = {"a": Source(weight=0.5), "b": Source(weight=-1.0)}
    assert mixed_reward(scores, sources).tolist() == [-9.5, -20.0, 1.5, 0.0]


@pytest.mark.parametrize("seed", range(4))
def test_standardised_scores_are_those_of_the_sequences_that_have_one(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    plain, moved = torch.randn(2, 12, generator=generator, dtype=torch.float64) * 5 + 7
    moved[torch.rand(12, generator=generator) < 0.3] = NAN
    found = mixed_reward(
        {"plain": plain, "moved": moved}, {"plain": Source(), "moved": Source(weight=2.0, standardise=True)}
    )
    there = [float(x) for x in moved if not x.isnan()]
    mean, deviation = statistics.mean(there), statistics.stdev(there)
    for value, one, other in zip(found.tolist(), plain.tolist(), moved.tolist(), strict=True):
        expected = one if math.isnan(other) else one + 2 * (other - mean) / deviation
        assert value == pytest.approx(expected, rel=1e-6)


def test_what_is_only_logged_does_not_count() -> None:
    scores = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([math.inf, NAN])}
    assert mixed_reward(scores, {"a": Source(), "b": Source(weight=0.0)}).tolist() == [1.0, 2.0]


def test_equal_scores_are_zero_when_they_are_standardised() -> None:
    assert mixed_reward({"a": torch.full((3,), 0.1)}, {"a": Source(standardise=True)}).tolist() == [0.0] * 3


def test_a_source_that_scores_nothing_gives_nothing() -> None:
    assert mixed_reward({"a": torch.full((2,), NAN)}, {"a": Source(standardise=True)}).tolist() == [0.0] * 2

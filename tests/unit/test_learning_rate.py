"""The learning rate of each update: warm-up, then what the schedule says."""

from __future__ import annotations

import math

import pytest

from megarl.config import CosineSchedule, Optimizer
from megarl.model_engine.build import learning_rate

CONSTANT = Optimizer(learning_rate=8.0, warmup_steps=4)
COSINE = Optimizer(learning_rate=8.0, warmup_steps=4, schedule=CosineSchedule(final_ratio=0.25))
NO_WARMUP = Optimizer(learning_rate=8.0, schedule=CosineSchedule(final_ratio=0.0))


@pytest.mark.parametrize(
    ("recipe", "update", "updates", "rate"),
    [
        (CONSTANT, 0, 10, 2.0),
        (CONSTANT, 2, 10, 6.0),
        (CONSTANT, 3, 10, 8.0),
        (CONSTANT, 4, 10, 8.0),
        (CONSTANT, 9, 10, 8.0),
        (COSINE, 0, 13, 2.0),
        (COSINE, 3, 13, 8.0),
        (COSINE, 4, 13, 8.0),
        (COSINE, 8, 13, 5.0),  # halfway from 8 to 2
        (COSINE, 6, 13, 5.0 + 3.0 * math.cos(math.pi / 4)),
        (COSINE, 12, 13, 2.0),
        (COSINE, 4, 5, 8.0),  # the only update after the warm-up
        (COSINE, 3, 4, 8.0),  # none after it
        (NO_WARMUP, 0, 3, 8.0),
        (NO_WARMUP, 1, 3, 4.0),
        (NO_WARMUP, 2, 3, 0.0),
        (NO_WARMUP, 0, 1, 8.0),
    ],
)
def test_rate_of_an_update(recipe: Optimizer, update: int, updates: int, rate: float) -> None:
    assert learning_rate(recipe, update, updates) == pytest.approx(rate, abs=1e-12)


@pytest.mark.parametrize("recipe", [CONSTANT, COSINE, NO_WARMUP])
def test_the_rate_rises_to_its_peak_once_and_never_again(recipe: Optimizer) -> None:
    rates = [learning_rate(recipe, update, 30) for update in range(30)]
    peak = max(recipe.warmup_steps - 1, 0)
    assert rates[peak] == max(rates) == recipe.learning_rate
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)

"""From the scores of several sources to one reward a sequence."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from megarl.algorithms.advantages import whiten
from megarl.config import Source


def mixed_reward(scores: Mapping[str, Float[Tensor, " N"]], sources: Mapping[str, Source]) -> Float[Tensor, " N"]:
    """The weighted sum of the scores of N sequences; NaN where a source does not score a sequence.

    Standardised scores are (s - mean) / deviation over those that there are; 0 where all are the same.
    """
    total = torch.zeros_like(next(iter(scores.values())))
    for name, found in scores.items():
        if not sources[name].weight:
            continue
        there = ~found.isnan()
        values = whiten(found[there]) if sources[name].standardise else found[there]
        total += torch.zeros_like(found).masked_scatter(there, sources[name].weight * values)
    return total


def overlong_penalty(lengths: Int[Tensor, " N"], *, limit: int, buffer: int) -> Float[Tensor, " N"]:
    """0 up to limit - buffer tokens, then falling linearly to -1 at `limit` and beyond. arXiv 2503.14476, eq. 13."""
    return ((limit - buffer - lengths) / buffer).clamp(-1.0, 0.0)

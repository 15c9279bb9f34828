"""Rewards changed by length, and groups left out by how often they were right."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def overlong_penalty(lengths: Int[Tensor, " N"], *, limit: int, buffer: int) -> Float[Tensor, " N"]:
    """0 up to limit - buffer tokens, then falling linearly to -1 at `limit` and beyond. arXiv 2503.14476, eq. 13."""
    return ((limit - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def informative_groups(
    rewards: Float[Tensor, " N"], group: Int[Tensor, " N"], *, low: float = 0.0, high: float = 1.0
) -> Bool[Tensor, " N"]:
    """Which sequences are of a group whose share of rewards above 0 is strictly between `low` and `high`.

    With 0 and 1 it is dynamic sampling: neither all wrong nor all right. arXiv 2503.14476, eq. 11.
    """
    count = int(group.max()) + 1 if len(group) else 0
    right, all_of = (torch.zeros(count).index_add(0, group, x) for x in ((rewards > 0).float(), torch.ones(len(group))))
    share = (right / all_of.clamp_min(1))[group]
    return (low < share) & (share < high)

"""Rewards changed by length."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor


def overlong_penalty(lengths: Int[Tensor, " N"], *, limit: int, buffer: int) -> Float[Tensor, " N"]:
    """0 up to limit - buffer tokens, then falling linearly to -1 at `limit` and beyond. arXiv 2503.14476, eq. 13."""
    return ((limit - buffer - lengths) / buffer).clamp(-1.0, 0.0)

"""Learning a reward from pairs of answers of which one is preferred."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def bradley_terry(
    chosen: Float[Tensor, " N"],
    rejected: Float[Tensor, " N"],
    margin: Float[Tensor, " N"] | float = 0.0,
    *,
    centring: float = 0.0,
) -> Float[Tensor, " N"]:
    """-log sigmoid(chosen - rejected - margin) + centring (chosen + rejected)^2 of each pair.

    arXiv 2203.02155, eq. 1; margin: 2307.09288, eq. 2; centring keeps rewards around 0: 2312.09244.
    """
    return -F.logsigmoid(chosen - rejected - margin) + centring * (chosen + rejected).square()

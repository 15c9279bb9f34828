"""How far the policy has moved from another one, estimated at sampled tokens."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(
    logprobs: Float[Tensor, " T"], reference_logprobs: Float[Tensor, " T"], kind: KlEstimator
) -> Float[Tensor, " T"]:
    """An estimate of KL(policy || reference) at each token that the policy sampled, by d = log policy - log reference.

    k1 = d, unbiased; k2 = d^2 / 2, whose expected gradient is that of the divergence; k3 = exp(-d) - 1 + d, unbiased
    and never negative (Schulman, "Approximating KL divergence", 2020).
    """
    difference = logprobs - reference_logprobs
    match kind:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return (-difference).exp() - 1 + difference


def adapted_coefficient(coefficient: float, kl: float, *, target: float, horizon: float, sequences: int) -> float:
    """The next coefficient of a penalty that keeps the divergence at `target`. arXiv 1909.08593, section 2.2.

    coefficient (1 + e sequences / horizon), e = kl / target - 1 within [-0.2, 0.2].
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * sequences / horizon)

"""Group-relative policy optimization.

DeepSeekMath (arXiv 2402.03300): advantages of eq. 4 with outcome rewards, the clipped objective of eq. 3, its KL
estimator of eq. 5. All sums run over response tokens; the caller divides by the global batch's token count.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_STD_EPSILON = 1e-4  # a group whose rewards differ by less than this teaches nothing worth amplifying


def group_advantages(rewards: Float[Tensor, "P G"]) -> Float[Tensor, "P G"]:
    """(reward - mean) / standard deviation of each prompt's group; 0 where all rewards of a group are equal."""
    # rounding lets the mean of equal rewards differ from them, and the division would blow that up
    differ = rewards.amax(1, keepdim=True) != rewards.amin(1, keepdim=True)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + _STD_EPSILON)
    return torch.where(differ, advantages, 0.0)


def clipped_policy_loss(
    logprobs: Float[Tensor, "B T"],
    old_logprobs: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Loss of each token, and 1 where the clip cuts its gradient off."""
    ratio = (logprobs - old_logprobs).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return -torch.minimum(unclipped, clipped), (clipped < unclipped).float()


def kl_to_reference(logprobs: Float[Tensor, "B T"], reference_logprobs: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """exp(d) - d - 1, d = reference - policy: never negative, unbiased for KL(policy || reference) under the policy."""
    difference = reference_logprobs - logprobs
    return difference.exp() - difference - 1

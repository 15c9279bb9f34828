"""Policy losses: from log-probabilities and advantages to a loss of each token of a packed micro-batch.

A loss takes `PolicyTokens` and gives two vectors [T]: the losses, which the caller weighs and sums, and 1 where
clipping cuts a token's gradient off. r is the ratio of new to old probability, A the advantage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

Loss = tuple[Float[Tensor, " T"], Float[Tensor, " T"]]


def _alone(sums: Tensor) -> Tensor:
    return sums


@dataclass(frozen=True)
class PolicyTokens:
    """T tokens of a micro-batch, of which `mask` is 1 at response tokens; `sequence` numbers each token's sequence.

    `total` sums over the ranks that hold other tokens of the same sequences.
    """

    logprobs: Float[Tensor, " T"]
    old_logprobs: Float[Tensor, " T"]
    advantages: Float[Tensor, " T"]
    mask: Float[Tensor, " T"]
    sequence: Int[Tensor, " T"]
    sequences: int
    total: Callable[[Tensor], Tensor] = _alone

    @property
    def log_ratio(self) -> Float[Tensor, " T"]:
        """log r; 0 outside responses, where old log-probabilities are padding whose exponential may overflow."""
        return (self.logprobs - self.old_logprobs) * self.mask

    @torch.no_grad()
    def sequence_sum(self, values: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """At each token the sum of `values` over the response tokens of its sequence."""
        sums = values.new_zeros(self.sequences).index_add(0, self.sequence, values * self.mask)
        return self.total(sums)[self.sequence]

    def sequence_mean(self, values: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """At each token the mean of `values` over the response tokens of its sequence."""
        return self.sequence_sum(values) / self.sequence_sum(torch.ones_like(values)).clamp_min(1)


def ppo(tokens: PolicyTokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None) -> Loss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). arXiv 1707.06347, eq. 7; two bounds: 2503.14476, eq. 10.

    Where A < 0, `dual_clip` c > 1 bounds the loss by -c A. arXiv 1912.09729.
    """
    return _clipped(tokens.log_ratio.exp(), tokens.advantages, clip_low, clip_high, dual_clip)


def gspo(tokens: PolicyTokens, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Loss:
    """PPO's loss with the ratio of the whole sequence, s = exp(mean log r). arXiv 2507.18071, eq. 5 and 7.

    In the form of eq. 14, s r / stop_gradient(r), whose gradient is the same where all tokens of a sequence have one
    advantage and weigh alike.
    """
    own = tokens.log_ratio
    ratio = (tokens.sequence_mean(own) + own - own.detach()).exp()
    return _clipped(ratio, tokens.advantages, clip_low, clip_high, None)


def gmpo(tokens: PolicyTokens, *, clip: float = 0.4) -> Loss:
    """The geometric mean of a sequence's clipped ratios, times A. arXiv 2507.20673.

    log r is clipped to [-clip, clip] on the side where A would push it further. Each token has its part of the
    sequence's gradient: all weigh alike under the sequence normalizer.
    """
    own, sign = tokens.log_ratio, tokens.advantages.sign()
    pessimistic = sign * torch.minimum(sign * own, (sign * own).clamp(-clip, clip))
    pessimistic = torch.where(sign == 0, own, pessimistic)
    ratio = (tokens.sequence_mean(pessimistic) + pessimistic - pessimistic.detach()).exp()
    return -ratio * tokens.advantages, (sign * own > clip).to(own.dtype) * tokens.mask


def cispo(tokens: PolicyTokens, *, clip_low: float = 1.0, clip_high: float = 0.2) -> Loss:
    """-stop_gradient(clip(r, 1 - clip_low, 1 + clip_high)) A log p. arXiv 2506.13585, eq. 4 and 5.

    No token loses its gradient; what is said to be clipped is its weight.
    """
    ratio = tokens.log_ratio.detach().exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * tokens.advantages * tokens.logprobs * tokens.mask, (weight != ratio).to(ratio.dtype)


def sapo(tokens: PolicyTokens, *, temperature: float = 1.0, temperature_negative: float = 1.05) -> Loss:
    """-A 4 / t sigmoid(t (r - 1)): a gate in place of clipping. t is the advantage's. arXiv 2511.20347."""
    t = torch.where(tokens.advantages > 0, temperature, temperature_negative)
    ratio = tokens.log_ratio.exp()
    return -tokens.advantages * 4 / t * torch.sigmoid(t * (ratio - 1)), torch.zeros_like(ratio)


def policy_gradient(tokens: PolicyTokens) -> Loss:
    """-A log p (Williams 1992)."""
    return -tokens.advantages * tokens.logprobs * tokens.mask, torch.zeros_like(tokens.logprobs)


def value_loss(
    values: Float[Tensor, " T"], old_values: Float[Tensor, " T"], returns: Float[Tensor, " T"], *, clip: float | None
) -> Loss:
    """(V - return)^2 / 2, or the larger of that and the same of V clipped to `clip` around the old value.

    The clip is that of PPO's reference implementation; arXiv 2006.05990 discusses it.
    """
    plain = (values - returns).square() / 2
    if clip is None:
        return plain, torch.zeros_like(values)
    clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns).square() / 2
    return torch.maximum(plain, clipped), (clipped > plain).to(values.dtype)


def _clipped(
    ratio: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> Loss:
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    gain, cut = torch.minimum(unclipped, clipped), clipped < unclipped
    if dual_clip is not None:
        floor = dual_clip * advantages
        bounded = (advantages < 0) & (gain < floor)
        gain, cut = torch.where(bounded, floor, gain), cut | bounded
    return -gain, cut.to(ratio.dtype)

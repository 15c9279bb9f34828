"""Log-probabilities and entropies from logits that are split over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor


class _VocabParallel(torch.autograd.Function):
    """Two all-reduces over [B, T] values instead of a gather of [B, T, V]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, group: Any) -> tuple[Tensor, Tensor]:
        peak = logits.amax(-1)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        shifted = logits - peak[..., None]
        exp = shifted.exp()
        local = targets - first
        inside = (local >= 0) & (local < logits.shape[-1])
        local = local.clamp(0, logits.shape[-1] - 1)
        # a masked column is -inf: its probability is 0, and so must be what it adds, where 0 * -inf is NaN
        target_logit = shifted.gather(-1, local[..., None])[..., 0].where(inside, 0.0)
        sums = torch.stack([exp.sum(-1), (exp * shifted.clamp_min(-1e30)).sum(-1), target_logit])
        dist.all_reduce(sums, group=group)
        total, weighted, target_logit = sums
        log_total = total.log()
        probabilities = exp / total[..., None]
        entropy = log_total - weighted / total
        ctx.save_for_backward(probabilities, local, inside)
        ctx.mark_non_differentiable(entropy)
        return target_logit - log_total, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, local, inside = ctx.saved_tensors
        result = -probabilities * grad[..., None]
        result.scatter_add_(-1, local[..., None], (grad * inside)[..., None])
        return result, None, None, None


def token_logprobs(
    logits: Float[Tensor, "B T shard"],
    targets: Int[Tensor, "B T"],
    *,
    vocab: int,
    temperature: float,
    group: dist.ProcessGroup,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Log-probability (nats) of each target and entropy (nats, not differentiable) of each position, in float32.

    `logits` are this rank's equal part of the padded vocabulary; columns from `vocab` on are padding and get no
    probability. `group` holds the ranks that share the vocabulary.
    """
    size = logits.shape[-1]
    first = dist.get_rank(group) * size
    logits = logits.float() / temperature
    if first + size > vocab:
        logits = logits.clone()
        logits[..., max(vocab - first, 0) :] = float("-inf")
    return _VocabParallel.apply(logits, targets, first, group)

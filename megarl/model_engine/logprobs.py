"""Log-probabilities, entropies and divergences straight from hidden states, with the output matrix split over the
vocabulary.

The engine calls `token_logprobs` with what the last layer gives, in place of an output layer, and `token_divergences`
with that of a reference model, too. Nothing of the size tokens x vocabulary is ever held: the logits of some tokens at
a time are made, reduced to a few numbers a token, and made again in the backward pass. The idea is that of "Cut Your
Losses in Large-Vocabulary Language Models" (Wijmans et al., 2024, arXiv:2411.09009), in plain PyTorch and over
tensor-parallel ranks. It does not reduce the gradient of the hidden states over the ranks: the caller's mapping into
the tensor-parallel region does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 256 << 20
"""The float32 logits of a chunk. Two buffers of this size are alive at the peak, in the backward pass; for divergences
it is three, in the forward pass.

A chunk of n tokens does about 6 n operations for each weight in the backward pass, and reads and writes the weight's
float32 gradient, 8 bytes. GPUs do some 200 operations in the time of a byte, so n should be some hundreds: it is 441
for 151,936 rows. Smaller buffers would save little beside the gradient itself, and wait for memory.
"""


class _Split(NamedTuple):
    """What the functions need to know beside their tensors."""

    vocab: int
    temperature: float
    group: dist.ProcessGroup
    chunk_bytes: int

    def real_rows(self, weight: Tensor) -> Tensor:
        """This rank's rows without padding, maybe none. What is never multiplied can neither win nor be NaN."""
        return weight[: max(self.vocab - self.first_row(weight), 0)]

    def first_row(self, weight: Tensor) -> int:
        return dist.get_rank(self.group) * len(weight)

    def chunks(self, weight: Tensor, tokens: int) -> Iterator[slice]:
        """Slices of tokens; none on a rank that has padding alone."""
        rows = len(self.real_rows(weight))
        if rows:
            size = max(self.chunk_bytes // (4 * rows), 1)
            yield from (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


class _ChunkedLogprobs(torch.autograd.Function):
    """Two all-reduces of a few values a token in the forward pass, none in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, split: _Split) -> tuple[Tensor, Tensor]:
        rows, local = split.real_rows(weight), targets - split.first_row(weight)
        # The least float and not -inf, so that a rank without rows rescales its sums by exp(-huge) = 0 and not by NaN.
        peak = hidden.new_full((len(hidden),), torch.finfo(torch.float32).min, dtype=torch.float32)
        sums = hidden.new_zeros((3, len(hidden)), dtype=torch.float32)
        for chunk in split.chunks(weight, len(hidden)):
            peak[chunk], sums[:, chunk] = _reduce(_logits(hidden[chunk], rows, split.temperature), local[chunk])
        highest = peak.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=split.group)
        total, weighted, target_logit = sums
        below = peak - highest
        inside = (local >= 0) & (local < len(rows))
        scale = below.exp()
        sums = torch.stack(
            [total * scale, (weighted + below * total) * scale, (target_logit + below).where(inside, 0.0)]
        )
        dist.all_reduce(sums, group=split.group)
        total, weighted, target_logit = sums
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.split = split
        ctx.save_for_backward(hidden, weight, targets, highest + log_total, entropy)
        ctx.set_materialize_grads(False)
        return target_logit - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, targets, log_normalizer, entropy = ctx.saved_tensors
        local = targets - ctx.split.first_row(weight)

        def logits_grad(chunk: slice, logits: Tensor) -> Tensor:
            return _logits_grad(
                logits,
                local[chunk],
                log_normalizer[chunk],
                entropy[chunk],
                None if grad_logprobs is None else grad_logprobs[chunk],
                None if grad_entropy is None else grad_entropy[chunk],
            )

        return *_input_grads(ctx, hidden, weight, logits_grad), None, None


class _ChunkedDivergences(torch.autograd.Function):
    """One all-gather of five values a token in the forward pass, no collective in the backward pass.

    By the chain rule, the divergence is that between the probabilities of the ranks' parts of the vocabulary, plus that
    within each part, weighted by the policy's probability of the part. So a rank can reduce its rows in one pass.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, other: Tensor, other_weight: Tensor, split: _Split) -> Tensor:
        rows, other_rows = split.real_rows(weight), split.real_rows(other_weight)
        # Of the policy and the reference, what _normalize gives, and the divergence within this rank's rows.
        mine = hidden.new_zeros((5, len(hidden)), dtype=torch.float32)
        # The least float and not -inf, so that the part of a rank without rows has probability 0 and not NaN.
        mine[0:4:2] = torch.finfo(torch.float32).min
        for chunk in split.chunks(weight, len(hidden)):
            log_p = _logits(hidden[chunk], rows, split.temperature)
            log_q = _logits(other[chunk], other_rows, split.temperature)
            mine[:2, chunk], mine[2:4, chunk] = _normalize(log_p), _normalize(log_q)
            mine[4, chunk] = _divergence(log_p, log_q, -1)
            del log_p, log_q  # before the next chunk's logits
        gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(split.group))]
        dist.all_gather(gathered, mine, group=split.group)
        parts = torch.stack(gathered)
        peaks, log_totals, within = parts[:, 0:4:2], parts[:, 1:4:2], parts[:, 4]
        highest = peaks.amax(0)
        log_parts = peaks - highest + log_totals
        log_total = log_parts.logsumexp(0)
        log_p, log_q = (log_parts - log_total).unbind(1)
        divergence = (log_p.exp() * within).sum(0) + _divergence(log_p, log_q, 0)
        ctx.split = split
        ctx.save_for_backward(hidden, weight, other, other_weight, highest, log_total, divergence)
        return divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """d KL / d logit_j = p_j (log p_j - log q_j - KL)."""
        hidden, weight, other, other_weight, highest, log_total, divergence = ctx.saved_tensors
        other_rows = ctx.split.real_rows(other_weight)

        def logits_grad(chunk: slice, logits: Tensor) -> Tensor:
            log_p, log_q = logits, _logits(other[chunk], other_rows, ctx.split.temperature)
            for i, log in enumerate((log_p, log_q)):
                log.sub_(highest[i, chunk, None]).sub_(log_total[i, chunk, None])
            below = log_q.sub_(log_p).add_(divergence[chunk, None])
            return log_p.exp_().mul_(below).mul_(-grad[chunk, None])

        return *_input_grads(ctx, hidden, weight, logits_grad), None, None, None


def _input_grads(
    ctx: Any, hidden: Tensor, weight: Tensor, logits_grad: Callable[[slice, Tensor], Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden states and matrix; `logits_grad` makes that of a chunk's logits, and may overwrite these."""
    split: _Split = ctx.split
    rows = split.real_rows(weight)
    needs_hidden, needs_weight = ctx.needs_input_grad[:2]
    hidden_grad = torch.zeros_like(hidden) if needs_hidden else None
    weight_grad = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
    for chunk in split.chunks(weight, len(hidden)):
        # No name for the logits: in half precision they would stay beside the copy.
        grad = logits_grad(chunk, _logits(hidden[chunk], rows, split.temperature))
        grad = grad.div_(split.temperature).to(hidden.dtype)
        if hidden_grad is not None:
            torch.mm(grad, rows, out=hidden_grad[chunk])
        if weight_grad is not None:
            _add_product(weight_grad[: len(rows)], grad, hidden[chunk], split.chunk_bytes)
        del grad  # before the next chunk's logits
    return hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype)


def _logits(hidden: Tensor, rows: Tensor, temperature: float) -> Tensor:
    """In float32 from a product in the parameters' dtype, as the rollout engine makes them."""
    return (hidden @ rows.T).float().div_(temperature)


def _reduce(logits: Tensor, local: Tensor) -> tuple[Tensor, Tensor]:
    """Of each token: the largest logit; and of logits less that one, sum(exp), sum(exp * logit), and the target's."""
    peak = logits.amax(-1)
    logits.sub_(peak[:, None])
    target_logit = logits.gather(-1, local.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0]
    exp = logits.exp()
    return peak, torch.stack([exp.sum(-1), exp.mul_(logits).sum(-1), target_logit])


def _normalize(logits: Tensor) -> Tensor:
    """Overwrite logits with log-probabilities; returns [2, n], of each token the largest logit and log sum(exp(below)).

    These are kept apart: the sum of both would be rounded as coarsely as the largest logit.
    """
    peak = logits.amax(-1)
    log_total = logits.sub_(peak[:, None]).exp().sum(-1).log()
    logits.sub_(log_total[:, None])
    return torch.stack([peak, log_total])


def _divergence(log_p: Tensor, log_q: Tensor, dim: int) -> Tensor:
    """sum p (log p - log q) as the sum of q - p + p (log p - log q), which is the same since p and q each sum to 1.

    Each term is at least 0 and has its minimum where q = p, so that rounding of log p and log q hardly shows where the
    distributions are close. Overwrites both.
    """
    p = log_p.exp()
    return log_p.sub_(log_q).mul_(p).sub_(p).add_(log_q.exp_()).sum(dim)


def _logits_grad(
    logits: Tensor,
    local: Tensor,
    log_normalizer: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """With p the softmax and y the target: d log p_y / d logit_j = [j = y] - p_j, d H / d logit_j = -p_j (log p_j + H).

    The second follows from the first and H = -sum_j p_j log p_j. Overwrites `logits`.
    """
    log_p = logits.sub_(log_normalizer[:, None])
    if grad_entropy is None:
        assert grad_logprobs is not None
        grad = log_p.exp_().mul_(-grad_logprobs[:, None])
    else:
        p = log_p.exp()
        offset = grad_entropy * entropy
        if grad_logprobs is not None:
            offset = offset + grad_logprobs
        grad = log_p.mul_(-grad_entropy[:, None]).sub_(offset[:, None]).mul_(p)
    if grad_logprobs is not None:
        columns = grad.shape[-1]
        inside = (local >= 0) & (local < columns)
        grad.scatter_add_(-1, local.clamp(0, columns - 1)[:, None], (grad_logprobs * inside)[:, None])
    return grad


def _add_product(total: Tensor, grad: Tensor, hidden: Tensor, most_bytes: int) -> None:
    """Add grad.T @ hidden to `total`, which is in float32.

    In half precision the product is taken in half precision, where the hardware is fast, and of some rows at a time, so
    that its own memory is bounded.
    """
    if grad.dtype == torch.float32:
        total.addmm_(grad.T, hidden)
        return
    size = max(most_bytes // (2 * hidden.shape[-1]), 1)
    for start in range(0, len(total), size):
        total[start : start + size] += grad[:, start : start + size].T @ hidden


def token_logprobs(
    hidden: Float[Tensor, "T H"],
    weight: Float[Tensor, "shard H"],
    targets: Int[Tensor, " T"],
    *,
    vocab: int,
    temperature: float,
    group: dist.ProcessGroup,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Log-probability (nats) of each target, in [0, vocab), and entropy (nats) at each token; float32, differentiable.

    `weight` is this rank's equal part of the padded vocabulary's output matrix; rows from `vocab` on are padding and
    get no probability and no gradient. `group` holds the ranks that share the vocabulary, and `hidden` and `targets`
    are the same on all of them.

    The gradient of `hidden` is this rank's part, from its own rows: the whole one is the sum over `group`, and there is
    no collective in the backward pass. Pass `hidden` through `copy_to_tensor_model_parallel_region` or
    `gather_from_sequence_parallel_region`, whose backward passes sum it.

    `chunk_bytes` bounds the float32 logits held at a time; the results do not depend on it but for rounding.
    """
    split = _Split(vocab=vocab, temperature=temperature, group=group, chunk_bytes=chunk_bytes)
    return _ChunkedLogprobs.apply(hidden, weight, targets, split)


def token_divergences(
    hidden: Float[Tensor, "T H"],
    weight: Float[Tensor, "shard H"],
    reference_hidden: Float[Tensor, "T R"],
    reference_weight: Float[Tensor, "shard R"],
    *,
    vocab: int,
    temperature: float,
    group: dist.ProcessGroup,
    chunk_bytes: int = CHUNK_BYTES,
) -> Float[Tensor, " T"]:
    """KL(policy || reference) = sum_v p_v (log p_v - log q_v) (nats) at each token, over the whole vocabulary; float32.

    `hidden` and `weight` are the policy's and alone get a gradient; the others are the reference model's. Everything
    else is as in `token_logprobs`, and `temperature` is that of both.
    """
    split = _Split(vocab=vocab, temperature=temperature, group=group, chunk_bytes=chunk_bytes)
    return _ChunkedDivergences.apply(hidden, weight, reference_hidden, reference_weight, split)

"""Log-probabilities of one rank that holds the whole vocabulary, against log_softmax in float64.

What several ranks make of their parts is compared in tests/distributed/test_layouts.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.model_engine.logprobs import token_logprobs

VOCAB, PADDED = 11, 16


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def logits_and_targets(scale: float) -> tuple[Tensor, Tensor]:
    """Logits with columns of padding that would win every softmax."""
    generator = torch.Generator().manual_seed(5)
    logits = scale * torch.randn(3, 7, PADDED, generator=generator)
    logits[..., VOCAB:] = 100.0 * scale
    return logits, torch.randint(VOCAB, (3, 7), generator=generator)


def expected(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_softmax = torch.log_softmax(logits[..., :VOCAB].double() / temperature, -1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax.gather(-1, targets[..., None])[..., 0], entropy


@pytest.mark.parametrize("temperature", [1.0, 0.6, 3.0])
@pytest.mark.parametrize("scale", [0.01, 1.0, 50.0])
def test_values_entropies_and_gradient(group: dist.ProcessGroup, scale: float, temperature: float) -> None:
    logits, targets = logits_and_targets(scale)
    logits.requires_grad_()
    exact = logits.detach().clone().requires_grad_()
    logprobs, entropies = token_logprobs(logits, targets, vocab=VOCAB, temperature=temperature, group=group)
    want_logprobs, want_entropies = expected(exact, targets, temperature)
    close = {"rtol": 1e-5, "atol": 2e-6 * max(scale, 1), "check_dtype": False}
    torch.testing.assert_close(logprobs, want_logprobs, **close)
    torch.testing.assert_close(entropies, want_entropies, **close)
    weights = torch.linspace(-1, 2, 21).view(3, 7)
    (logprobs * weights).sum().backward()
    (want_logprobs * weights).sum().backward()
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, exact.grad, rtol=1e-5, atol=2e-6 / temperature)


def test_padding_gets_no_probability_and_no_gradient(group: dist.ProcessGroup) -> None:
    logits, _ = logits_and_targets(1.0)
    logits.requires_grad_()
    before = logits.detach().clone()
    every_token = torch.arange(VOCAB).view(1, 1, -1).expand(3, 7, -1)
    columns = logits.repeat_interleave(VOCAB, 1)
    logprobs, _ = token_logprobs(columns, every_token.flatten(1), vocab=VOCAB, temperature=1.0, group=group)
    torch.testing.assert_close(logprobs.exp().view(3, 7, VOCAB).sum(-1), torch.ones(3, 7))
    logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert not logits.grad[..., VOCAB:].any()
    assert torch.equal(logits.detach(), before), "the caller's logits are not written to"


def test_a_vocabulary_without_padding_and_half_precision(group: dist.ProcessGroup) -> None:
    logits, targets = logits_and_targets(1.0)
    logits = logits[..., :VOCAB].bfloat16()
    logprobs, entropies = token_logprobs(logits, targets, vocab=VOCAB, temperature=1.0, group=group)
    assert logprobs.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected(logits, targets, 1.0)[0].float())


def test_the_entropy_takes_no_gradient(group: dist.ProcessGroup) -> None:
    logits, targets = logits_and_targets(1.0)
    _, entropies = token_logprobs(logits.requires_grad_(), targets, vocab=VOCAB, temperature=1.0, group=group)
    assert not entropies.requires_grad

"""GRPO's formulas against the same ones written out in float64, and the exact divergence of small distributions."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms import clipped_policy_loss, group_advantages, kl_to_reference

fixed = settings(derandomize=True, deadline=None)  # the same examples each time; the machine may be busy

rewards_of = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=9)


@fixed
@given(rewards_of)
def test_advantages_are_standardised_rewards(rewards: list[float]) -> None:
    advantages = group_advantages(torch.tensor([rewards], dtype=torch.float64))[0].tolist()
    mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
    assert advantages == pytest.approx([(r - mean) / (deviation + 1e-4) for r in rewards], rel=1e-9, abs=1e-9)


def test_groups_do_not_mix() -> None:
    rewards = torch.tensor([[0.0, 1.0, 1.0], [5.0, 3.0, 1.0]])
    together = group_advantages(rewards)
    assert torch.equal(together, torch.cat([group_advantages(row[None]) for row in rewards]))
    torch.testing.assert_close(together.sum(1), torch.zeros(2))
    assert together[0, 0] < 0 < together[0, 1] == together[0, 2]


@fixed
@given(st.floats(-1e6, 1e6, width=32), st.integers(2, 64))
def test_equal_rewards_teach_nothing(reward: float, size: int) -> None:
    """Exactly nothing: a sequence without a gradient is left out of the update."""
    assert not group_advantages(torch.full((1, size), reward)).any()


# ratio, advantage -> loss, whether the clip cuts the gradient off; clipped to [0.8, 1.3]
CLIP_TABLE = [
    (1.0, 2.0, -2.0, False),
    (1.0, -2.0, 2.0, False),
    (1.2, 2.0, -2.4, False),
    (1.4, 2.0, -2.6, True),  # good enough already
    (1.4, -2.0, 2.8, False),  # worse and getting worse: the gradient must bring it back
    (0.9, -2.0, 1.8, False),
    (0.5, -2.0, 1.6, True),  # bad enough already
    (0.5, 2.0, -1.0, False),
    (3.0, 0.0, 0.0, False),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "cut"), CLIP_TABLE)
def test_the_clipped_loss_and_where_its_gradient_ends(ratio: float, advantage: float, loss: float, cut: bool) -> None:
    old = torch.tensor([[-1.7]], dtype=torch.float64)
    logprobs = (old + math.log(ratio)).requires_grad_()
    losses, clipped = clipped_policy_loss(
        logprobs, old, torch.tensor([[advantage]], dtype=torch.float64), clip_low=0.2, clip_high=0.3
    )
    assert losses.item() == pytest.approx(loss, abs=1e-12)
    assert clipped.item() == cut
    losses.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(0.0 if cut else -ratio * advantage, abs=1e-12)


def test_on_policy_the_gradient_is_the_policy_gradient() -> None:
    logprobs = torch.tensor([[-0.3, -2.0, -9.0]], requires_grad=True)
    advantages = torch.tensor([[1.5, -0.5, 0.0]])
    losses, clipped = clipped_policy_loss(logprobs, logprobs.detach(), advantages, clip_low=0.2, clip_high=0.2)
    losses.sum().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, -advantages)
    assert not clipped.any()


@pytest.mark.parametrize("seed", range(5))
def test_the_kl_estimate_is_unbiased(seed: int) -> None:
    """Its mean over all tokens under the policy is the divergence itself, and no token's estimate is negative."""
    generator = torch.Generator().manual_seed(seed)
    policy, reference = torch.log_softmax(3 * torch.randn(2, 1, 13, generator=generator, dtype=torch.float64), -1)
    estimates = kl_to_reference(policy, reference)
    exact = sum(
        math.exp(p) * (p - q) for p, q in zip(policy.flatten().tolist(), reference.flatten().tolist(), strict=True)
    )
    assert (policy.exp() * estimates).sum().item() == pytest.approx(exact, rel=1e-12)
    assert (estimates >= 0).all()


@pytest.mark.parametrize("difference", [-3.0, -0.1, 0.0, 0.1, 3.0])
def test_the_kl_estimate_and_its_gradient(difference: float) -> None:
    logprobs = torch.tensor([[-4.0]], dtype=torch.float64, requires_grad=True)
    estimate = kl_to_reference(logprobs, logprobs.detach() + difference)
    assert estimate.item() == pytest.approx(math.exp(difference) - difference - 1, abs=1e-12)
    estimate.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(1 - math.exp(difference), abs=1e-12)

"""Advantages and losses against TRL's own, which tools/trl_values.py wrote down. TRL ran in float64 there.

Left out is what TRL 1.16 computes differently by definition, or what only one of both computes:

- a group of equal rewards: here exactly 0, there the mean's rounding / 1e-4
- deviations of the whole batch (`scale_rewards="batch"`), of each reward function (`normalize_then_sum`), of RLOO's
  advantages (`normalize_advantages`); those without Bessel's correction of the asynchronous trainer: only there
- the mean over sequences: there it counts those without tokens, such as masked truncated ones
- `bnpo` over several micro-batches: there the mean of their means, here that of the global batch
- RLOO's loss: there it clips the ratio of a sequence's probability; its gradient is compared on fresh samples alone
- `delta` below 1 + epsilon_high; from there on it is the dual clip, which is compared
- truncated importance weights with a lower bound: there raised to it
- the divergence times the ratio (`use_bias_correction_kl`, TRL's default): only there
- the entropy's bonus: there a mean over tokens, here under the loss's normalizer
- VESPO, masks by entropy or by off-policy divergence, two bounds for GMPO, A2PO, TPO: only there
- PPO's generalised advantages, whitening and value loss, and GSPO by token: no longer there
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms import (
    ADVANTAGES,
    LOSSES,
    Outcomes,
    PolicyTokens,
    bradley_terry,
    importance_weights,
    kl_estimate,
    overlong_penalty,
    token_weights,
)
from megarl.config import ConstantDivisor, SequenceMean, TokenMean

VALUES: dict[str, Any] = json.loads(Path(__file__).with_name("trl_values.json").read_text())
NEAR = {"rtol": 1e-6, "atol": 1e-8}
"""Weights of tokens are float32 here; all else is float64."""


@dataclass(frozen=True)
class Case:
    """What corresponds to the options of that name in tools/trl_values.py."""

    loss: str
    normalizer: TokenMean | SequenceMean | ConstantDivisor
    options: dict[str, float] = field(default_factory=dict)
    kl: float = 0.0
    correction: dict[str, Any] = field(default_factory=dict)
    skip_truncated: bool = False


CORRECTIONS: dict[str, dict[str, Any]] = {
    "token_truncate": {"level": "token", "action": "truncate", "high": 1.4},
    "token_mask": {"level": "token", "action": "mask", "low": 0.6, "high": 1.4},
    "sequence_truncate": {"level": "sequence", "action": "truncate", "high": 1.4},
    "sequence_mask": {"level": "sequence", "action": "mask", "low": 0.6, "high": 1.4},
}
SEQUENCE_CLIP = {"clip_low": 0.05, "clip_high": 0.1}
CASES = {
    "grpo": Case("ppo", SequenceMean()),
    "asymmetric-clip": Case("ppo", SequenceMean(), {"clip_high": 0.28}),
    "two-sided-clip": Case("ppo", SequenceMean(), {"dual_clip": 1.5}),
    "bnpo": Case("ppo", TokenMean()),
    "dapo": Case("ppo", TokenMean(), {"clip_high": 0.28}),
    "dapo-truncated-masked": Case("ppo", TokenMean(), skip_truncated=True),
    "dr_grpo": Case("ppo", ConstantDivisor(tokens=16)),
    "dr_grpo-truncated-masked": Case("ppo", ConstantDivisor(tokens=16), skip_truncated=True),
    "gspo": Case("gspo", SequenceMean(), SEQUENCE_CLIP),
    "luspo": Case("gspo", ConstantDivisor(tokens=1), SEQUENCE_CLIP),
    "cispo": Case("cispo", TokenMean(), {"clip_high": 0.25}),  # TRL's bound is the ratio's, 1.25
    "sapo": Case("sapo", SequenceMean(), {"temperature": 1.0, "temperature_negative": 1.5}),
    "gmpo": Case("gmpo", SequenceMean(), {"clip": 0.4}),
    "kl-k3": Case("ppo", SequenceMean(), kl=0.1),
    **{name: Case("ppo", TokenMean(), kl=0.1, correction=bounds) for name, bounds in CORRECTIONS.items()},
}
BATCHES = range(len(VALUES["batches"]))


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def outcomes_of(batch: dict[str, Any]) -> Outcomes:
    """Four completions of each prompt, one prompt after the other."""
    lengths = torch.tensor(batch["lengths"])
    return Outcomes(tensor(batch["rewards"]), torch.arange(len(lengths)) // 4, lengths)


def tokens_of(number: int, logprobs: Tensor, mask: Tensor) -> PolicyTokens:
    """With TRL's advantages."""
    batch, advantages = VALUES["batches"][number], tensor(VALUES["advantages"]["grpo"][number])
    outcomes = outcomes_of(batch)
    sequences = len(outcomes.lengths)
    return PolicyTokens(
        logprobs, tensor(batch["old"]), outcomes.at_tokens(advantages), mask, outcomes.sequence, sequences
    )


def assert_same_loss(total: Tensor, logprobs: Tensor, wanted: dict[str, Any]) -> None:
    (gradient,) = torch.autograd.grad(total, logprobs)
    torch.testing.assert_close(gradient, tensor(wanted["gradient"]), **NEAR)
    if "loss" in wanted:
        torch.testing.assert_close(total, tensor(wanted["loss"]), **NEAR)


def test_the_version() -> None:
    assert VALUES["trl"] == "1.16.0"


def test_every_loss_is_compared() -> None:
    assert CASES.keys() == VALUES["losses"].keys()
    assert CORRECTIONS.keys() == VALUES["importance"].keys()


@pytest.mark.parametrize("number", BATCHES)
@pytest.mark.parametrize(
    ("name", "method"), [("grpo", "grpo"), ("grpo-unscaled", "dr_grpo"), ("rloo", "rloo"), ("rloo-kl", "rloo")]
)
def test_advantages(name: str, method: str, number: int) -> None:
    batch = VALUES["batches"][number]
    outcomes = outcomes_of(batch)
    if name == "rloo-kl":
        divergence = kl_estimate(tensor(batch["old"]), tensor(batch["reference"]), "k1")
        outcomes = Outcomes(outcomes.rewards, outcomes.group, outcomes.lengths, 0.1 * divergence)
    wanted = outcomes.at_tokens(tensor(VALUES["advantages"][name][number]))
    torch.testing.assert_close(ADVANTAGES[method](outcomes), wanted, **NEAR)


@pytest.mark.parametrize("number", BATCHES)
@pytest.mark.parametrize("name", CASES)
def test_losses(name: str, number: int) -> None:
    """Values, and gradients by log-probabilities."""
    case, batch = CASES[name], VALUES["batches"][number]
    logprobs, mask = tensor(batch["new"]).requires_grad_(), tensor(batch["mask"])
    if case.skip_truncated:
        mask = mask * ~torch.tensor(batch["truncated"]).repeat_interleave(torch.tensor(batch["lengths"]))
    tokens = tokens_of(number, logprobs, mask)
    losses, _ = LOSSES[case.loss](tokens, **case.options)
    if case.correction:
        losses = losses * importance_weights(tokens, tensor(batch["sampled"]), **case.correction)[0]
    losses = losses + case.kl * kl_estimate(logprobs, tensor(batch["reference"]), "k3")
    lengths = torch.zeros(tokens.sequences, dtype=torch.long).index_add(0, tokens.sequence, mask.long())
    weights = token_weights(lengths, case.normalizer)[tokens.sequence] * mask
    assert_same_loss((losses * weights).sum(), logprobs, VALUES["losses"][name][number])


@pytest.mark.parametrize("number", BATCHES)
@pytest.mark.parametrize("name", CORRECTIONS)
def test_importance_weights(name: str, number: int) -> None:
    batch = VALUES["batches"][number]
    mask = tensor(batch["mask"])
    tokens = tokens_of(number, tensor(batch["new"]), mask)
    weights, _ = importance_weights(tokens, tensor(batch["sampled"]), **CORRECTIONS[name])
    torch.testing.assert_close(weights, tensor(VALUES["importance"][name][number]) * mask, **NEAR)


@pytest.mark.parametrize("number", BATCHES)
def test_gradients_of_rloo_on_fresh_samples(number: int) -> None:
    """Those of the policy gradient, each sequence's summed over its tokens."""
    batch = VALUES["batches"][number]
    logprobs = tensor(batch["old"]).requires_grad_()
    outcomes = outcomes_of(batch)
    advantages, mask = ADVANTAGES["rloo"](outcomes), torch.ones_like(logprobs)
    sequences = len(outcomes.lengths)
    tokens = PolicyTokens(logprobs, logprobs.detach(), advantages, mask, outcomes.sequence, sequences)
    losses, _ = LOSSES["policy_gradient"](tokens)
    weights = token_weights(outcomes.lengths, ConstantDivisor(tokens=1))[outcomes.sequence]
    assert_same_loss((losses * weights).sum(), logprobs, {"gradient": VALUES["rloo-fresh"][number]["gradient"]})


def test_overlong_penalty() -> None:
    values = VALUES["overlong"]
    found = overlong_penalty(torch.tensor(values["lengths"]), limit=values["limit"], buffer=values["buffer"])
    torch.testing.assert_close(found.double(), tensor(values["penalties"]), **NEAR)


@pytest.mark.parametrize("name", VALUES["preferences"]["results"])
def test_reward_model_loss(name: str) -> None:
    values = VALUES["preferences"]
    rewards = tensor(values["rewards"]).requires_grad_()
    chosen, rejected = rewards.chunk(2)
    margin = tensor(values["margin"]) if "margin" in name else 0.0
    centring = values["centring"] if "centring" in name else 0.0
    total = bradley_terry(chosen, rejected, margin, centring=centring).mean()
    assert_same_loss(total, rewards, values["results"][name])

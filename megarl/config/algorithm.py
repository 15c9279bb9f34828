"""The recipe's `algorithm`: which of megarl.algorithms makes a loss of rewards, and with what options.

The fields of a choice are the options of the function that its `type` names; formulas and sources stand there.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megarl.config.fields import (
    Fraction,
    FunctionName,
    JsonObject,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
)


class Own(Section):
    type: Literal["own"]
    """A function of your own, with the arguments of megarl's."""
    function: FunctionName
    """Where it is, as module:function; its directory must be on PYTHONPATH."""
    options: JsonObject = {}
    """What it is given by name."""


class GrpoAdvantage(Section):
    type: Literal["grpo"] = "grpo"
    """Rewards standardised in their group (DeepSeekMath, arXiv 2402.03300)."""


class DrGrpoAdvantage(Section):
    type: Literal["dr_grpo"]
    """Rewards less their group's mean (arXiv 2503.20783); its loss has the constant normalizer."""


class RlooAdvantage(Section):
    type: Literal["rloo"]
    """Rewards less the mean of the group's others (arXiv 2402.14740)."""


class OpoAdvantage(Section):
    type: Literal["opo"]
    """Rewards less the group's mean weighted by length (arXiv 2505.23585)."""


class RemaxAdvantage(Section):
    type: Literal["remax"]
    """Rewards less that of the greedy answer, which each prompt is asked for, too (arXiv 2310.10505)."""


class PassAtKAdvantage(Section):
    type: Literal["pass_at_k"]
    """The reward is that of the best of k samples (arXiv 2508.10751); a sample is right if its reward is above 0."""
    k: PositiveInt
    """Samples that one try may take."""


class ReinforcePlusPlusAdvantage(Section):
    type: Literal["reinforce_plus_plus"]
    """Rewards to go, standardised over the step's tokens (arXiv 2501.03262)."""
    group_baseline: bool = False
    """Take the group's mean from the reward first."""


class GaeAdvantage(Section):
    type: Literal["gae"]
    """Generalised advantage estimation with the values of a critic (arXiv 1506.02438)."""
    discount: Fraction = 1.0
    """What a reward one token later counts."""
    smoothing: Fraction = 0.95
    """Lambda: 0 trusts the critic, 1 the rewards."""


class PpoLoss(Section):
    type: Literal["ppo"] = "ppo"
    """The clipped ratio of each token (arXiv 1707.06347)."""
    clip_low: Fraction = 0.2
    """The probability ratio is clipped below at 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The probability ratio is clipped above at 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bounds the loss of tokens with a negative advantage A by -dual_clip x A (arXiv 1912.09729)."""


class GspoLoss(Section):
    type: Literal["gspo"]
    """The clipped ratio of the whole sequence, per token (arXiv 2507.18071); its normalizer is sequence."""
    clip_low: Fraction = 3e-4
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: NonNegativeFloat = 4e-4
    """The ratio is clipped above at 1 + clip_high."""


class GmpoLoss(Section):
    type: Literal["gmpo"]
    """The geometric mean of a sequence's clipped ratios (arXiv 2507.20673); its normalizer is sequence."""
    clip: PositiveFloat = 0.4
    """The logarithm of a token's ratio is clipped to this."""


class CispoLoss(Section):
    type: Literal["cispo"]
    """The policy gradient weighted by the clipped ratio (arXiv 2506.13585)."""
    clip_low: Fraction = 1.0
    """The weight is at least 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """The weight is at most 1 + clip_high."""


class SapoLoss(Section):
    type: Literal["sapo"]
    """A smooth gate on the ratio in place of clipping (arXiv 2511.20347)."""
    temperature: PositiveFloat = 1.0
    """Sharpness of the gate where the advantage is positive."""
    temperature_negative: PositiveFloat = 1.05
    """Sharpness of the gate elsewhere."""


class PolicyGradientLoss(Section):
    type: Literal["policy_gradient"]
    """Advantage times log-probability, without a ratio."""


class FixedKl(Section):
    type: Literal["fixed"] = "fixed"
    """The coefficient stays as it is."""


class AdaptiveKl(Section):
    type: Literal["adaptive"]
    """The coefficient follows the measured divergence (arXiv 1909.08593, section 2.2)."""
    target: PositiveFloat
    """Nats of a whole sequence at which the coefficient stays."""
    horizon: PositiveFloat = 10_000.0
    """Sequences in which it changes by a fifth at most."""


class Kl(Section):
    coefficient: NonNegativeFloat = 0.0
    """Weight of the divergence from the initial policy; 0: no reference model is built."""
    estimator: Literal["k1", "k2", "k3", "full"] = "k3"
    """How it is estimated at a token; in the loss k1 has no gradient on average, k2 the right one; full is exact."""
    where: Literal["loss", "reward"] = "loss"
    """Added to the loss, or taken from the reward of each token."""
    control: FixedKl | AdaptiveKl = Field(default=FixedKl(), discriminator="type")
    """What the coefficient does during the run."""


class NoCorrection(Section):
    type: Literal["none"] = "none"
    """Tokens count as if the trainer itself had sampled them."""


class ImportanceCorrection(Section):
    type: Literal["importance"]
    """Tokens are weighed by the ratio of the trainer's probability to the engine's (TIS, MIS, IcePop, rejection)."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """The ratio of a token, the product over its sequence, or the geometric mean over it."""
    action: Literal["truncate", "mask", "reject"] = "truncate"
    """Outside the bounds: cut to `high`, or 0; within: the ratio, or with reject 1."""
    low: NonNegativeFloat = 0.0
    """Smallest ratio that counts."""
    high: PositiveFloat = 2.0
    """Largest ratio that counts."""


class TokenMean(Section):
    type: Literal["token"] = "token"
    """Every response token counts alike: the mean over the tokens of the global batch."""


class SequenceMean(Section):
    type: Literal["sequence"] = "sequence"
    """Every sequence counts alike: the mean over sequences of the means over their response tokens."""


class ConstantDivisor(Section):
    type: Literal["constant"] = "constant"
    """Every response token counts alike, whatever the lengths (Dr. GRPO, arXiv 2503.20783)."""
    tokens: PositiveInt
    """Tokens of a sequence that the sum over its tokens is divided by, such as rollout.max_new_tokens."""


class Algorithm(Section):
    advantage: (
        GrpoAdvantage
        | DrGrpoAdvantage
        | RlooAdvantage
        | OpoAdvantage
        | RemaxAdvantage
        | PassAtKAdvantage
        | ReinforcePlusPlusAdvantage
        | GaeAdvantage
        | Own
    ) = Field(default=GrpoAdvantage(), discriminator="type")
    """How rewards become advantages."""
    loss: PpoLoss | GspoLoss | GmpoLoss | CispoLoss | SapoLoss | PolicyGradientLoss | Own = Field(
        default=PpoLoss(), discriminator="type"
    )
    """How advantages become a loss."""
    kl: Kl = Kl()
    """What keeps the policy near the initial one."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the mean entropy, which the loss then raises."""
    correction: NoCorrection | ImportanceCorrection = Field(default=NoCorrection(), discriminator="type")
    """What is done about the trainer's and the engine's probabilities not being the same."""
    normalizer: TokenMean | SequenceMean | ConstantDivisor = Field(default=TokenMean(), discriminator="type")
    """What the loss, summed over all tokens of the global batch, is divided by."""
    skip_truncated: bool = False
    """Responses that reached rollout.max_new_tokens have no loss; they still count in their group's advantages."""
    minibatches: PositiveInt = 1
    """Parts into which the step's sequences are divided evenly, with an optimizer update each."""
    epochs: PositiveInt = 1
    """How often a step's sequences are learned from."""

    @property
    def compares(self) -> bool:
        """Whether its advantages come of comparing the samples of a group, so that one alone has none."""
        match self.advantage:
            case RemaxAdvantage() | GaeAdvantage() | Own():
                return False
            case ReinforcePlusPlusAdvantage(group_baseline=compares):
                return compares
        return True

    @property
    def updates(self) -> int:
        """Optimizer updates in one step."""
        return self.minibatches * self.epochs

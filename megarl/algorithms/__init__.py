"""Pure tensor functions: advantages, policy losses, divergences, weights. No files, clocks or hidden randomness."""

from megarl.algorithms.advantages import Outcomes, whiten
from megarl.algorithms.divergence import adapted_coefficient, kl_estimate
from megarl.algorithms.losses import PolicyTokens, value_loss
from megarl.algorithms.mismatch import importance_weights
from megarl.algorithms.normalize import token_weights
from megarl.algorithms.preference import bradley_terry
from megarl.algorithms.registry import ADVANTAGES, LOSSES
from megarl.algorithms.shaping import mixed_reward, overlong_penalty

__all__ = [
    "ADVANTAGES",
    "LOSSES",
    "Outcomes",
    "PolicyTokens",
    "adapted_coefficient",
    "bradley_terry",
    "importance_weights",
    "kl_estimate",
    "mixed_reward",
    "overlong_penalty",
    "token_weights",
    "value_loss",
    "whiten",
]

"""Pure tensor functions: advantages, policy losses, KL estimators. No groups, files, clocks or hidden randomness."""

from megarl.algorithms.grpo import clipped_policy_loss, group_advantages, kl_to_reference
from megarl.algorithms.normalize import token_weights

__all__ = ["clipped_policy_loss", "group_advantages", "kl_to_reference", "token_weights"]

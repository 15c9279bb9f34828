"""Weights in motion: from the trainer's ranks into the rollout engines, checked before they are used.

Sees both sides through small protocols and imports neither megatron nor sglang.
"""

from megarl.checkpoint_engine.publish import PublishError, check_agreement, clear_score_bias, publish

__all__ = ["PublishError", "check_agreement", "clear_score_bias", "publish"]

"""Weights in motion: from the trainer's ranks into the rollout engines, checked before they are used.

Sees both sides through small protocols and imports neither megatron nor sglang.
"""

from megarl.checkpoint_engine.check_plan import check
from megarl.checkpoint_engine.plan import Plan, Transfer, make_plan
from megarl.checkpoint_engine.publish import PublishError, check_agreement, clear_score_bias, publish
from megarl.checkpoint_engine.sides import Engines, PlanError, Training
from megarl.checkpoint_engine.traffic import Traffic, traffic

__all__ = [
    "Engines",
    "Plan",
    "PlanError",
    "PublishError",
    "Traffic",
    "Training",
    "Transfer",
    "check",
    "check_agreement",
    "clear_score_bias",
    "make_plan",
    "publish",
    "traffic",
]

"""Weights in motion: from the trainer's ranks into the rollout engines, checked before they are used.

Sees both sides through small protocols and imports neither megatron nor sglang.
"""

from megarl.checkpoint_engine.check_plan import check
from megarl.checkpoint_engine.exchange import ExchangeError, Precision
from megarl.checkpoint_engine.plan import Plan, Transfer, make_plan
from megarl.checkpoint_engine.publish import Published, Publisher, serialised
from megarl.checkpoint_engine.score_bias import clear_score_bias
from megarl.checkpoint_engine.sides import Engines, PlanError, Training
from megarl.checkpoint_engine.traffic import Traffic, traffic

__all__ = [
    "Engines",
    "ExchangeError",
    "Plan",
    "PlanError",
    "Precision",
    "Published",
    "Publisher",
    "Traffic",
    "Training",
    "Transfer",
    "check",
    "clear_score_bias",
    "make_plan",
    "serialised",
    "traffic",
]

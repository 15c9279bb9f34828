"""The loops: supervised fine-tuning and reinforcement learning, each readable on two screens, and what starts them."""

from megarl.trainer.preflight import describe_models, describe_ranks, preflight
from megarl.trainer.run import run_rank

__all__ = ["describe_models", "describe_ranks", "preflight", "run_rank"]

"""The loops: supervised fine-tuning and reinforcement learning, each readable on two screens, and what starts them."""

from megarl.trainer.preflight import describe_ranks, preflight
from megarl.trainer.run_state import RunDirectory

__all__ = ["RunDirectory", "describe_ranks", "preflight"]

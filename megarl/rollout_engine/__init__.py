"""SGLang: engines as child processes, their client, and the coordinator that makes groups of responses with them.

`server.py` runs inside the engine process and alone imports sglang; everything else speaks HTTP. This room never
imports megatron.
"""

from megarl.rollout_engine.channel import (
    Drain,
    Drained,
    Evaluate,
    Evaluation,
    Failed,
    Look,
    Lost,
    Sample,
    Take,
    Taken,
    Waiting,
    frame,
)
from megarl.rollout_engine.client import EngineClient, EngineLost, ScoreClient
from megarl.rollout_engine.coordinator import Coordinator, make_scheduler
from megarl.rollout_engine.dispatch import Dispatcher, PoisonedError
from megarl.rollout_engine.engine import Engine, EngineAddress, EngineControl, EngineError, EngineTimeout, Span
from megarl.rollout_engine.handle import COORDINATOR_SHARE, ENGINE_SHARE, CoordinatorError, CoordinatorHandle

__all__ = [
    "COORDINATOR_SHARE",
    "ENGINE_SHARE",
    "Coordinator",
    "CoordinatorError",
    "CoordinatorHandle",
    "Dispatcher",
    "Drain",
    "Drained",
    "Engine",
    "EngineAddress",
    "EngineClient",
    "EngineControl",
    "EngineError",
    "EngineLost",
    "EngineTimeout",
    "Evaluate",
    "Evaluation",
    "Failed",
    "Look",
    "Lost",
    "PoisonedError",
    "Sample",
    "ScoreClient",
    "Span",
    "Take",
    "Taken",
    "Waiting",
    "frame",
    "make_scheduler",
]

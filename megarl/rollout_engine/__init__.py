"""SGLang: engines as child processes, their client, and the coordinator that makes groups of responses with them.

`server.py` runs inside the engine process and alone imports sglang; everything else speaks HTTP. This room never
imports megatron.
"""

from megarl.rollout_engine.channel import Evaluation, Failed, Sample, Taken, frame
from megarl.rollout_engine.client import EngineClient, ScoreClient
from megarl.rollout_engine.coordinator import Coordinator
from megarl.rollout_engine.engine import Engine, EngineAddress, EngineControl, EngineError, EngineTimeout
from megarl.rollout_engine.handle import ENGINE_SHARE, CoordinatorError, CoordinatorHandle

__all__ = [
    "ENGINE_SHARE",
    "Coordinator",
    "CoordinatorError",
    "CoordinatorHandle",
    "Engine",
    "EngineAddress",
    "EngineClient",
    "EngineControl",
    "EngineError",
    "EngineTimeout",
    "Evaluation",
    "Failed",
    "Sample",
    "ScoreClient",
    "Taken",
    "frame",
]

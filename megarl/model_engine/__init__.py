"""Megatron: a policy, critic or reward model built from a Hugging Face directory, its forward pass, update, weights and
checkpoints.

The trainer drives a `ModelEngine`; the checkpoint engine reads its `weights`; a benchmark measures `token_logprobs`.
Nothing else imports megatron, and this room never imports sglang. Megatron's import takes seconds, so it happens where
this door is opened.
"""

from megarl.model_engine.engine import LossFunction, Metrics, ModelEngine, Update
from megarl.model_engine.export import HfExport
from megarl.model_engine.logprobs import token_logprobs
from megarl.model_engine.microbatch import MicroBatch, RemoteTokens, TokenSequence
from megarl.model_engine.offload import Held, Moved, Part, PartAwayError
from megarl.model_engine.weights import ModelWeights

__all__ = [
    "Held",
    "HfExport",
    "LossFunction",
    "Metrics",
    "MicroBatch",
    "ModelEngine",
    "ModelWeights",
    "Moved",
    "Part",
    "PartAwayError",
    "RemoteTokens",
    "TokenSequence",
    "Update",
    "token_logprobs",
]

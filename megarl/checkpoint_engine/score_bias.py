"""A trap in SGLang's reward models."""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch

from megarl.checkpoint_engine.publish import EngineTarget, serialised
from megarl.rollout_engine import EngineError

_NAME = "score.bias"


class CheckedEngine(EngineTarget, Protocol):
    """An engine that says what it holds."""

    def checksums(self) -> list[dict[str, str]]:
        """For each of its ranks: parameter name to SGLang's hash; of a CPU tensor the head of SHA-256 of its bytes."""


def clear_score_bias(engine: CheckedEngine, dtype: torch.dtype, device: str) -> None:
    """Of a reward model, set the bias of the score to 0.

    SGLang 0.5.23 gives the models of some families one (Qwen2, Qwen3), which transformers' models and so checkpoints
    do not have, and leaves it at random numbers.

    Raises EngineError: it is not 0 afterwards.
    """
    if not all(_NAME in sums for sums in engine.checksums()):
        return
    zero = torch.zeros(1, dtype=dtype)
    engine.begin_update()
    engine.load_tensors(serialised([(_NAME, zero)]))
    engine.end_update(0)
    wanted = hashlib.sha256(zero.view(torch.uint8).numpy().data).digest()[:8].hex()
    if device == "cpu" and any(sums[_NAME] != wanted for sums in engine.checksums()):
        raise EngineError("the bias of a reward model's score is not 0 in its engine, as was sent")

"""A policy and a reference of small families, and the divergence between them by transformers; for
payload_divergences.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.distributed.numerics import learn, rows, token_weights
from tests.families import write_model

FAMILIES = ["llama", "qwen3_moe"]
TEMPERATURE = 0.7


class Errors(msgspec.Struct):
    """How far one family at one layout is from transformers; all but divergences relative.

    `itself` is the largest divergence of the policy from itself.
    """

    in_loss: float
    divergences: float
    itself: float
    gradient: float
    gradient_name: str
    grad_norm: float
    loss: float
    next_loss: float


def write_reference(family: str, directory: Path) -> None:
    """Both models; and divergences, losses and gradients for `rows`."""
    model = write_model(family, directory / "model")
    other = write_model(family, directory / "reference", seed=1)
    with torch.no_grad():
        found = torch.cat([_divergences(model, other, row) for row in rows()])

    def loss(model: Any) -> Tensor:
        parts = [
            (weights * (_divergences(model, other, row) - _logprobs(model, row))).sum()
            for row, weights in zip(rows(), token_weights(), strict=True)
        ]
        return torch.stack(parts).sum()

    reference = learn(model, loss, directory / "gradients")
    save_file({"divergences": found}, directory / "divergences.safetensors")
    (directory / "reference.json").write_bytes(msgspec.json.encode(reference))


def _log_softmax(model: Any, row: list[int]) -> Tensor:
    return torch.log_softmax(model(torch.tensor([row])).logits[0, :-1].double() / TEMPERATURE, -1)


def _divergences(model: Any, other: Any, row: list[int]) -> Tensor:
    log_p = _log_softmax(model, row)
    with torch.no_grad():
        log_q = _log_softmax(other, row)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _logprobs(model: Any, row: list[int]) -> Tensor:
    return _log_softmax(model, row).gather(1, torch.tensor(row[1:])[:, None])[:, 0]

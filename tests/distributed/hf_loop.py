"""Supervised fine-tuning written with transformers and torch alone, one sequence at a time: what layouts must equal.

Shares nothing with megarl but the numbers of the recipe: the optimizer, its schedule and the clipping are written out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

# tokens, and ranges of those that are learned, each as first and end
Row = tuple[list[int], list[tuple[int, int]]]

LEARNING_RATE, FINAL_RATIO, WARMUP = 5e-3, 0.1, 3
BETAS, EPSILON, WEIGHT_DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 8.0


@dataclass
class Trained:
    """What the loop saw and made; gradients are those of the first update, after clipping."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    start: dict[str, Tensor] = field(default_factory=dict)
    end: dict[str, Tensor] = field(default_factory=dict)


def token_logprobs(model: Any, row: Row, temperature: float = 1.0) -> Tensor:
    """Log-probability of each token but the first."""
    ids = torch.tensor(row[0])
    logits = model(ids[None]).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, ids[1:, None])[:, 0]


def load(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def logprobs(path: Path, rows: list[Row], temperature: float) -> Tensor:
    """Of the tokens from the first learned one on, of all rows, one after the other."""
    model = load(path)
    with torch.no_grad():
        return torch.cat([token_logprobs(model, row, temperature)[row[1][0][0] - 1 :] for row in rows])


def train(path: Path, batches: list[list[Row]]) -> Trained:
    """One update for each batch, on the mean over its learned tokens."""
    model = load(path)
    parameters = dict(model.named_parameters())  # a tied output matrix is there once, as the embedding
    seen = Trained(start={name: p.detach().clone() for name, p in parameters.items()})
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in parameters.items()}
    for step, batch in enumerate(batches):
        model.zero_grad()
        tokens = sum(end - first for _, learned in batch for first, end in learned)
        losses = []
        for row in batch:
            logprobs = token_logprobs(model, row)
            loss = -torch.cat([logprobs[first - 1 : end - 1] for first, end in row[1]]).sum() / tokens
            loss.backward()
            losses.append(loss.item())
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters.values()))
        for p in parameters.values():
            p.grad *= min(1.0, CLIP / norm)
        if step == 0:
            seen.gradients = {name: p.grad.clone() for name, p in parameters.items()}
        rate = learning_rate(step, len(batches))
        for name, p in parameters.items():
            adamw(p.data, p.grad, *moments[name], step=step, rate=rate)
        seen.losses.append(sum(losses))
        seen.grad_norms.append(norm)
        seen.rates.append(rate)
    seen.end = {name: p.detach() for name, p in parameters.items()}
    return seen


def learning_rate(step: int, steps: int) -> float:
    if step < WARMUP:
        return LEARNING_RATE * (step + 1) / WARMUP
    progress = (step - WARMUP) / (steps - 1 - WARMUP)
    return LEARNING_RATE * (FINAL_RATIO + (1 - FINAL_RATIO) * (1 + math.cos(math.pi * progress)) / 2)


def adamw(weight: Tensor, grad: Tensor, mean: Tensor, square: Tensor, *, step: int, rate: float) -> None:
    """Loshchilov and Hutter, arXiv 1711.05101, algorithm 2; only matrices decay."""
    mean.mul_(BETAS[0]).add_(grad, alpha=1 - BETAS[0])
    square.mul_(BETAS[1]).addcmul_(grad, grad, value=1 - BETAS[1])
    corrected = mean / (1 - BETAS[0] ** (step + 1)), square / (1 - BETAS[1] ** (step + 1))
    decay = WEIGHT_DECAY if weight.dim() > 1 else 0.0
    weight -= rate * (corrected[0] / (corrected[1].sqrt() + EPSILON) + decay * weight)

"""Precision that every layout must give, from transformers; and the plan and report of payload_numerics.py."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.distributed.hf_routing import Routers, Routing
from tests.distributed.json_file import JsonFile
from tests.families import FAMILIES, VOCAB, write_model

LENGTHS = [2, 37, 9, 64, 21, 5, 50, 14]
LEARNING_RATE, BETAS, EPSILON, CLIP, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-6, 1.0, 0.1
ENTROPY_COEFFICIENT = 0.05
Layout = dict[str, int | str | bool]


LAYOUTS: dict[int, dict[str, Layout]] = {
    1: {"tp1": {}},
    2: {
        "tp2": {"tensor": 2},
        "pp2": {"pipeline": 2},
        "pp2_interleave2": {"pipeline": 2, "interleave": 2},
        "cp2": {"context": 2},
        "dp2": {},
        "ep2": {"expert": 2},
        "tp2_etp2": {"tensor": 2, "expert_tensor": 2},
        "cp2_ep2": {"context": 2, "expert": 2},
    },
    4: {
        "tp4": {"tensor": 4},
        "pp4": {"pipeline": 4},
        "cp4": {"context": 4},
        "dp2_ep4_overlap": {"expert": 4, "overlap": True},
        "tp2_pp2": {"tensor": 2, "pipeline": 2},
        "tp2_cp2_recompute": {"tensor": 2, "context": 2, "recompute": "full"},
        "tp2_dp2_ep2": {"tensor": 2, "expert": 2},
        "tp2_etp2_ep2": {"tensor": 2, "expert_tensor": 2, "expert": 2},
        "tp2_pp2_ep2": {"tensor": 2, "pipeline": 2, "expert": 2},
        "cp2_pp2_ep2": {"context": 2, "pipeline": 2, "expert": 2},
        "tp2_pp2_interleave2_selective": {"tensor": 2, "pipeline": 2, "interleave": 2, "recompute": "selective"},
        "dp2_pp2_interleave2_overlap": {"pipeline": 2, "interleave": 2, "overlap": True},
    },
}
"""By the number of ranks. With tensor parallelism activations are split along the sequence, too."""

ABSOLUTE, RELATIVE = 1e-5, 1e-5
"""What an error may be at most: those of logits and log-probabilities are absolute, the others relative."""


def families_of(layout: Layout) -> list[str]:
    """The families that the layout is for: those with experts if it spreads experts."""
    experts = [name for name in FAMILIES if any("experts" in field for field in FAMILIES[name][2])]
    if layout.get("expert_tensor", 1) != 1:
        return [name for name in experts if name != "gpt_oss"]  # whose experts have biases
    return experts if layout.get("expert", 1) != 1 else list(FAMILIES)


class Plan(JsonFile):
    """Families to run at each layout, all on the same number of ranks; `references` holds one directory a family.

    `changes` names what is to be changed in megarl at a layout; see payload_numerics.py.
    """

    references: Path
    layouts: dict[str, Layout]
    families: dict[str, list[str]]
    out: Path
    changes: dict[str, str] = {}


class Errors(msgspec.Struct):
    """How far one family at one layout is from transformers; gradients and norms relative, logits absolute."""

    logits: float
    gradient: float
    gradient_name: str
    grad_norm: float
    loss: float
    next_loss: float
    logprobs: float

    @property
    def good(self) -> bool:
        """Whether all are within their limits."""
        absolute, relative = [self.logits, self.logprobs], [self.gradient, self.grad_norm, self.loss, self.next_loss]
        return max(absolute) <= ABSOLUTE and max(relative) <= RELATIVE


class Reference(msgspec.Struct):
    loss: float
    next_loss: float
    grad_norm: float


def rows() -> list[list[int]]:
    """Sequences of very unequal length; all but their first token are predicted.

    Without token 0, which Gemma's configuration calls padding: transformers gives its embedding no gradient.
    """
    source = random.Random(5)
    return [[source.randrange(1, VOCAB) for _ in range(length)] for length in LENGTHS]


def token_weights() -> list[Tensor]:
    """Weight of each predicted token in the loss: the first tokens of a sequence, and one whole sequence, have none."""
    prompts = [min(3, length - 2) for length in LENGTHS]
    kept = [torch.cat([torch.zeros(p), torch.ones(n - 1 - p)]) for n, p in zip(LENGTHS, prompts, strict=True)]
    kept[2] = torch.zeros(LENGTHS[2] - 1)
    total = sum(float(weights.sum()) for weights in kept)
    return [weights / total for weights in kept]


def write_reference(family: str, directory: Path, routing: Routing = Routing(), **more: Any) -> None:  # noqa: B008
    """A small model, its logits and gradients for `rows`, its losses before and after a step of AdamW."""
    model = write_model(family, directory / "model", **more)
    routers = Routers(model, LENGTHS, routing)
    with torch.no_grad():
        logits = torch.cat([model(torch.tensor([row])).logits[0, :-1] for row in rows()])
    routing.write(directory)
    reference = learn(model, _loss, directory / "gradients", routers=routers)
    save_file({"logits": logits}, directory / "logits.safetensors")
    (directory / "reference.json").write_bytes(msgspec.json.encode(reference))


def learn(
    model: Any,
    loss: Callable[[Any], Tensor],
    directory: Path,
    *,
    idle: str = "router.bias",
    routers: Routers | None = None,
) -> Reference:
    """One step of AdamW on the clipped gradients of `loss`; the model itself is lost, and its gradients are written.

    Only parameters with `idle` in their names may be without a gradient. `routers` add their losses and learn, too.
    """
    first = loss(model)
    (first if routers is None else first + routers.loss()).backward()
    parameters = list(model.named_parameters())
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for _, p in parameters]
    grad_norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    for (name, parameter), gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient * min(1.0, CLIP / (grad_norm + 1e-6))
        assert gradient.any() or idle in name, f"{directory}: {name} gets no gradient, so it is not tested"
    decay = [p for _, p in parameters if p.dim() > 1]
    others = [p for _, p in parameters if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON).step()
    if routers is not None:
        routers.write_experts(directory.parent)
        routers.move_bias()
    with torch.no_grad():
        next_loss = float(loss(model))
        for (_, parameter), gradient in zip(parameters, gradients, strict=True):
            parameter.copy_(gradient)
    model.save_pretrained(directory)  # under the names that weights have on disk
    return Reference(loss=first.item(), next_loss=next_loss, grad_norm=grad_norm)


def _loss(model: Any) -> Tensor:
    total = torch.zeros(())
    for row, weights in zip(rows(), token_weights(), strict=True):
        log_softmax = torch.log_softmax(model(torch.tensor([row])).logits[0, :-1], -1)
        logprobs = log_softmax.gather(-1, torch.tensor(row[1:])[:, None])[:, 0]
        entropies = -(log_softmax.exp() * log_softmax).sum(-1)
        total = total - (weights * (logprobs + ENTROPY_COEFFICIENT * entropies)).sum()
    return total

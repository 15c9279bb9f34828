"""Critics and reward models of small families, and what transformers computes with them; for payload_heads.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.config import HeadName
from tests.distributed.numerics import LENGTHS, learn, rows, token_weights
from tests.families import AUTO, write_model


@dataclass(frozen=True)
class Case:
    """A model with `head` that starts from a checkpoint of the `stored` kind."""

    family: str
    head: HeadName
    stored: HeadName
    tied: bool = False


CASES = {
    "llama_critic": Case("llama", "critic", "critic", tied=True),
    "llama_new_critic": Case("llama", "critic", "policy", tied=True),
    "qwen3_critic": Case("qwen3", "critic", "reward"),
    "qwen3_reward": Case("qwen3", "reward", "reward", tied=True),
    "qwen3_moe_reward": Case("qwen3_moe", "reward", "reward"),
}

RESUMED = ("llama_critic", "qwen3_moe_reward")
"""Cases of which tp2 writes a checkpoint."""


class Errors(msgspec.Struct):
    """How far one case at one layout is from transformers; gradients, norms and losses relative, outputs absolute.

    `resumed` is that of the next loss after the checkpoint is loaded, where there is one.
    """

    in_loss: float
    outputs: float
    gradient: float
    gradient_name: str
    grad_norm: float
    loss: float
    next_loss: float
    resumed: float | None


def load(directory: Path, head: HeadName) -> Any:
    """As transformers loads it, whole: nothing may be missing or left over."""
    model, report = AUTO[head].from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    return model


def outputs(model: Any, head: HeadName, row: list[int]) -> Tensor:
    """A critic's values before each token but the first, or a reward model's one score."""
    logits = model(torch.tensor([row])).logits[0]
    return logits if head == "reward" else logits[:-1, 0]


def columns(head: HeadName) -> list[dict[str, Tensor]]:
    """Targets and weights in the squared error, for each row."""
    generator = torch.Generator().manual_seed(7)
    if head == "reward":
        return [{"target": torch.randn(1, generator=generator), "weight": torch.full((1,), 1 / 8)} for _ in LENGTHS]
    return [{"target": torch.randn(len(w), generator=generator), "weight": w} for w in token_weights()]


def write_reference(name: str, directory: Path) -> None:
    """The case's checkpoint, and transformers' outputs, losses and gradients for `rows`."""
    case = CASES[name]
    more = {} if case.stored == "policy" else {"num_labels": 1, "pad_token_id": 0}
    write_model(case.family, directory / "model", head=case.stored, tie_word_embeddings=case.tied, **more)
    model = AUTO[case.head].from_pretrained(directory / "model", num_labels=1, attn_implementation="eager").eval()
    with torch.no_grad():
        if case.head == "critic" and case.stored == "policy":
            model.score.weight.zero_()
        if case.head == "critic" and case.stored != "critic":
            model.score.bias.zero_()
        found = torch.cat([outputs(model, case.head, row) for row in rows()])

    def loss(model: Any) -> Tensor:
        parts = [
            (column["weight"] * (outputs(model, case.head, row) - column["target"]).square()).sum()
            for row, column in zip(rows(), columns(case.head), strict=True)
        ]
        return torch.stack(parts).sum()

    # nothing comes back through a head that is zero
    idle = "model." if case.stored == "policy" else "router.bias"
    reference = learn(model, loss, directory / "gradients", idle=idle)
    save_file({"outputs": found}, directory / "outputs.safetensors")
    (directory / "reference.json").write_bytes(msgspec.json.encode(reference))

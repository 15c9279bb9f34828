"""transformers' routers for comparison: what they chose, what they would do with other experts, and their losses."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.config import ExpertBalance


class Routing(msgspec.Struct, frozen=True):
    """What a comparison does with routers; the engine replays `experts` unless the choice is free.

    "chosen" are those that transformers chose itself, "random" others of which some are missing.
    """

    experts: Literal["free", "chosen", "random"] = "free"
    balance_coefficient: float = 0.0
    z_coefficient: float = 0.0
    bias_update_rate: float = 0.0

    @property
    def balance(self) -> ExpertBalance:
        fields = ("balance_coefficient", "z_coefficient", "bias_update_rate")
        return ExpertBalance(**{name: getattr(self, name) for name in fields})

    def write(self, directory: Path) -> None:
        (directory / "routing.json").write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, directory: Path) -> Routing:
        file = directory / "routing.json"
        return msgspec.json.decode(file.read_bytes(), type=cls) if file.exists() else cls()


def read_experts(directory: Path, sequences: int) -> list[Tensor | None]:
    """[inputs, layers, active] of each sequence that are to be replayed."""
    file = directory / "experts.safetensors"
    found = load_file(file) if file.exists() else {}
    return [found.get(str(number)) for number in range(sequences)]


class Routers:
    """Those of one model, watched. Sequences are known by their lengths, which must all be different.

    A sequence's last token counts for nothing here: the engine does not see it.
    """

    def __init__(self, model: Any, lengths: list[int], routing: Routing) -> None:
        self._gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
        self._lengths, self._routing = lengths, routing
        self._seen: dict[int, dict[int, tuple[Tensor, Tensor]]] = {length: {} for length in lengths}
        self._given: dict[int, Tensor] = {}
        if routing.experts == "random":
            self._given = {length: self._random(length) for length in lengths}
        for layer, gate in enumerate(self._gates):
            gate.register_forward_hook(partial(self._route, layer))

    def _random(self, length: int) -> Tensor:
        gate = self._gates[0]
        source = torch.Generator().manual_seed(length)
        order = torch.rand(length, len(self._gates), gate.num_experts, generator=source).argsort(-1)
        given = order[..., : gate.top_k].int()
        given[3::5, ::2] = -1
        given[-2:] = -1
        return given

    def _route(self, layer: int, gate: Any, _: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        logits, weights, experts = output
        if self._given:
            given = self._given[len(logits)][:, layer].long()
            experts = torch.where(given < 0, experts, given)
            weights = _scores(gate, logits).gather(1, experts)
            if getattr(gate, "norm_topk_prob", False):
                weights = weights / weights.sum(-1, keepdim=True)
            weights = weights * getattr(gate, "routed_scaling_factor", 1.0)
        self._seen[len(logits)][layer] = logits[:-1], experts[:-1]
        return logits, weights, experts

    def loss(self) -> Tensor:
        """The routers' losses of the last pass over all sequences, layer by layer and sequence by sequence."""
        total, tokens = torch.zeros(()), sum(length - 1 for length in self._lengths)
        for length, layers in self._seen.items():
            for layer, (logits, experts) in layers.items():
                scores = _scores(self._gates[layer], logits)
                scores = scores / scores.sum(-1, keepdim=True)
                share = _load(experts, logits.shape[1]) / experts.numel()
                even = logits.shape[1] * (share * scores.mean(0)).sum()
                z = logits.logsumexp(-1).square().sum()
                total = total + self._routing.balance_coefficient * even / len(self._lengths)
                total = total + self._routing.z_coefficient * z / tokens
                assert len(logits) == length - 1
        return total

    @torch.no_grad()
    def move_bias(self) -> None:
        """By the load of the last pass over all sequences."""
        for layer, gate in enumerate(self._gates):
            if self._routing.bias_update_rate:
                load = sum(_load(layers[layer][1], gate.num_experts) for layers in self._seen.values())
                gate.e_score_correction_bias += self._routing.bias_update_rate * torch.sign(load.mean() - load)

    def write_experts(self, directory: Path) -> None:
        """What the engine is to replay: without the last tokens' experts, which are free."""
        if self._routing.experts == "chosen":  # from now on also here
            for length, layers in self._seen.items():
                chosen = torch.stack([experts for _, experts in layers.values()], 1).int()
                self._given[length] = torch.cat([chosen, torch.full_like(chosen[:1], -1)])
        if self._given:
            missing = 1 if self._routing.experts == "chosen" else 2
            tensors = {str(i): self._given[n][:-missing].contiguous() for i, n in enumerate(self._lengths)}
            save_file(tensors, directory / "experts.safetensors")


def _scores(gate: Any, logits: Tensor) -> Tensor:
    return logits.sigmoid() if hasattr(gate, "e_score_correction_bias") else logits.softmax(-1)


def _load(experts: Tensor, count: int) -> Tensor:
    return torch.bincount(experts.flatten(), minlength=count).float()

"""Which experts a token goes to: the model's own choice, or that of another engine for the same tokens (replay).

Megatron's router computes scores and probabilities and asks here for the choice. What it cannot see, the micro-batch,
reaches it with the `Packing` that every layer is given, also when a layer is computed again in the backward pass: so a
router never keeps a choice from one forward pass for a later one. Losses of the router, and the counts that move its
correction bias, are of real tokens alone and in units of the global batch. Reads no recipe and talks to no engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.config import ExpertBalance, Experts


@dataclass(frozen=True)
class RoutedTokens:
    """What a router must know of the T tokens of its micro-batch, which are those of all tensor-parallel ranks.

    `experts` are those that a token is to go to, in each of the model's layers that have experts; a negative number
    leaves the choice for this token and layer to the router, and None leaves it all choices. `sequence` numbers the
    micro-batch's sequences, of which there are `sequences`; `length` is the inputs of the token's sequence, on all
    context-parallel ranks, or 0 of padding. The global batch has `batch_sequences` and `batch_tokens` without padding.
    """

    experts: Int[Tensor, "T layers active"] | None
    sequence: Int[Tensor, " T"]
    length: Int[Tensor, " T"]
    sequences: int
    batch_sequences: int
    batch_tokens: int


class Router(TopKRouter):
    """Megatron's router, with choices given or made as the model's family makes them."""

    def __init__(
        self, config: TransformerConfig, pg_collection: Any, *, experts: Experts, balance: ExpertBalance
    ) -> None:
        super().__init__(config, pg_collection)
        self._experts, self._balance = experts, balance
        # the slot of Megatron's own replay, which keeps queues for all models of the process in one place
        self.router_replay = Choice("best" if experts.groups is None else experts.groups.scored_by)
        self.tokens: RoutedTokens | None = None

    def routing(
        self, logits: Float[Tensor, "t 1 experts"], padding_mask: None = None
    ) -> tuple[Float[Tensor, "t experts"], Bool[Tensor, "t experts"]]:
        """Probabilities of the chosen experts, 0 of all others; and which are chosen."""
        tokens, own = self._own(len(logits))
        place = self._experts.layers.index(self.layer_number - 1)
        self.router_replay.given = None if tokens.experts is None else tokens.experts[own, place]
        probabilities, chosen = super().routing(logits)
        if torch.is_grad_enabled() and (self._balance.balance_coefficient or self._balance.z_coefficient):
            loss = self._loss(logits.flatten(0, 1).float(), chosen)
            probabilities = MoEAuxLossAutoScaler.apply(probabilities, loss)
        return probabilities, chosen

    def _own(self, count: int) -> tuple[RoutedTokens, slice]:
        """Tensor-parallel ranks each route an equal part of the tokens."""
        assert self.tokens is not None, "a router is used in a layer that was shown to tell_routers"
        start = self.tp_group.rank() * count
        return self.tokens, slice(start, start + count)

    def _apply_expert_bias(self, routing_map: Bool[Tensor, "t experts"], padding_mask: None = None) -> None:
        """Count what the correction bias is moved by at the end of the global batch; Megatron would count padding."""
        if self.enable_expert_bias and torch.is_grad_enabled():
            tokens, own = self._own(len(routing_map))
            self.local_tokens_per_expert += (routing_map & (tokens.length[own] > 0)[:, None]).sum(0)

    def _loss(self, logits: Float[Tensor, "t experts"], chosen: Bool[Tensor, "t experts"]) -> Float[Tensor, ""]:
        """This rank's part of the losses of this layer.

        z (arXiv 2202.08906, eq. 5): the mean over tokens of logsumexp(logits)^2. Balance (2412.19437, eq. 17): the
        mean over sequences of sum_e f_e P_e, where f_e = experts / active * share of the sequence's tokens that go to
        e, and P_e = mean of the tokens' scores of e, which sum to 1. Both means are over the global batch.
        """
        tokens, own = self._own(len(logits))
        length, sequence = tokens.length[own], tokens.sequence[own]
        real = length > 0
        loss = logits.new_zeros(())
        if self._balance.z_coefficient:
            z = logits.logsumexp(-1).square() * real
            loss = loss + z.sum() * (self._balance.z_coefficient / tokens.batch_tokens)
        if self._balance.balance_coefficient:
            scores = logits.softmax(-1)
            if self.score_function == "sigmoid":
                scores = logits.sigmoid()
                scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
            counts = logits.new_zeros(tokens.sequences, logits.shape[-1])
            counts.index_add_(0, sequence, (chosen & real[:, None]).to(counts.dtype))
            dist.all_reduce(counts, group=self.tp_cp_group)
            each = (scores * counts[sequence]).sum(-1) * real / length.clamp_min(1).square()
            scale = self._experts.count / self._experts.active / tokens.batch_sequences
            loss = loss + each.sum() * (self._balance.balance_coefficient * scale)
        return loss


class Choice:
    """What Megatron asks for each token's experts (moe_utils.py:705): `given` ones where there are, else the best.

    Megatron itself would score a group by its best active // active groups experts, which is neither what DeepSeek-V2
    does nor, unless it happens to be 2, what V3 does.
    """

    def __init__(self, groups_scored_by: Literal["best", "two_best"]) -> None:
        self._counted = {"best": 1, "two_best": 2}[groups_scored_by]
        self.given: Int[Tensor, "t active"] | None = None

    def get_replay_topk(
        self, scores: Float[Tensor, "t experts"], topk: int, num_groups: int | None, group_topk: int | None, _: Any
    ) -> tuple[Float[Tensor, "t active"], Int[Tensor, "t active"]]:
        """Scores and numbers of the chosen experts. The scores may hold a correction bias."""
        experts = self._best(scores.detach(), topk, num_groups, group_topk)
        if self.given is not None:
            given = self.given.to(experts.dtype)
            experts = torch.where((given < 0).any(-1, keepdim=True), experts, given)
        return scores.gather(1, experts), experts

    def _best(
        self, scores: Float[Tensor, "t experts"], active: int, groups: int | None, active_groups: int | None
    ) -> Int[Tensor, "t active"]:
        if groups is not None and active_groups is not None:
            by_group = scores.unflatten(1, (groups, -1))
            best = by_group.topk(self._counted)[0].sum(-1).topk(active_groups)[1]
            out = torch.ones(scores.shape[0], groups, dtype=torch.bool, device=scores.device).scatter(1, best, False)
            scores = by_group.masked_fill(out[..., None], float("-inf")).flatten(1)
        return scores.topk(active)[1]


def tell_routers(model: GPTModel) -> None:
    """Show each router the tokens of the micro-batch whenever its layer is computed."""
    for layer in model.decoder.layers:
        if isinstance(getattr(layer.mlp, "router", None), Router):
            layer.register_forward_pre_hook(_tell, with_kwargs=True)


def _tell(layer: Any, _: Any, arguments: dict[str, Any]) -> None:
    layer.mlp.router.tokens = arguments["packed_seq_params"].routing


def check_choices(choices: Iterable[Int[Tensor, "inputs layers active"]], experts: Experts | None) -> None:
    """Raise ValueError for choices that are not the model's: on a GPU they would end in an error that names nothing."""
    for given in choices:
        if experts is None:
            raise ValueError("a sequence has experts to replay, but the model has none")
        expected = (len(experts.layers), experts.active)
        if given.shape[1:] != expected:
            raise ValueError(
                f"experts to replay are [tokens, layers, active] = {list(given.shape)}, but the model's layers with"
                f" experts and active experts are {list(expected)}"
            )
        ordered = given[(given >= 0).all(-1)].sort(-1)[0]
        if (ordered >= experts.count).any() or (ordered.diff() == 0).any():
            raise ValueError(
                f"experts to replay must be {experts.active} different numbers below {experts.count} for each token and"
                " layer, or negative"
            )

"""The experts of a layer as stacked matrices, which one grouped product multiplies: on a GPU one kernel for all."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class GroupedExperts(MegatronModule):
    """Gated experts, of which this rank has `num_local_experts`, and of each a part of its width F.

    The dispatcher brings the tokens of all ranks that share an expert, and sums what they make of them.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, pg_collection: Any) -> None:
        super().__init__(config=config)
        self._expert_group, self._tensor_group = pg_collection.ep, pg_collection.expt_tp
        self._data_group = pg_collection.expt_dp
        width = config.moe_ffn_hidden_size // self._tensor_group.size()
        self.linear_fc1 = _Stack(num_local_experts, 2 * width, config)
        self.linear_fc2 = _Stack(num_local_experts, config.hidden_size, config, inputs=width)

    def forward(
        self,
        hidden: Float[Tensor, "t hidden"],
        tokens_per_expert: Int[Tensor, " experts"],
        probabilities: Float[Tensor, " t"],
    ) -> tuple[Float[Tensor, "t hidden"], None]:
        """The tokens are in the order of their experts."""
        counts = tokens_per_expert.to(hidden.device)
        gate, up = self.linear_fc1(hidden, counts).chunk(2, -1)
        if (limit := self.config.activation_func_clamp_value) is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        inner = self.config.activation_func(gate) * (up + self.config.glu_linear_offset)
        # the product of a token is linear in its probability, which is cheaper on the narrower side
        output = self.linear_fc2((inner * probabilities[:, None]).type_as(hidden), counts, probabilities)
        return output, None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, ShardedTensor | ShardedTensorFactory]:
        """In the shapes of Megatron's other experts: [experts, 2 F of all ranks, hidden], all gates first."""
        rank, size = self._tensor_group.rank(), self._tensor_group.size()
        whole_axes = len(sharded_offsets)
        replica = (0, 0, self._data_group.rank())

        def shard(key: str, tensor: Tensor, *split: tuple[int, int, int]) -> ShardedTensor:
            experts = (whole_axes, self._expert_group.rank(), self._expert_group.size())
            own = ((whole_axes + axis, place, parts) for axis, place, parts in split)
            return ShardedTensor.from_rank_offsets(key, tensor, *sharded_offsets, experts, *own, replica_id=replica)

        def halves(key: str, tensor: Tensor, *_: Any) -> list[ShardedTensor]:
            pair = enumerate(tensor.chunk(2, 1))
            return [shard(key, half.detach().contiguous(), (1, index * size + rank, 2 * size)) for index, half in pair]

        state: dict[str, ShardedTensor | ShardedTensorFactory] = {}
        for name, parameter in self.named_parameters():
            key = prefix + name  # with the parameter itself, by which the optimizer finds its states' place
            if name.startswith("linear_fc1"):
                merge = lambda parts: torch.cat(parts, 1)  # noqa: E731
                state[key] = ShardedTensorFactory(key, parameter, halves, merge, replica)
            elif name.endswith("weight"):
                state[key] = shard(key, parameter, (2, rank, size))
            else:
                state[key] = shard(key, parameter)
        return state


class _Stack(torch.nn.Module):
    """One matrix [out, in] for each expert, and a bias [out] where the family has them."""

    def __init__(self, experts: int, outputs: int, config: TransformerConfig, inputs: int | None = None) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        size = (experts, outputs, inputs or config.hidden_size)
        self.weight = torch.nn.Parameter(torch.empty(size, dtype=config.params_dtype, device=device))
        self.bias: torch.nn.Parameter | None = None
        if config.add_bias_linear:
            self.bias = torch.nn.Parameter(torch.empty(size[:2], dtype=config.params_dtype, device=device))
        for parameter in self.parameters():
            # not to be summed over the data-parallel ranks of other parameters, but over those that have these experts:
            # Megatron's own experts (layers.py:886) say so only where expert > 1, and at tensor > expert_tensor their
            # gradients stay unsummed
            parameter.allreduce = False  # type: ignore[attr-defined]
            # copies on tensor-parallel ranks are data-parallel ones, each with its own part of the gradient
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(
        self,
        tokens: Float[Tensor, "t in"],
        counts: Int[Tensor, " experts"],
        bias_scale: Float[Tensor, " t"] | None = None,
    ) -> Float[Tensor, "t out"]:
        output = F.grouped_mm(tokens, self.weight.transpose(1, 2), offs=counts.cumsum(0).int())
        if self.bias is None:
            return output
        bias = self.bias.repeat_interleave(counts, 0, output_size=len(tokens))
        return output + (bias if bias_scale is None else (bias * bias_scale[:, None]).type_as(output))

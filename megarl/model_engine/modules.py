"""Modules that stand in for Megatron's fused ones, on GPUs without TransformerEngine as on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor that Megatron calls.

    Where tensor-parallel ranks each norm a part of the tokens, Megatron sums the gradients of marked parameters.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class UnitRMSNorm(RMSNorm):
    """Multiplies by 1 + weight, in float32 (Gemma)."""

    def forward(self, x: Tensor) -> Tensor:
        return (F.rms_norm(x.float(), self.normalized_shape, eps=self.eps) * (1.0 + self.weight.float())).type_as(x)


class PostNormAdd(torch.nn.Module):
    """In place of bias, dropout and addition: the block's output is normed before it is added (Gemma)."""

    def __init__(self, config: TransformerConfig, norm: type[RMSNorm]) -> None:
        super().__init__()
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, Any], Tensor, float], Tensor]:
        """What Megatron asks for at each call: a function of (output, bias), residual and dropout."""
        return lambda output, residual, _: residual + self.norm(output[0])


class WindowRopeLayer(TransformerLayer):
    """A layer of a model whose windowed layers have a rope of their own: it gets both, one after the other."""

    def forward(self, *arguments: Any, rotary_pos_emb: Tensor, **others: Any) -> Any:
        everywhere, windowed = rotary_pos_emb.chunk(2, -1)
        own = windowed if self.self_attention.core_attention.window is not None else everywhere
        return super().forward(*arguments, rotary_pos_emb=own, **others)


class LatentSelfAttention(MLASelfAttention):
    """Multi-head latent attention whose gradients are right on several tensor-parallel ranks, too.

    All heads share the key's rope part. Megatron 0.16.1 gathers it in a way (multi_latent_attention.py:607) whose
    backward pass keeps of its gradient what this rank's heads gave. Here the projection gives each rank its part of the
    tokens, and Megatron gathers these with a backward pass that sums.
    """

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        # afterwards, since it compares the class that it builds with those it knows
        self.linear_kv_down_proj.__class__ = _ScatteredOutput


class _ScatteredOutput(ColumnParallelLinear):
    def forward(self, *arguments: Any, **others: Any) -> tuple[Tensor, Any]:
        output, bias = super().forward(*arguments, **others)
        if self.tp_group.size() == 1:
            return output, bias
        return scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(output)), bias


class HiddenOutput(ColumnParallelLinear):
    """An output layer that keeps its weight and leaves the projection to the loss, which does it in chunks.

    The gradient that comes back for the hidden states is each rank's part; going back through here sums the parts.
    """

    def forward(self, input_: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """[T / tensor ranks, 1, H] to [T, 1, H] on every tensor-parallel rank."""
        if self.sequence_parallel:
            whole = gather_from_sequence_parallel_region(input_, tensor_parallel_output_grad=True, group=self.tp_group)
        else:
            whole = copy_to_tensor_model_parallel_region(input_, group=self.tp_group)
        return whole, None


class ScalarOutput(MegatronModule):
    """An output layer of one row: a float32 value at each token, on every tensor-parallel rank.

    Each rank has the whole row and makes the values of its part of the tokens. All ranks go on to the same loss, so
    that the gathering's backward pass only hands out parts; Megatron sums the gradients of the marked parameters.
    """

    def __init__(self, config: TransformerConfig, *, bias: bool) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=config.params_dtype)) if bias else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, input_: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """[T / tensor ranks, 1, H] to [T, 1, 1]."""
        values = F.linear(input_.float(), self.weight.float(), None if self.bias is None else self.bias.float())
        if self.config.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None

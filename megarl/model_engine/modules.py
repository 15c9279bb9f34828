"""Modules that stand in for Megatron's fused ones, on GPUs without TransformerEngine as on CPUs."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor that Megatron calls.

    Where tensor-parallel ranks each norm a part of the tokens, Megatron sums the gradients of marked parameters.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


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

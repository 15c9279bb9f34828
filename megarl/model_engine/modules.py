"""Modules that stand in for Megatron's fused ones, on GPUs without TransformerEngine as on CPUs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor that Megatron calls."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


class CausalAttention(MegatronModule):
    """Causal scaled-dot-product attention with grouped queries.

    Sequences are padded on the right, so causality alone keeps padding out of every real token.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale

    def forward(
        self,
        query: Float[Tensor, "T B heads D"],
        key: Float[Tensor, "T B kv_heads D"],
        value: Float[Tensor, "T B kv_heads D"],
        attention_mask: None = None,
        **_: Any,
    ) -> Float[Tensor, "T B H"]:
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self._scale, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)

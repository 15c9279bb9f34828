"""SGLang plugin for development on a CPU only: one attention call for a whole decoding batch.

SGLang's torch_native backend decodes sequence by sequence, some twenty small operations each; with many short sequences
that is half of all the time an engine takes. Here sequences of like length are padded to one another and attended to at
once, so that a step's time follows the number of cached tokens, however their lengths differ. SGLang finds this plugin
by its entry point and puts it around its own function, which still does what this one does not: encoders, cross
attention, sliding windows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

TARGET = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_decode"
PADDING = 300
"""Tokens: padding sequences to one another costs less than a further call as long as it is no more than this."""


def register() -> None:
    """Called by SGLang when it loads its plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, decode, HookType.AROUND)


def decode(
    original: Callable[..., Tensor],
    backend: Any,
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    encoder_lens: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attention of one new token of each sequence to its cached tokens.

    query, output: [sequence, head, dim]; caches: [slot, kv_head, dim]; req_to_token: [request, position] -> slot.
    """
    if encoder_lens is not None or options.get("is_cross_attn") or options.get("sliding_window_size") is not None:
        return original(
            backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens, **options
        )
    kv_heads = k_cache.shape[1]
    lengths_sorted, order = seq_lens.sort(descending=True)
    for rows in order.split(_alike(lengths_sorted.tolist())):
        lengths = seq_lens[rows]
        longest = int(lengths[0])
        valid = torch.arange(longest) < lengths[:, None]
        # beyond a sequence's end the table holds slots of others; slot 0 is SGLang's own padding
        slots = req_to_token[req_pool_indices[rows], :longest] * valid
        # query heads of a group share a key-value head: to the attention they are so many query positions
        grouped = query[rows].unflatten(1, (kv_heads, -1))
        result = scaled_dot_product_attention(
            grouped,
            k_cache[slots].transpose(1, 2).to(query.dtype),
            v_cache[slots].transpose(1, 2).to(query.dtype),
            attn_mask=valid[:, None, None, :],
            scale=options.get("scaling"),
        )
        output[rows] = result.flatten(1, 2)
    return output


def _alike(lengths: list[int]) -> list[int]:
    """Sizes of runs of descending lengths whose padding to their longest is at most `PADDING` tokens."""
    sizes, longest, padding = [0], lengths[0], 0
    for length in lengths:
        padding += longest - length
        if padding > PADDING:
            sizes.append(0)
            longest, padding = length, 0
        sizes[-1] += 1
    return sizes

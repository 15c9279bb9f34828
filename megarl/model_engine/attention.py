"""Packed sequences in Megatron: where each token belongs, rotary positions by token, attention within each sequence.

The sequences of a micro-batch lie one after the other in a single row, and each context-parallel rank has its part of
every sequence. Megatron is shown a plain batch of one row. What it does not know travels in a `Packing`, which it
hands from the model to every attention layer, also when it recomputes one in the backward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Sequences of like length that are attended to in one call; rows are padded at their end.

    `queries` index this rank's tokens, `keys` the tokens of all context-parallel ranks, one rank after the other.
    """

    queries: Int[Tensor, "B Lq"]
    keys: Int[Tensor, "B Lk"]
    query_positions: Int[Tensor, "B Lq"]

    def to(self, device: torch.device) -> Block:
        return Block(self.queries.to(device), self.keys.to(device), self.query_positions.to(device))


@dataclass
class Packing(PackedSeqParams):
    """`positions` [T] of this rank's tokens in their sequences; `order` [T] finds them in the blocks' outputs.

    `routing` is what routers must know of the tokens.
    """

    positions: Any = None
    blocks: Any = None
    order: Any = None
    routing: Any = None

    def to(self, device: torch.device) -> Packing:
        blocks = [block.to(device) for block in self.blocks]
        return replace(self, positions=self.positions.to(device), blocks=blocks, order=self.order.to(device))


def pack(lengths: Sequence[int], *, rank: int, size: int) -> Packing:
    """Lay out sequences of `lengths` tokens for context-parallel rank `rank` of `size`.

    Each rank has two of the 2 x size equal chunks of every sequence, one from either end, so that all have the same
    causal attention to compute ("zigzag"). Lengths must therefore be multiples of 2 x size where size > 1.
    """
    parts = [_Part(length, rank, size) for length in lengths]
    starts = list(itertools.accumulate((part.tokens for part in parts), initial=0))
    local = starts.pop()
    by_width: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_width.setdefault(_width(length), []).append(index)
    blocks, places, outputs = [], [torch.empty(0, dtype=torch.long)] * len(parts), 0
    for indices in by_width.values():
        keys = _pad([parts[i].keys(starts[i], local) for i in indices])
        queries = _pad([starts[i] + torch.arange(parts[i].tokens) for i in indices])
        positions = _pad([parts[i].positions for i in indices])
        for row, i in enumerate(indices):
            places[i] = outputs + row * queries.shape[1] + torch.arange(parts[i].tokens)
        outputs += queries.numel()
        blocks.append(Block(queries, keys, positions))
    return Packing(positions=torch.cat([part.positions for part in parts]), blocks=blocks, order=torch.cat(places))


class _Part:
    """One rank's chunks of a sequence."""

    def __init__(self, length: int, rank: int, size: int) -> None:
        assert size == 1 or length % (2 * size) == 0, f"{length} tokens cannot be divided into {2 * size} chunks"
        chunks = torch.arange(length).chunk(2 * size) if size > 1 else (torch.arange(length),)
        self._owners = [min(i, 2 * size - 1 - i) for i in range(len(chunks))]
        self._chunks, self.tokens = chunks, length // size
        self.positions: Int[Tensor, " T"] = torch.cat(
            [c for c, owner in zip(chunks, self._owners, strict=True) if owner == rank]
        )

    def keys(self, start: int, local: int) -> Int[Tensor, " L"]:
        """Where the whole sequence lies, in its order, among the tokens of all ranks, each of which has `local`."""
        seen: dict[int, int] = {}
        places = []
        for chunk, owner in zip(self._chunks, self._owners, strict=True):
            offset = seen.get(owner, 0)
            places.append(owner * local + start + offset + torch.arange(len(chunk)))
            seen[owner] = offset + len(chunk)
        return torch.cat(places)


def _width(length: int) -> int:
    """Lengths of one width share a block: four widths to an octave, so that 7 tokens or a fifth are padding at most."""
    step = max(8, 1 << max(length.bit_length() - 3, 0))
    return -(-length // step) * step


def _pad(rows: list[Tensor]) -> Tensor:
    """Rows repeat their last value: as keys these lie behind every true query of their sequence."""
    width = max(len(row) for row in rows)
    return torch.stack([torch.cat([row, row[-1:].expand(width - len(row))]) for row in rows])


class PackedRope(torch.nn.Module):
    """Rotary frequencies for the tokens of a `Packing`, from Megatron's embeddings of any kind."""

    def __init__(self, embeddings: list[Any], max_positions: int, *, latent: bool = False) -> None:
        """Those of several embeddings come one after the other, for layers that choose among them.

        Multi-head latent attention drops the dimension of the batch before it rotates.
        """
        super().__init__()
        self._embeddings, self._max_positions, self._latent = embeddings, max_positions, latent
        self._table: Any = None
        self._factor: list[float] = []

    def get_rotary_seq_len(self, *arguments: Any) -> Int[Tensor, " T"]:
        """What Megatron hands on to `forward`: instead of a length, the position of each token."""
        return arguments[-1].positions

    def forward(self, positions: Int[Tensor, " T"], **_: Any) -> Any:
        """[T, 1, 1, D], or [T, 1, D] where `latent`; of YaRN also the factor of queries and keys."""
        if self._table is None:
            found = [embedding.get_emb(self._max_positions) for embedding in self._embeddings]
            tables, self._factor = [table for table in found if torch.is_tensor(table)], []
            if not tables:
                ((table, factor),) = found
                tables, self._factor = [table], [factor]
            self._table = torch.cat(tables, -1).to(positions.device)
        rows = self._table[positions.clamp_max(self._max_positions - 1)]  # padding may lie beyond
        rows = rows.squeeze(1) if self._latent else rows
        return (rows, *self._factor) if self._factor else rows


class PackedAttention(MegatronModule):
    """Causal scaled-dot-product attention within the sequences of a `Packing`.

    Grouped queries, key and value heads of different sizes, sliding windows, attention sinks, context parallelism (each
    rank gathers all keys and values; the backward pass sums and scatters their gradients).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *_: Any,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **__: Any,
    ) -> None:
        super().__init__(config=config)
        self._context, self._tensor = pg_collection.cp, pg_collection.tp
        self._scale = softmax_scale if softmax_scale is not None else config.softmax_scale
        self.window: int | None = None  # keys that a query sees, its own included
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            self.window = config.window_size[0] + 1
        # Megatron's name for the logits of the sinks
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // self._tensor.size()
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))

    def forward(
        self,
        query: Float[Tensor, "T *1 heads D"],
        key: Float[Tensor, "T *1 kv_heads D"],
        value: Float[Tensor, "T *1 kv_heads Dv"],
        attention_mask: None = None,
        *,
        packed_seq_params: Packing,
        **_: Any,
    ) -> Float[Tensor, "T 1 H"]:
        query, key, value = (x.reshape(-1, *x.shape[-2:]) for x in (query, key, value))
        if self._context.size() > 1:
            key, value = (
                gather_from_sequence_parallel_region(
                    x.contiguous(), tensor_parallel_output_grad=True, group=self._context
                )
                for x in (key, value)
            )
        outputs = [self._attend(query, key, value, block) for block in packed_seq_params.blocks]
        return torch.cat(outputs)[packed_seq_params.order].flatten(1)[:, None]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> Float[Tensor, "rows heads Dv"]:
        q = query[block.queries].transpose(1, 2)
        k, v = (x[block.keys].transpose(1, 2) for x in (key, value))
        plain = self.window is None and self._context.size() == 1 and self.softmax_offset is None
        mask = None if plain else self._visible(block)
        if self.softmax_offset is not None:
            k, v, mask = self._with_sinks(k, v, self._visible(block))
        if q.is_cuda and (mask is not None or q.dtype is torch.float32):
            # flash attention takes neither, and torch's other kernel that never holds all scores takes no groups
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self._scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).flatten(0, 1)

    def _visible(self, block: Block) -> Bool[Tensor, "B 1 Lq Lk"]:
        keys = torch.arange(block.keys.shape[1], device=block.keys.device)
        queries = block.query_positions[:, None, :, None]
        visible = keys <= queries
        return visible if self.window is None else visible & (keys > queries - self.window)

    def _with_sinks(self, key: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A sink is one more key, whose logit is the head's parameter and whose value is nothing."""
        assert self.softmax_offset is not None
        bias = torch.zeros_like(visible, dtype=key.dtype).masked_fill(~visible, float("-inf"))
        rows, _, queries, keys = bias.shape
        heads = len(self.softmax_offset)
        sinks = self.softmax_offset.to(key.dtype).view(1, heads, 1, 1).expand(rows, heads, queries, 1)
        key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
        return key, value, torch.cat([bias.expand(rows, heads, queries, keys), sinks], -1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """The sinks are divided among tensor-parallel ranks as the heads are."""
        state = self.state_dict(prefix="", keep_vars=True)
        group = None if metadata is None else metadata["dp_cp_group"]
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {"softmax_offset": 0}, sharded_offsets, tp_group=self._tensor, dp_cp_group=group
        )

"""How many parameters each rank holds: exact, stage by stage (tests compare it with Megatron's own modules)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

from megarl.config import Layout
from megarl.layout.model import Decoder


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: how many layers of each of the decoder's kinds, and whether it begins or ends the model."""

    layers: tuple[int, ...]
    first: bool
    last: bool


@dataclass(frozen=True)
class Held:
    """Parameters of one rank. Data-parallel ranks repeat those of `dense`, expert-data-parallel ones `experts`."""

    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


@cache
def stages(decoder: Decoder, pipeline: int, interleave: int = 1, listed: tuple[int, int] = (0, 0)) -> tuple[Stage, ...]:
    """The layers of each stage, whose parts take turns: part v of stage p is the (v x pipeline + p)-th.

    Layers that cannot be divided evenly are spread so that the last parts, then the first, have fewer: they hold the
    output and the embedding as well. `listed` of those are items before and behind the layers in the list that is
    divided instead (DeepSpeed's uniform partition: the first parts have one more).
    """
    parts = pipeline * interleave
    sizes = part_sizes(decoder.layers, parts)
    if parts > 1 and any(listed):
        size, rest = divmod(decoder.layers + sum(listed), parts)
        sizes = [size + (part < rest) for part in range(parts)]
        sizes[0], sizes[-1] = sizes[0] - listed[0], sizes[-1] - listed[1]
    kinds: list[Counter[int]] = [Counter() for _ in range(pipeline)]
    start = 0
    for part, size in enumerate(sizes):
        kinds[part % pipeline].update(decoder.order[start : start + size])
        start += size
    return tuple(
        Stage(tuple(kinds[stage][kind] for kind in range(len(decoder.kinds))), stage == 0, stage == pipeline - 1)
        for stage in range(pipeline)
    )


def part_sizes(layers: int, parts: int) -> list[int]:
    """Layers of each part of the model, in order; the last and the first are the smaller ones."""
    size, missing = -(-layers // parts), -layers % parts
    sizes = [size] * parts
    for i in range(missing):  # from both ends inwards, the end first
        sizes[-1 - i // 2 if i % 2 == 0 else i // 2] -= 1
    return sizes


@cache
def held(decoder: Decoder, layout: Layout, stage: Stage) -> Held:
    """Parameters of each rank of `stage`. With tied embeddings the last stage of several holds a copy."""
    tensor, table = layout.tensor, decoder.padded_vocab(layout.tensor) // layout.tensor * decoder.hidden
    dense = sum(n * kind.parameters(tensor) for n, kind in zip(stage.layers, decoder.kinds, strict=True))
    experts = sum(
        n * kind.expert_parameters(layout.expert, layout.expert_tensor)
        for n, kind in zip(stage.layers, decoder.kinds, strict=True)
    )
    if stage.first:
        dense += table + decoder.embedding_extra
    if stage.last:
        dense += decoder.final_norm + decoder.head
        if not decoder.head and not (decoder.tied and stage.first):
            dense += table
    return Held(dense, experts)

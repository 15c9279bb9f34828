"""Which rank does what: pure arithmetic on the world size and the recipe's layout."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.recipe import Layout


@dataclass(frozen=True)
class TrainPlace:
    """A rank's coordinates in the training layout (zero-based)."""

    tensor: int
    pipeline: int
    data: int


def train_place(rank: int, world: int, layout: Layout) -> TrainPlace:
    """Megatron's order: tensor-parallel ranks are neighbours, then data-parallel, then pipeline stages."""
    data_size = world // (layout.tensor * layout.pipeline)
    return TrainPlace(
        tensor=rank % layout.tensor,
        data=rank // layout.tensor % data_size,
        pipeline=rank // (layout.tensor * data_size),
    )


def engine_leaders(world: int, tensor_parallel: int) -> list[int]:
    """The rank that starts and owns each engine: the first of each rollout tensor-parallel group."""
    return list(range(0, world, tensor_parallel))

"""Which rank does what: pure arithmetic on ranks and the recipe's layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megarl.config.recipe import Layout
from megarl.config.reward import RewardEngine


@dataclass(frozen=True)
class TrainPlace:
    """A rank's coordinates in the training layout (zero-based)."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int
    expert_tensor: int


def train_place(rank: int, world: int, layout: Layout) -> TrainPlace:
    """Megatron's order: tensor-parallel ranks are neighbours, then context, data-parallel, and pipeline stages.

    Within a stage the experts have an order of their own: expert-tensor-parallel ranks are neighbours, then expert.
    """
    data_size = world // layout.model_ranks
    in_stage = rank % (world // layout.pipeline)
    rank, tensor = divmod(rank, layout.tensor)
    rank, context = divmod(rank, layout.context)
    pipeline, data = divmod(rank, data_size)
    return TrainPlace(
        tensor=tensor,
        context=context,
        data=data,
        pipeline=pipeline,
        expert=in_stage // layout.expert_tensor % layout.expert,
        expert_tensor=in_stage % layout.expert_tensor,
    )


def engine_leaders(ranks: range, tensor_parallel: int) -> list[int]:
    """The rank that starts and owns each engine, `ranks` being those that roll out: the first of its own."""
    return list(ranks[::tensor_parallel])


def scorer_leaders(ranks: range, engines: Mapping[str, RewardEngine]) -> dict[str, int]:
    """The rank that starts each reward model's engine, by source: from the last of `ranks` on, and again."""
    leaders = [engine_leaders(ranks, engine.tensor_parallel) for engine in engines.values()]
    return {name: firsts[-1 - i % len(firsts)] for i, (name, firsts) in enumerate(zip(engines, leaders, strict=True))}

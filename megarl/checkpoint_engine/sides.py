"""The two sides of a reshard plan: which rank of the trainer, and which rank of an engine, holds which parameter.

Only arithmetic on ranks; `plan` joins the two sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.config import Layout, ModelShape, train_place
from megarl.weights import Box, EngineLayout, Parameter, Replicated

Ints = NDArray[np.int64]
Table = NDArray[Any]
"""Of named integer columns."""


def integers(*names: str) -> np.dtype[Any]:
    return np.dtype([(name, np.int64) for name in names])


BOX = integers("split", *Box._fields)
"""A box of shard `split`."""


def box_table(boxes: Iterable[Sequence[Box]]) -> Table:
    """BOX rows of the boxes of each shard."""
    return np.array([(split, *box) for split, some in enumerate(boxes) for box in some], dtype=BOX)


Relay = tuple[tuple[int, int], ...]
"""A round: numbers of engines that have a bucket, each with that of the engine to which it passes the bucket on."""


class PlanError(ValueError):
    """There is no plan for these layouts, or a plan is wrong."""


@dataclass(frozen=True)
class Training:
    """The model is trained on ranks 0 to `world` - 1."""

    layout: Layout
    world: int


@dataclass(frozen=True)
class Engines:
    """Rollout engines of one layout: rank t of engine e runs on the GPU of rank `ranks[e][t]` of the whole job.

    The experts are divided among `expert` groups of neighbouring ranks, and split over the ranks of a group.
    """

    ranks: tuple[tuple[int, ...], ...]
    expert: int = 1

    @property
    def tensor(self) -> int:
        return len(self.ranks[0])

    @property
    def expert_tensor(self) -> int:
        return self.tensor // self.expert

    def spread(self, count: int) -> tuple[int, ...]:
        """The numbers of so many engines, evenly over all."""
        return tuple(len(self.ranks) * number // count for number in range(count))

    def relays(self, heads: Sequence[int]) -> tuple[Relay, ...]:
        """Each of `heads` is the first of those up to the next; each round doubles how many of them have a bucket."""
        rounds: list[list[tuple[int, int]]] = []
        for first, stop in zip(heads, (*heads[1:], len(self.ranks)), strict=True):
            for number in range(1, stop - first):
                before = number.bit_length() - 1
                if before == len(rounds):
                    rounds.append([])
                rounds[before].append((first + number - (1 << before), first + number))
        return tuple(map(tuple, rounds))


class Home(NamedTuple):
    """The pipeline stages with a parameter; of an expert also its expert-parallel rank in the trainer and in an engine.

    A tied embedding is on the first stage and the last.
    """

    stages: tuple[int, ...]
    expert: int | None
    engine_expert: int | None


class Kind(NamedTuple):
    """What decides how a parameter is cut on both sides. `item_bytes`: of an element."""

    layout: EngineLayout
    engine_layout: EngineLayout
    shapes: tuple[tuple[int, ...], ...]
    of_expert: bool
    item_bytes: int


class Sides:
    """Both sides of one model. Raises PlanError: sizes that do not divide what they must."""

    def __init__(self, shape: ModelShape, training: Training, engines: Engines, item_bytes: int) -> None:
        _check_sizes(shape, training, engines)
        self._shape, self._layout, self._engines, self._item_bytes = shape, training.layout, engines, item_bytes
        self.engine_ranks: Ints = np.array(engines.ranks, dtype=np.int64)
        self.ranks = max(training.world, int(self.engine_ranks.max()) + 1)
        places = [train_place(rank, training.world, training.layout) for rank in range(training.world)]
        self._places: dict[str, Ints] = {name: np.array([getattr(x, name) for x in places]) for name in _COORDINATES}

    def kind(self, parameter: Parameter) -> Kind:
        """Raises PlanError: it is not known how an engine holds the parameter."""
        layout, engine_layout = parameter.layout, parameter.engine_layout
        if parameter.engine is None or not (
            isinstance(layout, EngineLayout) and isinstance(engine_layout, EngineLayout)
        ):
            raise PlanError(f"{parameter.megatron}: where an engine holds it is not known")
        item = 4 if parameter.float32 else self._item_bytes
        return Kind(layout, engine_layout, parameter.hf_shapes, parameter.expert is not None, item)

    def home(self, parameter: Parameter) -> Home:
        layout, last = self._layout, self._layout.pipeline - 1
        if parameter.layer is not None:
            in_part = self._shape.layers // (layout.pipeline * layout.interleave)
            stages: tuple[int, ...] = (parameter.layer // in_part % layout.pipeline,)
        elif parameter.last_stage:
            stages = (last,)
        else:
            stages = (0, last) if self._shape.tied and last else (0,)
        if parameter.expert is None:
            return Home(stages, None, None)
        assert self._shape.experts is not None
        return Home(
            stages,
            parameter.expert // (self._shape.experts.count // layout.expert),
            parameter.expert // (self._shape.experts.count // self._engines.expert),
        )

    def slot(self, parameter: Parameter) -> int | None:
        """Of an expert, its number in an engine rank's stack."""
        if parameter.expert is None:
            return None
        assert self._shape.experts is not None
        return parameter.expert % (self._shape.experts.count // self._engines.expert)

    def source_split(self, kind: Kind) -> int:
        """Ranks over which the trainer splits it; 1: those of a group all hold the whole."""
        if isinstance(kind.layout, Replicated):
            return 1
        return self._layout.expert_tensor if kind.of_expert else self._layout.tensor

    def target_split(self, kind: Kind) -> int:
        return self._engines.expert_tensor if kind.of_expert else self._engines.tensor

    def held(self, kind: Kind, home: Home) -> Ints:
        """For each rank of the job, which of the `source_split` shards it holds; -1: none."""
        place = self._places
        index = place["expert_tensor" if kind.of_expert else "tensor"] % self.source_split(kind)
        here = np.isin(place["pipeline"], home.stages)
        if home.expert is not None:
            here &= place["expert"] == home.expert
        held = np.full(self.ranks, -1, dtype=np.int64)
        held[: len(here)] = np.where(here, index, -1)
        return held

    def targets(self, kind: Kind, home: Home) -> Ints:
        """(engines, target_split): the ranks of the job that need each shard."""
        split = self.target_split(kind)
        first = 0 if home.engine_expert is None else home.engine_expert * split
        return self.engine_ranks[:, first : first + split]


_COORDINATES = ("tensor", "pipeline", "expert", "expert_tensor")


def _check_sizes(shape: ModelShape, training: Training, engines: Engines) -> None:
    layout, flat = training.layout, [rank for ranks in engines.ranks for rank in ranks]
    stage = training.world // layout.pipeline
    experts = 0 if shape.experts is None else shape.experts.count
    wrong: dict[str, Any] = {
        f"{training.world} ranks by {layout.model_ranks}": training.world % layout.model_ranks,
        f"{shape.layers} layers into {layout.pipeline} x {layout.interleave} parts": shape.layers
        % (layout.pipeline * layout.interleave),
        f"{stage} ranks of a stage into expert {layout.expert} x {layout.expert_tensor}": stage
        % (layout.expert * layout.expert_tensor),
        f"{experts} experts by {layout.expert} of the trainer": experts % layout.expert,
        f"{experts} experts by {engines.expert} of an engine": experts % engines.expert,
        f"an engine's {engines.tensor} ranks by {engines.expert}": engines.tensor % engines.expert,
    }
    for what, rest in wrong.items():
        if rest:
            raise PlanError(f"cannot divide {what}")
    if len({len(ranks) for ranks in engines.ranks}) > 1 or len(set(flat)) < len(flat):
        raise PlanError(f"engines need as many ranks each, and no rank twice: {engines.ranks}")

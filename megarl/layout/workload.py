"""What a step of a recipe asks of a layout: sequences to learn from, passes over them, responses to generate before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, TypeVar, get_args

from megarl.config import AnyRecipe, Critic, ModelShape, RewardModelRecipe, RlRecipe
from megarl.data import plan_microbatches
from megarl.simulator import LengthModel, Workload

T = TypeVar("T")
WorkStage = Literal["sft", "grpo", "ppo"]
WORK_STAGES: tuple[WorkStage, ...] = get_args(WorkStage)

MOST_RANKS, MOST_A_RANK = 16, 64
"""Data-parallel ranks, and sequences of each, of which a share of the step's is divided to see how evenly that goes."""


@dataclass(frozen=True)
class Rollouts:
    """The responses of a step, and how they are generated (as in recipes: `rollout`, `mode`)."""

    groups: Workload
    policy: str = "context"
    chunk_tokens: int | None = None
    weight_bytes: int = 2
    value_bytes: int = 2
    """Of a number in the cache."""
    max_lag: int = 0
    interrupt: bool = False
    ask: int | None = None

    @property
    def ahead(self) -> int:
        """Groups under way, waiting or in training at once."""
        return self.ask or (self.max_lag + 1) * len(self.groups.groups)


@dataclass(frozen=True)
class Work:
    """`lengths` are tokens of a step's sequences, prompts included. They are learned from in `updates` parts.

    Before that, `scored` forward passes of models of the policy's size go over all of them, `frozen` of these models
    lie beside the policy, and so does the `critic`, which learns as often.
    """

    lengths: tuple[int, ...]
    linear: float
    """Tokens of a sequence for which attention's pairs cost as much as all else."""
    updates: int = 1
    epochs: int = 1
    scored: int = 0
    frozen: int = 0
    critic: bool = False
    rollouts: Rollouts | None = None

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def sequence(self) -> float:
        """Tokens of sequences of equal length that have as many pairs for attention."""
        return sum(length * length for length in self.lengths) / self.tokens

    def divided(self, ranks: int, max_tokens: int) -> Division:
        """One update's sequences on data-parallel ranks, in micro-batches of `max_tokens`."""
        count = len(self.lengths) * self.epochs // self.updates
        return _divided(self.lengths[:count], ranks, max_tokens, self.linear)


@dataclass(frozen=True)
class Division:
    """`micro_batches` of each rank, the tokens of the largest, and what the busiest rank has to do over the mean."""

    micro_batches: int
    largest: int
    imbalance: float


@cache
def _divided(lengths: tuple[int, ...], ranks: int, max_tokens: int, linear: float) -> Division:
    """As the trainer divides them; of many ranks, or of many sequences, a share with its share of the other."""
    some = min(ranks, MOST_RANKS)
    each = len(lengths) / ranks
    chosen = lengths[: max(some, round(some * min(each, MOST_A_RANK)))]

    def cost(length: int) -> float:
        return length * (1 + length / linear)

    plan = plan_microbatches(chosen, max_tokens=max_tokens, ranks=some, cost=cost)
    work = [sum(cost(chosen[i]) for batch in rank for i in batch) for rank in plan]
    largest = max(sum(chosen[i] for i in batch) for rank in plan for batch in rank)
    count = max(1, round(len(plan[0]) * each / (len(chosen) / some)))
    return Division(count, largest, max(work) * some / sum(work))


DEMONSTRATION = 2048


@dataclass(frozen=True)
class Lengths:
    """Tokens that are not in a recipe: of prompts, and of responses on average, or of sequences of demonstrations.

    Responses are log-normal, with spreads of the logarithm as in `LengthModel`.
    """

    prompt: int = 512
    mean: float | None = None
    """None: half of the longest response, or a demonstration of 2,048."""
    between: float = 0.6
    within: float = 0.4
    seed: int = 0

    def responses(self, cap: int, groups: int, size: int) -> Workload:
        """Raises ValueError: no lengths below the cap have this mean."""
        mean = cap / 2 if self.mean is None else self.mean
        return LengthModel(mean, cap, self.between, self.within, groups, size, self.prompt).draw(self.seed)

    def sequences(self, most: int, count: int) -> tuple[int, ...]:
        """Of demonstrations, each a group of its own, and at most four times the mean."""
        mean = self.mean or DEMONSTRATION
        drawn = replace(self, prompt=0, mean=mean).responses(min(most, round(4 * mean)), count, 1)
        return tuple(length for group in drawn.groups for length in group.lengths)


def work_of(recipe: AnyRecipe, lengths: Lengths, shape: ModelShape, groups: Workload | None = None) -> Work:
    """A step of `recipe`; of `groups`, measured lengths, it takes as many as it needs, again from the first."""
    linear = shape.active_parameters / (shape.layers * shape.heads * shape.head_dim)
    if not isinstance(recipe, RlRecipe):
        count = 2 * recipe.batch.pairs if isinstance(recipe, RewardModelRecipe) else recipe.batch.sequences
        if groups is not None:
            known = [group.prompt + length for group in groups.groups for length in group.lengths]
            return Work(tuple(_repeated(known, count)), linear)
        return Work(lengths.sequences(shape.max_positions, count), linear)
    cap, size = recipe.rollout.max_new_tokens, recipe.batch.group_size
    if groups is None:
        groups = lengths.responses(cap, recipe.batch.prompts, size)
    else:
        chosen = _repeated(groups.groups, recipe.batch.prompts)
        cut = [replace(one, lengths=tuple(_repeated(one.lengths, size))) for one in chosen]
        groups = Workload(tuple(cut), max(cap, groups.cap))
    algorithm, mode = recipe.algorithm, recipe.mode
    reference = bool(algorithm.kl.coefficient)
    frozen = reference + len(recipe.reward.models)
    critic = isinstance(recipe.critic, Critic)
    value_bytes = 4 if recipe.engine_dtype == "float32" else 2
    old = algorithm.updates > 1 or (reference and algorithm.kl.where == "reward")
    return Work(
        tuple(group.prompt + length for group in groups.groups for length in group.lengths),
        linear,
        updates=algorithm.updates,
        epochs=algorithm.epochs,
        scored=frozen + critic + old,
        frozen=frozen,
        critic=critic,
        rollouts=Rollouts(
            groups,
            recipe.rollout.policy,
            recipe.rollout.chunk_tokens,
            1 if recipe.rollout.fp8 else value_bytes,
            value_bytes,
            mode.max_lag,
            mode.interrupt,
            mode.ask,
        ),
    )


def staged(work: Work, stage: WorkStage) -> Work:
    """The same sequences in another kind of step: only learned from, without a critic, or with one and a reference."""
    if stage == "sft":
        return Work(work.lengths, work.linear)
    if stage == "grpo":
        return replace(work, critic=False, scored=work.scored - work.critic)
    frozen = max(1, work.frozen)
    return replace(work, critic=True, frozen=frozen, scored=max(work.scored, frozen + 2))


def _repeated(some: Sequence[T], count: int) -> list[T]:
    return [some[i % len(some)] for i in range(count)]

"""One step's groups as token sequences: advantages, log-probabilities, the loss and what is logged of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megarl.algorithms import (
    ADVANTAGES,
    LOSSES,
    Outcomes,
    PolicyTokens,
    adapted_coefficient,
    importance_weights,
    kl_estimate,
    mixed_reward,
    overlong_penalty,
    token_weights,
    value_loss,
    whiten,
)
from megarl.config import AdaptiveKl, Critic, ImportanceCorrection, Own, RecipeError, RlRecipe, load_function
from megarl.transfer_queue import Delivery
from megarl.types import TrajectoryHeader

if TYPE_CHECKING:
    from pydantic import BaseModel

    from megarl.model_engine import LossFunction, Metrics, MicroBatch, ModelEngine, TokenSequence


@dataclass
class Models:
    """The models of a run, one engine each; `rewards` by reward source."""

    policy: ModelEngine
    reference: ModelEngine | None = None
    critic: ModelEngine | None = None
    rewards: dict[str, ModelEngine] = field(default_factory=dict)


class RolloutBatch:
    """The same on every rank, but for the tokens, which each rank has of what it reads.

    Made, then scored, then learned from.
    """

    def __init__(self, delivery: Delivery, recipe: RlRecipe, kl_coefficient: float) -> None:
        from megarl.model_engine import RemoteTokens, TokenSequence

        self._recipe, self._algorithm, self._kl_coefficient = recipe, recipe.algorithm, kl_coefficient
        self._groups = groups = delivery.groups
        self._trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        self._group = torch.tensor([i for i, group in enumerate(groups) for _ in group.trajectories])
        self.sequences: list[TokenSequence] = []
        for group in groups:
            for trajectory in group.trajectories:
                length = group.prompt_length + trajectory.length
                tokens = RemoteTokens(delivery, len(self.sequences), length, trajectory.ending)
                columns = {"current": _current(trajectory, delivery.step)}
                self.sequences.append(TokenSequence(tokens, group.prompt_length, columns, fetched=("engine_logprob",)))
        self._lengths = torch.tensor([sequence.response_length for sequence in self.sequences])
        buffer, limit = recipe.reward.overlong_buffer, recipe.rollout.max_new_tokens
        self._overlong = overlong_penalty(self._lengths, limit=limit, buffer=buffer) if buffer else None
        self._weigh()
        # with one update a step, the policy that is updated is the one that sampled
        self._on_policy = self._algorithm.updates == 1

    def score(self, models: Models) -> None:
        """Add what the losses will need: rewards, log-probabilities of policy and reference, values, advantages."""
        reference, kl, penalties = models.reference, self._algorithm.kl, None
        estimated = reference is not None and kl.estimator != "full"
        self._scores = self._all_scores(models)
        self.rewards = mixed_reward(self._scores, self._recipe.reward.sources)
        if not self._on_policy or (estimated and kl.where == "reward"):
            old = self._add_column("old_logprob", models.policy.logprobs(self.sequences))
        if reference is not None and kl.estimator != "full":
            other = self._add_column("reference_logprob", reference.logprobs(self.sequences))
            if kl.where == "reward":
                penalties = self._kl_coefficient * kl_estimate(old, other, kl.estimator)
        elif reference is not None and kl.where == "reward":
            exact = self._add_column("divergence", models.policy.divergences(self.sequences, reference))
            penalties = self._kl_coefficient * exact
        values = None if models.critic is None else self._add_column("old_value", models.critic.values(self.sequences))
        shaped = self.rewards if self._overlong is None else self.rewards + self._overlong
        outcomes = Outcomes(shaped, self._group, self._lengths, penalties, values, self._greedy_rewards())
        advantage, options = _chosen(self._algorithm.advantage, ADVANTAGES)
        found = advantage(outcomes, **options)
        _check_own(self._algorithm.advantage, "advantage", found, 1, int(self._lengths.sum()))
        if models.critic is not None:
            found, returns = found
            self._add_column("return", returns)
            found = whiten(found)
        self._add_column("advantage", found)

    def _greedy_rewards(self) -> Tensor | None:
        """At each sequence, that of its prompt's greedy answer."""
        scores = [group.greedy_scores for group in self._groups]
        if any(given is None for given in scores):
            return None
        sources = self._recipe.reward.sources
        rewards = [sum(sources[name].weight * score for name, score in (given or {}).items()) for given in scores]
        return torch.tensor(rewards, dtype=torch.float32)[self._group]

    def _all_scores(self, models: Models) -> dict[str, Tensor]:
        """By source, those that came with the samples and those of the models here; NaN where one does not score."""
        reward, scores = self._recipe.reward, {}
        for name, source in reward.sources.items():
            mine = torch.tensor([source.scores(group.dataset) for group in self._groups])[self._group]
            if name in models.rewards:
                chosen = [sequence for sequence, scored in zip(self.sequences, mine.tolist(), strict=True) if scored]
                found = models.rewards[name].scores(chosen) if chosen else torch.zeros(0)
                scores[name] = torch.full((len(mine),), math.nan).masked_scatter(mine, found)
            else:
                scores[name] = torch.tensor([t.scores.get(name, math.nan) for t in self._trajectories])
            if not scores[name][mine].isfinite().all():
                raise FloatingPointError(
                    f"reward.sources.{name} gave a score that is not finite, expected numbers of float32: look for"
                    " what is not finite in its model's weights, or for an overflow in your function"
                )
        return scores

    def minibatches(self) -> Iterator[list[TokenSequence]]:
        """The sequences of each update that have a gradient; the others count in its loss only."""
        algorithm = self._algorithm
        always = (self._kl_coefficient and algorithm.kl.where == "loss") or algorithm.entropy_coefficient
        for part in self.all_minibatches():
            weighed = (sequence for sequence in part if sequence.columns["weight"].any())
            yield [sequence for sequence in weighed if always or sequence.columns["advantage"].any()]

    def all_minibatches(self) -> list[list[TokenSequence]]:
        """All sequences of each update."""
        count = self._algorithm.minibatches
        return [self.sequences[start::count] for start in range(count)] * self._algorithm.epochs

    def reference(self, models: Models) -> ModelEngine | None:
        """The model from which `loss` must be given the divergences."""
        kl = self._algorithm.kl
        return models.reference if kl.estimator == "full" and kl.where == "loss" else None

    def loss(self) -> LossFunction:
        """The policy loss summed over a micro-batch's response tokens, with what is logged of it."""
        algorithm, on_policy, kl_coefficient = self._algorithm, self._on_policy, self._kl_coefficient
        token_losses, options = _chosen(algorithm.loss, LOSSES)

        def policy_loss(
            batch: MicroBatch, logprobs: Tensor, entropies: Tensor, divergences: Tensor | None = None
        ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
            columns, mask = batch.columns, batch.mask
            old = logprobs.detach() if on_policy else columns["old_logprob"]
            advantages = columns["advantage"]
            tokens = PolicyTokens(logprobs, old, advantages, mask, batch.sequence, batch.sequences, batch.total)
            found = token_losses(tokens, **options)
            _check_own(algorithm.loss, "loss", found, 2, len(mask))
            losses, clipped = found
            sums = {"tokens": mask.sum(), "entropy": (entropies * mask).sum(), "clipped": (clipped * mask).sum()}
            if isinstance(algorithm.correction, ImportanceCorrection):
                bounds = algorithm.correction.model_dump(exclude={"type"})
                weights, outside = importance_weights(tokens, columns["engine_logprob"], **bounds)
                losses = losses * weights
                sums |= {"corrected": outside.sum(), "importance": weights.sum()}
            if algorithm.entropy_coefficient:
                losses = losses - algorithm.entropy_coefficient * entropies
            kl = columns.get("divergence", divergences)
            if algorithm.kl.estimator != "full" and "reference_logprob" in columns:
                # masked before the exponential: where the reference's column is padding, it would overflow
                kl = kl_estimate(logprobs * mask, columns["reference_logprob"], algorithm.kl.estimator)
            if kl is not None:
                sums["kl"] = (kl.detach() * mask).sum()
                if algorithm.kl.where == "loss":
                    losses = losses + kl_coefficient * kl
            total = (losses * columns["weight"]).sum()
            differences, largest = _mismatch(old, batch)
            return total, {**sums, "loss": total.detach(), **differences}, largest

        return policy_loss

    def value_loss(self) -> LossFunction:
        """The critic's loss summed over a micro-batch's response tokens."""
        critic = self._recipe.critic
        clip = critic.clip if isinstance(critic, Critic) else None

        def loss(batch: MicroBatch, values: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
            columns, mask = batch.columns, batch.mask
            losses, clipped = value_loss(values, columns["old_value"], columns["return"], clip=clip)
            total = (losses * columns["weight"]).sum()
            error = (values.detach() - columns["return"]).square() * mask
            sums = {"loss": total.detach(), "tokens": mask.sum(), "clipped": (clipped * mask).sum()}
            return total, sums | {"error": error.sum()}, {}

        return loss

    def value_statistics(self, total: Metrics) -> dict[str, float]:
        """What is logged of the critic: its loss, and which part of the returns' variance it explains."""
        returns = torch.cat([sequence.columns["return"] for sequence in self.sequences])
        tokens, variance = total.sums["tokens"], float(returns.var(correction=0))
        return {
            "critic/loss": total.sums["loss"] / self._algorithm.updates,
            "critic/clip_fraction": total.sums["clipped"] / tokens,
            "critic/explained_variance": 1 - total.sums["error"] / tokens / variance if variance else 0.0,
        }

    def mismatch(self, model: ModelEngine) -> Metrics:
        """This rank's part of the difference to the engines' log-probabilities, for a step that trains on nothing."""

        def gap(batch: MicroBatch, logprobs: Tensor, _: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
            differences, largest = _mismatch(logprobs, batch)
            return differences["mismatch"], {"tokens": batch.mask.sum(), **differences}, largest

        return model.observe(self.sequences, gap)

    def statistics(self, total: Metrics) -> dict[str, float]:
        """What is logged of the batch; `total` are the loss's metrics of all ranks."""
        tokens = total.sums["tokens"]
        names = {
            "entropy": "entropy",
            "kl": "kl",
            "corrected": "correction/fraction",
            "importance": "correction/weight",
        }
        averages = {shown: total.sums[name] / tokens for name, shown in names.items() if name in total.sums}
        by_group = self.rewards.split([len(group.trajectories) for group in self._groups])
        several = {name: scores for name, scores in self._scores.items() if len(self._scores) > 1}
        truncated = sum(trajectory.finish_reason == "length" for trajectory in self._trajectories)
        return {
            "reward": float(self.rewards.mean()),
            **{f"reward/{name}": float(s.nanmean()) for name, s in several.items() if not s.isnan().all()},
            **({} if self._overlong is None else {"overlong_penalty": float(self._overlong.mean())}),
            "length": float(self._lengths.double().mean()),
            "length_max": int(self._lengths.max()),
            "tokens": int(self._lengths.sum()),
            "truncated": truncated / len(self._trajectories),
            "groups_with_signal": sum(len(set(rewards.tolist())) > 1 for rewards in by_group) / len(by_group),
            **averages,
            **({"kl_coefficient": self._kl_coefficient} if "kl" in averages else {}),
            "loss": total.sums.get("loss", 0.0) / self._algorithm.updates,
            "clip_fraction": total.sums.get("clipped", 0.0) / tokens,
            **self._mismatches(total),
        }

    def _mismatches(self, total: Metrics) -> dict[str, float]:
        """Nothing, where older weights than the step's sampled all tokens."""
        if not (current := total.sums["current"]):
            return {}
        largest, mean = total.maxima["mismatch"], total.sums["mismatch"] / current
        return {"mismatch/logprob_max": largest, "mismatch/logprob_mean": mean}

    def next_kl_coefficient(self, learned: dict[str, Any]) -> float:
        """What the divergence counts in the next step, by what `learned` says of this one's."""
        control = self._algorithm.kl.control
        if not isinstance(control, AdaptiveKl) or "kl" not in learned:
            return self._kl_coefficient
        sequences = len(self.sequences)
        nats = learned["kl"] * learned["tokens"] / sequences
        return adapted_coefficient(
            self._kl_coefficient, nats, target=control.target, horizon=control.horizon, sequences=sequences
        )

    def _weigh(self) -> None:
        """What each token counts in the loss of its update."""
        skipped = [self._algorithm.skip_truncated and t.finish_reason == "length" for t in self._trajectories]
        counted = self._lengths * ~torch.tensor(skipped)
        count = self._algorithm.minibatches
        for start in range(count):
            weights = token_weights(counted[start::count], self._algorithm.normalizer)
            for sequence, weight in zip(self.sequences[start::count], weights, strict=True):
                sequence.columns["weight"] = weight.expand(sequence.response_length)

    def _add_column(self, name: str, flat: Tensor) -> Tensor:
        for sequence, part in zip(self.sequences, flat.split(self._lengths.tolist()), strict=True):
            sequence.columns[name] = part
        return flat


def _check_own(section: BaseModel, key: str, found: Any, count: int, length: int) -> None:
    """Raise RecipeError: a function of the user's own gave anything but `count` vectors of `length` numbers."""
    if not isinstance(section, Own):
        return
    parts = found if isinstance(found, tuple) else (found,)
    shapes = [list(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts]
    if shapes != [[length]] * count:
        raise RecipeError(
            f"algorithm.{key}.function: {section.function} gave {shapes}; expected {count} of the shape [{length}], one"
            " number for each token"
        )


def _current(trajectory: TrajectoryHeader, step: int) -> Tensor:
    """1 for each token that the weights of `step` sampled, else 0."""
    current = torch.zeros(trajectory.length)
    for span in trajectory.versions:
        if span.version == step:
            current[span.start : span.end] = 1
    return current


def _mismatch(logprobs: Tensor, batch: MicroBatch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sums and maxima of the difference to the engines' log-probabilities, where the step's own weights sampled."""
    counted = batch.columns["current"] * batch.mask
    gap = (logprobs - batch.columns["engine_logprob"]).abs() * counted
    return {"mismatch": gap.sum(), "current": counted.sum()}, {"mismatch": gap.max()}


def _chosen(section: BaseModel, known: dict[str, Callable[..., Any]]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function that a section of the recipe names, and its options."""
    if isinstance(section, Own):
        return load_function(section.function, 1, section.options), section.options
    options = section.model_dump()
    return known[options.pop("type")], options

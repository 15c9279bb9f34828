"""One step's groups as token sequences: advantages, log-probabilities, the loss and what is logged of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.algorithms import clipped_policy_loss, group_advantages, kl_to_reference, token_weights
from megarl.config import Grpo
from megarl.types import Group

if TYPE_CHECKING:
    from megarl.model_engine import LossFunction, Metrics, MicroBatch, ModelEngine, TokenSequence


class RolloutBatch:
    """The same on every rank, since every rank has all groups."""

    def __init__(self, groups: list[Group], algorithm: Grpo) -> None:
        from megarl.model_engine import TokenSequence

        self._algorithm = algorithm
        self._groups = groups
        self.rewards = torch.tensor([[t.reward for t in group.trajectories] for group in groups])
        advantages = group_advantages(self.rewards)
        self.sequences: list[TokenSequence] = []
        for group, row in zip(groups, advantages, strict=True):
            for trajectory, advantage in zip(group.trajectories, row, strict=True):
                columns = {
                    "advantage": advantage.expand(len(trajectory.output_ids)),
                    "engine_logprob": torch.tensor(trajectory.engine_logprobs),
                }
                ids = group.prompt.input_ids
                self.sequences.append(TokenSequence(ids + trajectory.output_ids, len(ids), columns))
        self._weigh()
        # with one update a step, the policy that is updated is the one that sampled
        self._on_policy = algorithm.minibatches == 1

    def score(self, model: ModelEngine, reference: ModelEngine | None) -> None:
        """Add the log-probabilities that the loss will need, of the present policy and of the reference."""
        if not self._on_policy:
            self._add_column("old_logprob", model.logprobs(self.sequences))
        if reference is not None:
            self._add_column("reference_logprob", reference.logprobs(self.sequences))

    def minibatches(self) -> Iterator[list[TokenSequence]]:
        """The sequences of each update that have a gradient; the others count in its loss only."""
        for part in self._parts():
            yield [s for s in part if self._algorithm.kl_coefficient or s.columns["advantage"].any()]

    def loss(self) -> LossFunction:
        """The policy loss summed over a micro-batch's response tokens, with what is logged of it."""
        algorithm, on_policy = self._algorithm, self._on_policy

        def policy_loss(
            batch: MicroBatch, logprobs: Tensor, entropies: Tensor
        ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
            columns, mask = batch.columns, batch.mask
            old = logprobs.detach() if on_policy else columns["old_logprob"]
            losses, clipped = clipped_policy_loss(
                logprobs, old, columns["advantage"], clip_low=algorithm.clip_low, clip_high=algorithm.clip_high
            )
            sums = {"tokens": mask.sum(), "entropy": (entropies * mask).sum(), "clipped": (clipped * mask).sum()}
            if algorithm.kl_coefficient:
                # masked before the exponential: where the reference's column is padding, it would overflow
                kl = kl_to_reference(logprobs * mask, columns["reference_logprob"])
                losses = losses + algorithm.kl_coefficient * kl
                sums["kl"] = (kl.detach() * mask).sum()
            mismatch = (old - columns["engine_logprob"]).abs() * mask
            total = (losses * columns["weight"]).sum()
            sums |= {"loss": total.detach(), "mismatch": mismatch.sum()}
            return total, sums, {"mismatch": mismatch.max()}

        return policy_loss

    def mismatch(self, model: ModelEngine) -> Metrics:
        """The difference to the engines' log-probabilities alone, for a step that trains on nothing."""
        from megarl.model_engine import Metrics

        gap = (model.logprobs(self.sequences) - torch.cat([s.columns["engine_logprob"] for s in self.sequences])).abs()
        return Metrics({"tokens": float(gap.numel()), "mismatch": float(gap.sum())}, {"mismatch": float(gap.max())})

    def statistics(self, total: Metrics) -> dict[str, float]:
        """What is logged of the batch; `total` are the loss's metrics of all ranks."""
        lengths = [sequence.response_length for sequence in self.sequences]
        trajectories = [t for group in self._groups for t in group.trajectories]
        tokens = total.sums["tokens"]
        averages: dict[str, float] = {n: total.sums[n] / tokens for n in ("entropy", "kl") if n in total.sums}
        return {
            "reward": float(self.rewards.mean()),
            "length": sum(lengths) / len(lengths),
            "length_max": max(lengths),
            "tokens": sum(lengths),
            "truncated": sum(t.finish_reason == "length" for t in trajectories) / len(trajectories),
            "groups_with_signal": float((self.rewards.std(1) > 0).float().mean()),
            **averages,
            "loss": total.sums.get("loss", 0.0) / self._algorithm.minibatches,
            "clip_fraction": total.sums.get("clipped", 0.0) / tokens,
            "mismatch/logprob_max": total.maxima["mismatch"],
            "mismatch/logprob_mean": total.sums["mismatch"] / tokens,
        }

    def _parts(self) -> list[list[TokenSequence]]:
        count = self._algorithm.minibatches
        return [self.sequences[start::count] for start in range(count)]

    def _weigh(self) -> None:
        """What each token counts in the loss of its update."""
        for part in self._parts():
            lengths = torch.tensor([sequence.response_length for sequence in part])
            for sequence, weight in zip(part, token_weights(lengths, self._algorithm.normalizer), strict=True):
                sequence.columns["weight"] = weight.expand(sequence.response_length)

    def _add_column(self, name: str, flat: Tensor) -> None:
        parts = flat.split([sequence.response_length for sequence in self.sequences])
        for sequence, part in zip(self.sequences, parts, strict=True):
            sequence.columns[name] = part

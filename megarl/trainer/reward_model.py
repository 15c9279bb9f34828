"""Training a reward model on pairs of answers: the whole loop.

The loss of a pair joins two sequences that may lie on different ranks. So a step first scores all of them, takes the
loss and its derivative by each score, and then sums scores times derivatives in the update: the gradient is the same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megarl.algorithms import bradley_terry
from megarl.config import RewardModelRecipe
from megarl.data import encode_conversations, load_tokenizer, read_preferences, whole_pairs
from megarl.observe import Phases
from megarl.runtime import LOGGER
from megarl.trainer.job import (
    Exports,
    Job,
    build_engine,
    checkpoint_is_due,
    open_metrics,
    resume_step,
    save,
    should_stop,
)

if TYPE_CHECKING:
    from megarl.model_engine import MicroBatch, ModelEngine, TokenSequence


def train_reward_model(job: Job, recipe: RewardModelRecipe) -> None:
    """Train for `recipe.steps` steps and write the model to the run directory."""
    train, test = (_encoded(job, recipe, path) for path in (recipe.data.train, recipe.data.test))
    model = build_engine(job, recipe, recipe.model, job.shape, recipe.optimizer)
    start, _ = resume_step(job, model)
    metrics, exports = open_metrics(job, start), Exports(job, recipe, model)

    for step in range(start, recipe.steps):
        phases = Phases()
        with phases("update"):
            pairs = [train[i % len(train)] for i in range(step * recipe.batch.pairs, (step + 1) * recipe.batch.pairs)]
            learned = _update(model, pairs, recipe.centring)
        done, stop = step + 1, should_stop(job)
        exports.after(done)
        row: dict[str, Any] = {"step": done, **learned, "seconds": phases.seconds}
        if done == recipe.steps or (recipe.evaluation_every and done % recipe.evaluation_every == 0):
            row["accuracy_held_out"] = _accuracy(_scores(model, test))
            LOGGER.info("accuracy %.3f on %d held-out pairs", row["accuracy_held_out"], len(test))
        if metrics is not None:
            metrics.write(row)
            LOGGER.info("step %(step)d  loss %(loss).4f  accuracy %(accuracy).3f  grad norm %(grad_norm).3f", row)
        if stop or checkpoint_is_due(recipe, done):
            save(job, recipe, model, done)
        if stop:
            exports.wait()
            LOGGER.info("asked to stop: the run ends after step %d; --resume continues it", done)
            return
    exports.finish()


class _Pair(NamedTuple):
    """Two answers to one prompt, and by how much the first should be better."""

    chosen: TokenSequence
    rejected: TokenSequence
    margin: float


def _encoded(job: Job, recipe: RewardModelRecipe, path: Path) -> list[_Pair]:
    from megarl.model_engine import TokenSequence

    rows = read_preferences(path)
    encoded = encode_conversations(load_tokenizer(recipe.model.path), whole_pairs(rows), job.shape.max_positions)
    sequences = [TokenSequence(row.input_ids, row.prompt_length) for row in encoded]
    return [
        _Pair(chosen, rejected, row.margin)
        for chosen, rejected, row in zip(sequences[0::2], sequences[1::2], rows, strict=True)
    ]


def _scores(model: ModelEngine, pairs: list[_Pair]) -> Tensor:
    """[pairs, 2]: of the chosen and the rejected answers."""
    return model.scores([sequence for pair in pairs for sequence in (pair.chosen, pair.rejected)]).view(-1, 2)


def _accuracy(scores: Tensor) -> float:
    return float((scores[:, 0] > scores[:, 1]).float().mean())


def _update(model: ModelEngine, pairs: list[_Pair], centring: float) -> dict[str, float]:
    scores = _scores(model, pairs).requires_grad_()
    margins = torch.tensor([pair.margin for pair in pairs])
    loss = bradley_terry(scores[:, 0], scores[:, 1], margins, centring=centring).mean()
    (derivatives,) = torch.autograd.grad(loss, scores)
    sequences = [sequence for pair in pairs for sequence in (pair.chosen, pair.rejected)]
    sequences = [
        replace(sequence, columns={"derivative": derivative[None]})
        for sequence, derivative in zip(sequences, derivatives.flatten(), strict=True)
    ]

    def linear(batch: MicroBatch, values: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        return (values * batch.columns["derivative"]).sum(), {}, {}

    done = model.update(sequences, linear)
    found = scores.detach()
    return {
        "loss": float(loss),
        "accuracy": _accuracy(found),
        "score_margin": float((found[:, 0] - found[:, 1]).mean()),
        "score_mean": float(found.mean()),
        "grad_norm": done.grad_norm,
        "learning_rate": done.learning_rate,
    }

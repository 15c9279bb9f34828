"""Supervised fine-tuning: the whole loop.

The loss is the mean over the global batch's learned tokens, whatever the layout and the micro-batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.algorithms import token_weights
from megarl.config import SftRecipe, TokenMean
from megarl.data import Sequence, encode_conversations, load_tokenizer, read_conversations
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
    from megarl.model_engine import MicroBatch, TokenSequence


def train_sft(job: Job, recipe: SftRecipe) -> None:
    """Train for `recipe.steps` steps and write the model to the run directory."""
    from megarl.model_engine import Metrics

    tokenizer, conversations = load_tokenizer(recipe.model.path), read_conversations(recipe.data.train)
    encoded = encode_conversations(tokenizer, conversations, job.shape.max_positions, recipe.data.roles)
    model = build_engine(job, recipe, recipe.model, job.shape, recipe.optimizer)
    start, _ = resume_step(job, model)
    metrics, exports = open_metrics(job, start), Exports(job, recipe, model)

    for step in range(start, recipe.steps):
        phases = Phases()
        with phases("update"):
            size = recipe.batch.sequences
            rows = [encoded[i % len(encoded)] for i in range(step * size, (step + 1) * size)]
            update = model.update(weighted(rows), loss)
            total = Metrics.gathered([update.metrics], job.device)
        if metrics is not None:
            row = {
                "step": step + 1,
                "loss": total.sums["loss"],
                "grad_norm": update.grad_norm,
                "learning_rate": update.learning_rate,
                "tokens": sum(row.learned_length for row in rows),
                "seconds": phases.seconds,
            }
            metrics.write(row)
            LOGGER.info("step %(step)d  loss %(loss).4f  grad norm %(grad_norm).3f  lr %(learning_rate).2e", row)
        done, stop = step + 1, should_stop(job)
        exports.after(done)
        if stop or checkpoint_is_due(recipe, done):
            save(job, recipe, model, done)
        if stop:
            exports.wait()
            LOGGER.info("asked to stop: the run ends after step %d; --resume continues it", done)
            return
    exports.finish()


def weighted(rows: list[Sequence]) -> list[TokenSequence]:
    """The global batch: each learned token weighs the same, the others nothing."""
    from megarl.model_engine import TokenSequence

    sequences = []
    lengths = torch.tensor([row.learned_length for row in rows])
    for row, weight in zip(rows, token_weights(lengths, TokenMean()), strict=True):
        weights = torch.zeros(len(row.input_ids))
        for first, end in row.learned:
            weights[first:end] = weight
        sequences.append(TokenSequence(row.input_ids, row.prompt_length, {"weight": weights[row.prompt_length :]}))
    return sequences


def loss(batch: MicroBatch, logprobs: Tensor, _: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """The micro-batch's part of the loss."""
    total = -(logprobs * batch.columns["weight"]).sum()
    return total, {"loss": total.detach()}, {}

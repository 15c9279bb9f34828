"""Supervised fine-tuning: the whole loop.

The loss is the mean over the global batch's response tokens, whatever the layout and the micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms import token_weights
from megarl.config import SftRecipe, TokenMean
from megarl.data import encode_demonstrations, load_tokenizer, read_demonstrations
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


def train_sft(job: Job, recipe: SftRecipe) -> None:
    """Train for `recipe.steps` steps and write the model to the run directory."""
    from megarl.model_engine import Metrics, MicroBatch, TokenSequence

    tokenizer = load_tokenizer(recipe.model.path)
    demonstrations = read_demonstrations(recipe.data.train)
    encoded = encode_demonstrations(tokenizer, demonstrations, job.shape.max_positions)
    model = build_engine(job, recipe, recipe.model, job.shape, recipe.optimizer)
    start, _ = resume_step(job, model)
    metrics, exports = open_metrics(job, start), Exports(job, recipe, model)

    def loss(batch: MicroBatch, logprobs: Tensor, _: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        total = -(logprobs * batch.columns["weight"]).sum()
        return total, {"loss": total.detach()}, {}

    for step in range(start, recipe.steps):
        phases = Phases()
        with phases("update"):
            size = recipe.batch.sequences
            rows = (encoded[i % len(encoded)] for i in range(step * size, (step + 1) * size))
            sequences = [TokenSequence(row.input_ids, row.prompt_length) for row in rows]
            lengths = torch.tensor([sequence.response_length for sequence in sequences])
            for sequence, weight in zip(sequences, token_weights(lengths, TokenMean()), strict=True):
                sequence.columns["weight"] = weight.expand(sequence.response_length)
            update = model.update(sequences, loss)
            total = Metrics.merge(job.control.allgather(update.metrics, Metrics, what=f"metrics of step {step + 1}"))
        if metrics is not None:
            row = {
                "step": step + 1,
                "loss": total.sums["loss"],
                "grad_norm": update.grad_norm,
                "learning_rate": update.learning_rate,
                "tokens": int(lengths.sum()),
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

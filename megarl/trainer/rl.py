"""Reinforcement learning: the whole loop, one phase after the other.

Step s trains on groups that version s of the weights made, or finished (`batch.sampling` of type first), and publishes
version s + 1.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from megarl.config import Critic, RlRecipe, read_model_shape
from megarl.observe import MetricsLog, Phases
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
from megarl.trainer.rollout_batch import Models, RolloutBatch
from megarl.trainer.rollouts import Rollouts

if TYPE_CHECKING:
    from megarl.model_engine import ModelEngine


def train_rl(job: Job, recipe: RlRecipe) -> None:
    """Train for `recipe.steps` steps and write the model to the run directory."""
    key = job.control.broadcast(secrets.token_hex(32) if job.control.rank == 0 else None, str, what="key of the job")
    if recipe.learns_uncorrected:
        LOGGER.warning(
            "mode.max_lag is %d and algorithm.correction is none: tokens of old weights count as if the present weights"
            " had sampled them; see docs/modes.md",
            recipe.mode.max_lag,
        )
    rollouts = Rollouts(job, recipe, key)
    models = _build_models(job, recipe) if job.trains else None
    model, critic = (None, None) if models is None else (models.policy, models.critic)
    start, kl_coefficient = resume_step(job, model, critic)
    rollouts.wait_healthy()
    kl_coefficient = recipe.algorithm.kl.coefficient if kl_coefficient is None else kl_coefficient
    metrics, exports = open_metrics(job, start), Exports(job, recipe, model)
    rollouts.publish(model, start)
    if start == 0:
        rollouts.evaluate(0)

    for step in range(start, recipe.steps):
        phases = Phases()
        with phases("generate"):
            delivery, counts = rollouts.take(step)
        if models is not None:
            with phases("score"):
                batch = RolloutBatch(delivery, recipe, kl_coefficient)
                batch.score(models)
            with phases("update"):
                learned = _update(job, recipe, models, batch, step)
                kl_coefficient = batch.next_kl_coefficient(learned)
        with phases("publish"):
            moved = rollouts.publish(model, step + 1)
        if metrics is not None:
            _report(metrics, {"step": step + 1, **learned, **counts, **moved, "seconds": phases.seconds})
        done, stop = step + 1, should_stop(job)
        exports.after(done)
        if done == recipe.steps or (recipe.evaluation.every and done % recipe.evaluation.every == 0):
            rollouts.evaluate(done)
        if stop or checkpoint_is_due(recipe, done):
            save(job, recipe, model, done, critic=critic, kl_coefficient=kl_coefficient)
            rollouts.saved(done)
        if stop:
            exports.wait()
            LOGGER.info("asked to stop: the run ends after step %d; --resume continues it", done)
            return
    exports.finish()


def _build_models(job: Job, recipe: RlRecipe) -> Models:
    """All that the recipe has."""
    updates = recipe.algorithm.updates
    policy = (job, recipe, recipe.model, job.shape)
    temperature = recipe.rollout.temperature
    models = Models(build_engine(*policy, recipe.optimizer, updates_per_step=updates, temperature=temperature))
    if recipe.algorithm.kl.coefficient:
        models.reference = build_engine(*policy, temperature=temperature)
    if isinstance(recipe.critic, Critic):
        critic = recipe.critic
        shape = read_model_shape(critic.model.path, "critic")
        models.critic = build_engine(job, recipe, critic.model, shape, critic.optimizer, updates_per_step=updates)
    for name, source in recipe.reward.models.items():
        shape = read_model_shape(source.model.path, "reward")
        models.rewards[name] = build_engine(job, recipe, source.model, shape)
    return models


def _update(job: Job, recipe: RlRecipe, models: Models, batch: RolloutBatch, step: int) -> dict[str, Any]:
    """All updates of a step; returns what is logged. A minibatch in which no group has a signal is passed over."""
    from megarl.model_engine import Metrics

    learned = _update_critic(job, models.critic, batch) if models.critic is not None else {}
    model = models.policy
    if isinstance(recipe.critic, Critic) and step < recipe.critic.warmup_steps:
        untrained = Metrics.gathered([batch.mismatch(model)], job.device)
        return {**batch.statistics(untrained), **learned, "grad_norm": 0.0, "learning_rate": 0.0}
    minibatches = list(batch.minibatches())
    parts, norms = [], []
    for index, sequences in enumerate(minibatches):
        model.update_count = step * len(minibatches) + index  # the schedule goes on where one is passed over
        rate = model.learning_rate
        if sequences:
            update = model.update(sequences, batch.loss(), batch.reference(models))
            parts.append(update.metrics)
            norms.append(update.grad_norm)
    total = Metrics.gathered(parts or [batch.mismatch(model)], job.device)
    return {**batch.statistics(total), **learned, "grad_norm": max(norms, default=0.0), "learning_rate": rate}


def _update_critic(job: Job, critic: ModelEngine, batch: RolloutBatch) -> dict[str, Any]:
    from megarl.model_engine import Metrics

    updates = [critic.update(sequences, batch.value_loss()) for sequences in batch.all_minibatches()]
    total = Metrics.gathered([update.metrics for update in updates], job.device)
    return batch.value_statistics(total) | {"critic/grad_norm": max(update.grad_norm for update in updates)}


def _report(metrics: MetricsLog, row: dict[str, Any]) -> None:
    metrics.write(row)
    times = "  ".join(f"{name} {seconds:.2f} s" for name, seconds in row["seconds"].items())
    LOGGER.info("step %(step)d  reward %(reward).3f  length %(length).1f  grad norm %(grad_norm).3f", row)
    LOGGER.info("    %s", times)
    if row["reward_timeouts"] or row["reward_crashes"]:
        LOGGER.warning(
            "    %(reward_timeouts)d responses so far took a rule too long and %(reward_crashes)d crashed it: they"
            " score 0, see logs/coordinator.log",
            row,
        )

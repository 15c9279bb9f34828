"""Reinforcement learning: the whole loop, one phase after the other.

Rollouts are on-policy: step s trains on the groups that version s of the weights made, and publishes version s + 1.
"""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from megarl.config import Critic, RlRecipe, read_model_shape
from megarl.observe import EVALUATIONS_FILE, MetricsLog, Phases
from megarl.rollout_engine import CoordinatorHandle
from megarl.runtime import LOGGER
from megarl.trainer.coordinator import TARGET as COORDINATOR
from megarl.trainer.fleet import Fleet
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
from megarl.types import Group

if TYPE_CHECKING:
    from megarl.model_engine import Metrics, ModelEngine


def train_rl(job: Job, recipe: RlRecipe) -> None:
    """Train for `recipe.steps` steps and write the model to the run directory."""
    key = job.control.broadcast(secrets.token_hex(32) if job.control.rank == 0 else None, str, what="key of the job")
    fleet = Fleet(job, recipe, key)
    coordinator, models = _start_the_rest(job, recipe, fleet, key)
    model, critic = models.policy, models.critic
    start, kl_coefficient = resume_step(job, model, critic)
    fleet.wait_healthy()
    kl_coefficient = recipe.algorithm.kl.coefficient if kl_coefficient is None else kl_coefficient
    metrics, exports = open_metrics(job, start), Exports(job, recipe, model)
    _publish(fleet, coordinator, model, version=start)
    if start == 0:
        _evaluate(job, recipe, coordinator, step=0)

    for step in range(start, recipe.steps):
        phases = Phases()
        with phases("generate"):
            groups, counts = _take(job, coordinator, step)
        with phases("score"):
            batch = RolloutBatch(groups, recipe, kl_coefficient)
            batch.score(models)
        with phases("update"):
            learned = _update(job, recipe, models, batch, step)
            kl_coefficient = batch.next_kl_coefficient(learned)
        with phases("publish"):
            moved = _publish(fleet, coordinator, model, version=step + 1)
        if metrics is not None:
            _report(metrics, {"step": step + 1, **learned, **counts, **moved, "seconds": phases.seconds})
        done, stop = step + 1, should_stop(job)
        exports.after(done)
        if done == recipe.steps or (recipe.evaluation.every and done % recipe.evaluation.every == 0):
            _evaluate(job, recipe, coordinator, step=done)
        if stop or checkpoint_is_due(recipe, done):
            save(job, recipe, model, done, critic=critic, kl_coefficient=kl_coefficient)
        if stop:
            exports.wait()
            LOGGER.info("asked to stop: the run ends after step %d; --resume continues it", done)
            return
    exports.finish()


def _start_the_rest(job: Job, recipe: RlRecipe, fleet: Fleet, key: str) -> tuple[CoordinatorHandle | None, Models]:
    """Coordinator (on rank 0), and the models that the recipe has."""
    scorers = fleet.scorer_addresses()
    coordinator = None
    if job.control.rank == 0:
        coordinator = CoordinatorHandle(
            COORDINATOR,
            recipe,
            scorers,
            key,
            max_positions=job.shape.max_positions,
            guard=job.guard,
            log=job.run.logs / "coordinator.log",
        )
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
    return coordinator, models


def _take(job: Job, coordinator: CoordinatorHandle | None, step: int) -> tuple[list[Group], dict[str, Any]]:
    """The step's groups on every rank, and rank 0's counts."""
    groups, counts = None, {}
    if coordinator is not None:
        coordinator.generate(step)
        taken = coordinator.take(step)
        groups = taken.groups
        counts = {"prompts_asked": taken.asked} if taken.asked > len(taken.groups) else {}
        counts |= {"reward_timeouts": taken.reward_timeouts, "reward_crashes": taken.reward_crashes}
    return job.control.broadcast(groups, list[Group], what=f"groups of step {step + 1}"), counts


def _update(job: Job, recipe: RlRecipe, models: Models, batch: RolloutBatch, step: int) -> dict[str, Any]:
    """All updates of a step; returns what is logged. A minibatch in which no group has a signal is passed over."""
    learned = _update_critic(job, models.critic, batch, step) if models.critic is not None else {}
    model = models.policy
    if isinstance(recipe.critic, Critic) and step < recipe.critic.warmup_steps:
        return {**batch.statistics(batch.mismatch(model)), **learned, "grad_norm": 0.0, "learning_rate": 0.0}
    minibatches = list(batch.minibatches())
    parts, norms = [], []
    for index, sequences in enumerate(minibatches):
        model.update_count = step * len(minibatches) + index  # the schedule goes on where one is passed over
        rate = model.learning_rate
        if sequences:
            update = model.update(sequences, batch.loss(), batch.reference(models))
            parts.append(update.metrics)
            norms.append(update.grad_norm)
    total = _merged(job, parts, step) if parts else batch.mismatch(model)
    return {**batch.statistics(total), **learned, "grad_norm": max(norms, default=0.0), "learning_rate": rate}


def _update_critic(job: Job, critic: ModelEngine, batch: RolloutBatch, step: int) -> dict[str, Any]:
    updates = [critic.update(sequences, batch.value_loss()) for sequences in batch.all_minibatches()]
    total = _merged(job, [update.metrics for update in updates], step)
    return batch.value_statistics(total) | {"critic/grad_norm": max(update.grad_norm for update in updates)}


def _merged(job: Job, mine: list[Metrics], step: int) -> Metrics:
    """The metrics of all updates on all ranks."""
    from megarl.model_engine import Metrics

    return Metrics.merge(job.control.allgather(Metrics.merge(mine), Metrics, what=f"metrics of step {step + 1}"))


def _publish(
    fleet: Fleet, coordinator: CoordinatorHandle | None, model: ModelEngine, *, version: int
) -> dict[str, Any]:
    """Engines get new weights, then requests; returns what is logged."""
    moved = fleet.publish(model, version)
    addresses = fleet.addresses()
    if coordinator is not None:
        coordinator.serve(addresses)
    return moved


def _evaluate(job: Job, recipe: RlRecipe, coordinator: CoordinatorHandle | None, *, step: int) -> None:
    """Accuracy on the held-out problems, written to the run directory by rank 0."""
    if recipe.evaluation.problems and coordinator is not None:
        evaluation = coordinator.evaluate()
        with (job.run.path / EVALUATIONS_FILE).open("a") as file:
            file.write(json.dumps({"step": step, **msgspec.to_builtins(evaluation)}) + "\n")
        LOGGER.info(
            "after step %d: accuracy %.3f at temperature 1, %.3f greedy",
            step,
            evaluation.accuracy,
            evaluation.accuracy_greedy,
        )
    job.control.barrier("evaluation")


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

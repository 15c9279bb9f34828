"""What both loops share: this rank's place in the job, the run directory, and the start of the model engine."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megarl.config import AnyRecipe, Model, ModelShape, Optimizer
from megarl.observe import MetricsLog
from megarl.runtime import LOGGER, ControlPlane, Guard, Links, RankInfo, choose_device, init_process_groups
from megarl.trainer.run_state import RunDirectory, RunState

if TYPE_CHECKING:
    from megarl.model_engine import HfExport, ModelEngine


_CRITIC = "critic"  # its directory in a checkpoint, beside the policy's files


@dataclass(frozen=True)
class Job:
    """One rank of a running job. `hosts` are the host names of all ranks, in rank order.

    If it does not `train`, it has engines only.
    """

    info: RankInfo
    control: ControlPlane
    guard: Guard
    run: RunDirectory
    shape: ModelShape
    resume: bool
    hosts: list[str]
    device: torch.device
    links: Links
    trains: bool

    def leave(self) -> None:
        """End this rank's part, together with all ranks."""
        if self.trains:
            torch.distributed.destroy_process_group()
        self.control.close()


def join(
    info: RankInfo,
    control: ControlPlane,
    guard: Guard,
    run: RunDirectory,
    recipe: AnyRecipe,
    shape: ModelShape,
    *,
    resume: bool,
) -> Job:
    """Meet the other ranks: device, torch process groups."""
    hosts = control.allgather(socket.gethostname(), str, what="exchange of host names")
    device = choose_device(info)
    train, one_node = recipe.train_ranks(info.world), len(set(hosts)) == 1
    deadline_s = recipe.runtime.deadline_s
    links = init_process_groups(control, device, one_node=one_node, deadline_s=deadline_s, train_ranks=train)
    return Job(info, control, guard, run, shape, resume, hosts, device, links, info.rank < train)


def build_engine(
    job: Job,
    recipe: AnyRecipe,
    model: Model,
    shape: ModelShape,
    optimizer: Optimizer | None = None,
    *,
    updates_per_step: int = 1,
    temperature: float = 1.0,
) -> ModelEngine:
    """A model engine on all ranks that train, frozen without an optimizer.

    A recipe counts its warm-up in steps, the engine in updates.
    """
    # megarl.model_engine takes seconds to import; the engines start meanwhile
    from megarl.model_engine import ModelEngine

    if optimizer is not None:
        optimizer = optimizer.model_copy(update={"warmup_steps": optimizer.warmup_steps * updates_per_step})
    return ModelEngine(
        model,
        shape,
        recipe.layout,
        device=job.device,
        seed=recipe.seed,
        max_tokens_per_rank=recipe.batch.max_tokens_per_rank,
        temperature=temperature,
        optimizer=optimizer,
        balance=recipe.balance,
        updates=recipe.steps * updates_per_step,
        deadline_s=recipe.runtime.deadline_s,
    )


def resume_step(job: Job, model: ModelEngine | None, critic: ModelEngine | None = None) -> tuple[int, float | None]:
    """Restore the newest checkpoint, if the run is resumed and has one; a collective of all ranks.

    Returns the finished steps, and the divergence's coefficient of the next one if it was saved.
    """
    newest = job.run.newest_checkpoint() if job.resume else None
    path = Path(job.control.broadcast(str(newest[0]) if newest else "", str, what="checkpoint to resume"))
    if not path.name:
        return 0, None
    state = job.control.broadcast(newest[1] if newest else None, RunState, what="state to resume")
    if model is not None:
        model.load(path, state.updates)
    if critic is not None:
        critic.load(path / _CRITIC, state.critic_updates)
    if job.control.rank == 0:
        LOGGER.info("resumed from %s: %d steps are done", path, state.step)
    return state.step, state.kl_coefficient


def save(
    job: Job,
    recipe: AnyRecipe,
    model: ModelEngine | None,
    step: int,
    *,
    critic: ModelEngine | None = None,
    kl_coefficient: float | None = None,
) -> None:
    """Checkpoint the run after `step` finished steps; a collective of all ranks."""

    def write(directory: Path) -> None:
        if model is not None:
            model.save(directory)
        if critic is not None:
            if job.control.rank == 0:
                (directory / _CRITIC).mkdir()
            torch.distributed.barrier()
            critic.save(directory / _CRITIC)

    updates, critic_updates = (0 if one is None else one.update_count for one in (model, critic))
    state = RunState(step, updates, recipe.type, critic_updates, kl_coefficient)
    path = job.run.save_checkpoint(job.control, write, state)
    if job.control.rank == 0:
        LOGGER.info("saved %s", path)


class Exports:
    """The snapshots of a run, one after the other; training goes on while one is written.

    Ranks without a `model` have no part in them.
    """

    def __init__(self, job: Job, recipe: AnyRecipe, model: ModelEngine | None) -> None:
        self._run, self._every, self._model = job.run, recipe.checkpoint.export_every, model
        self._last: HfExport | None = None

    def after(self, done: int) -> None:
        """Begin a snapshot, if the recipe wants one after `done` steps."""
        if self._model is not None and self._every and done % self._every == 0:
            self.wait()
            self._last = self._model.start_export(self._run.path / f"hf_step_{done:06d}")

    def finish(self) -> None:
        """Write the trained model, after the last snapshot."""
        if self._model is None:
            return
        self.wait()
        self._model.export_hf(self._run.model)
        LOGGER.info("the trained model is %s", self._run.model)

    def wait(self) -> None:
        """Return when the last snapshot is there."""
        if self._last is not None:
            self._last.wait()


def checkpoint_is_due(recipe: AnyRecipe, done: int) -> bool:
    """Whether the recipe wants a checkpoint after `done` steps."""
    every = recipe.checkpoint.every
    return bool(every and done % every == 0) or (recipe.checkpoint.final and done == recipe.steps)


def should_stop(job: Job) -> bool:
    """Whether any rank was asked to stop at a step boundary (SIGUSR1); the same answer on all ranks."""
    return any(job.control.allgather(job.guard.stop_requested, bool, what="step boundary"))


def open_metrics(job: Job, step: int) -> MetricsLog | None:
    """Rank 0's metrics."""
    return MetricsLog(job.run.path, keep_steps=step) if job.control.rank == 0 else None

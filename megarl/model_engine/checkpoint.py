"""Model and optimizer as a Megatron distributed checkpoint (torch_dist), written by all ranks, for any layout."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem_async
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megarl.config import RecipeError
from megarl.runtime import die_with_parent, without_usr1

# Layers have keys of their own, in all models. Every other way to shard the optimizer is tied to one layout, or fails.
_SHARDING = {
    "non_homogeneous_layers": True,
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def save(directory: Path, model: list[Any], optimizer: Any) -> None:
    """Write the checkpoint into the existing, empty `directory`; returns when all ranks have written."""
    _start_results_queue()
    dist_checkpointing.save(_state(model, optimizer, loading=False), str(directory), content_metadata=_SHARDING)


def load(directory: Path, model: list[Any], optimizer: Any) -> None:
    """Restore model and optimizer in place from `directory`, saved at any layout.

    Raises RecipeError: it is the checkpoint of another model, with other tensors.
    """
    strict = dist_checkpointing.validation.StrictHandling.RAISE_ALL
    try:
        state = dist_checkpointing.load(_state(model, optimizer, loading=True), str(directory), strict=strict)
    except (CheckpointingException, CheckpointException) as error:
        # torch wraps what a rank raises, a wrong shape or a failing disk, in a BaseException of its own
        causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
        if not isinstance(causes[0], CheckpointingException):
            raise
        raise RecipeError(
            f"model.path: {directory} is of a model with other tensors; resume with the model that the run was started"
            f" with, or give another run_dir ({str(causes[0]).splitlines()[0].strip()})"
        ) from error
    for index, part in enumerate(model):
        part.module.load_state_dict(state[f"model_{index}"], strict=True)
    optimizer.load_state_dict(state["optimizer"])
    for one in optimizer.chained_optimizers:
        for values in one.optimizer.state.values():
            if torch.is_tensor(values.get("step")):
                # Megatron gives all parameters one tensor, which torch's Adam would then count up once for each
                values["step"] = values["step"].clone()


def _tell_step(optimizer: Any) -> None:
    """A stage without experts has an optimizer for them all the same, without a state to read the step from."""
    steps = {
        float(s["step"]) for one in optimizer.chained_optimizers for s in one.optimizer.state.values() if "step" in s
    }
    for one in optimizer.chained_optimizers:
        one.step_of_others = max(steps, default=0.0)


def _state(model: list[Any], optimizer: Any, *, loading: bool) -> dict[str, Any]:
    metadata = {**_SHARDING, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state: dict[str, Any] = {
        f"model_{index}": part.module.sharded_state_dict(metadata=metadata) for index, part in enumerate(model)
    }
    _tell_step(optimizer)
    state["optimizer"] = optimizer.sharded_state_dict(dict(state), is_loading=loading, metadata=metadata)
    return state


def _start_results_queue() -> None:
    """The queue of the writer processes, served by a process that ends with this rank.

    The one that Megatron would start outlives a killed rank, holds the launcher's output open and so keeps the whole
    job from ending.
    """
    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
        with without_usr1():
            manager.start(initializer=die_with_parent, initargs=(os.getpid(),))
        filesystem_async._results_queue = manager.Queue()
        _managers.append(manager)


_managers: list[SyncManager] = []  # an unreferenced manager would end

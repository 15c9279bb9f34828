"""One rank of a job from its start to its end: check, join the other ranks, run the recipe's loop, leave."""

from __future__ import annotations

from pathlib import Path

from megarl.config import RecipeError, RewardModelRecipe, RlRecipe, SftRecipe, load_recipe, read_model_shape
from megarl.data import DataError
from megarl.runtime import Guard, connect, rank_info, setup_logging
from megarl.trainer.preflight import preflight
from megarl.trainer.run_state import RunDirectory


def run_rank(path: Path, overrides: list[str], guard: Guard, *, resume: bool) -> None:
    """Run this rank of the recipe's job. Raises RecipeError on every rank if rank 0 finds something wrong."""
    info = rank_info()
    recipe = load_recipe(path, overrides)
    control = connect(info, recipe.runtime.deadline_s)
    run = RunDirectory(recipe.directory)
    problem = ""
    if info.rank == 0:  # alone, because it also makes the run directory
        try:
            preflight(recipe, world=info.world, ranks_per_node=info.ranks_per_node, resume=resume)
            run.prepare(recipe)
        except (RecipeError, DataError) as error:
            problem = str(error)
        except OSError as error:
            problem = f"run_dir: {run.path} cannot be written ({error.strerror}); give another run_dir"
    if problem := control.broadcast(problem, str, what="check of the recipe"):
        raise RecipeError(problem)
    setup_logging(info.rank, run.logs)
    guard.record_failures_in(run.path)
    # from here on torch is needed, and the loops bring seconds of imports
    from megarl.trainer.job import join

    job = join(info, control, guard, run, recipe, read_model_shape(recipe.model.path, recipe.head), resume=resume)
    match recipe:
        case SftRecipe():
            from megarl.trainer.sft import train_sft

            train_sft(job, recipe)
        case RewardModelRecipe():
            from megarl.trainer.reward_model import train_reward_model

            train_reward_model(job, recipe)
        case RlRecipe():
            from megarl.trainer.rl import train_rl

            train_rl(job, recipe)
    guard.stop_children()
    job.leave()

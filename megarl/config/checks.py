"""Checks that join sections of a recipe, the model's shape and the world size.

Called on the login node by a dry run and by every rank before anything is built.
"""

from __future__ import annotations

from megarl.config.errors import RecipeError
from megarl.config.model_shape import ModelShape
from megarl.config.recipe import RlRecipe, SftRecipe


def check_recipe(recipe: SftRecipe | RlRecipe, shape: ModelShape, *, world: int, ranks_per_node: int) -> None:
    """Raise RecipeError with every reason why `recipe` cannot run on `world` ranks, and what to change."""
    problems = [*_layout(recipe, shape, world), *_optimizer(recipe)]
    if not problems:
        problems += _batch(recipe, data=world // (recipe.layout.tensor * recipe.layout.pipeline))
    if isinstance(recipe, RlRecipe):
        problems += _rollout(recipe, shape, world, ranks_per_node)
    if problems:
        raise RecipeError("\n".join(problems))


def _layout(recipe: SftRecipe | RlRecipe, shape: ModelShape, world: int) -> list[str]:
    tensor, pipeline = recipe.layout.tensor, recipe.layout.pipeline
    problems = []
    if world % (tensor * pipeline):
        problems.append(
            f"layout: {world} ranks cannot be divided into tensor {tensor} x pipeline {pipeline} = {tensor * pipeline};"
            f" start a multiple of {tensor * pipeline} ranks or change layout"
        )
    for what, size in [("attention heads", shape.heads), ("key-value heads", shape.kv_heads), ("MLP width", shape.ffn)]:
        if size % tensor:
            good = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0 and n <= 64)
            problems.append(f"layout.tensor: {tensor} does not divide the model's {what} ({size}); use one of {good}")
    if shape.layers % pipeline:
        problems.append(f"layout.pipeline: {pipeline} stages do not divide the model's {shape.layers} layers evenly")
    return problems


def _optimizer(recipe: SftRecipe | RlRecipe) -> list[str]:
    if recipe.optimizer.warmup_steps > recipe.steps:
        return [
            f"optimizer.warmup_steps: {recipe.optimizer.warmup_steps} is more than steps ({recipe.steps}),"
            " so the learning rate would never reach its peak"
        ]
    return []


def _batch(recipe: SftRecipe | RlRecipe, data: int) -> list[str]:
    if isinstance(recipe, SftRecipe):
        if recipe.batch.sequences % data:
            return [f"batch.sequences: {recipe.batch.sequences} is not a multiple of the {data} data-parallel ranks"]
        return []
    minibatches = recipe.algorithm.minibatches
    if recipe.sequences % minibatches or recipe.sequences // minibatches < data:
        return [
            f"algorithm.minibatches: {recipe.batch.prompts} prompts x {recipe.batch.group_size} samples ="
            f" {recipe.sequences} sequences cannot be divided into {minibatches} of at least {data}"
            " (one for each data-parallel rank)"
        ]
    return []


def _rollout(recipe: RlRecipe, shape: ModelShape, world: int, ranks_per_node: int) -> list[str]:
    problems, size = [], recipe.rollout.tensor_parallel
    if world % size or ranks_per_node % size:
        problems.append(
            f"rollout.tensor_parallel: an engine of {size} ranks must lie on one node and divide the world evenly;"
            f" there are {world} ranks, {ranks_per_node} a node"
        )
    if shape.heads % size or (shape.kv_heads % size and size % shape.kv_heads):
        problems.append(
            f"rollout.tensor_parallel: {size} fits neither the model's {shape.heads} attention heads"
            f" nor its {shape.kv_heads} key-value heads"
        )
    if recipe.rollout.max_new_tokens >= shape.max_positions:
        problems.append(
            f"rollout.max_new_tokens: {recipe.rollout.max_new_tokens} leaves no room for a prompt in the model's"
            f" {shape.max_positions} positions"
        )
    owned = {"model_path", "host", "port", "api_key", "tp_size", "random_seed", "weight_version", "dtype"}
    for key in owned & recipe.rollout.server_args.keys():
        problems.append(f"rollout.server_args.{key}: megarl sets this one itself; leave it out")
    return problems

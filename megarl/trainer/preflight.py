"""Everything that can be known to be wrong before a model is built, and what each rank would do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megarl.config import (
    ModelShape,
    RecipeError,
    RlRecipe,
    SftRecipe,
    check_recipe,
    engine_leaders,
    read_model_shape,
    train_place,
)
from megarl.data import encode_demonstrations, load_tokenizer, read_demonstrations, read_problems
from megarl.trainer.run_state import RunDirectory


def preflight(recipe: SftRecipe | RlRecipe, *, world: int, ranks_per_node: int, resume: bool) -> ModelShape:
    """Check recipe, model directory, data and run directory; returns the model's shape.

    Raises RecipeError or DataError with what was given, what was expected and what to do.
    """
    shape = read_model_shape(recipe.model.path)
    check_recipe(recipe, shape, world=world, ranks_per_node=ranks_per_node)
    if not list(Path(recipe.model.path).glob("*.safetensors")):
        raise RecipeError(f"model.path: {recipe.model.path} has no *.safetensors files")
    tokenizer = load_tokenizer(recipe.model.path)
    if len(tokenizer) > shape.vocab:
        raise RecipeError(
            f"model.path: the tokenizer has {len(tokenizer)} tokens, but config.json's vocab_size is {shape.vocab}"
        )
    if isinstance(recipe, SftRecipe):
        encode_demonstrations(tokenizer, read_demonstrations(recipe.data.train), shape.max_positions)
    else:
        read_problems(recipe.data.train)
        read_problems(recipe.data.test)
    RunDirectory(recipe.directory).check(resume=resume)
    return shape


def describe_ranks(recipe: SftRecipe | RlRecipe, shape: ModelShape, *, world: int) -> Iterator[str]:
    """One line a rank: its coordinates, layers, vocabulary rows and engine."""
    layout = recipe.layout
    layers, rows = shape.layers // layout.pipeline, shape.padded_vocab(layout.tensor) // layout.tensor
    engine_size = recipe.rollout.tensor_parallel if isinstance(recipe, RlRecipe) else None
    for rank in range(world):
        place = train_place(rank, world, layout)
        first = place.pipeline * layers
        line = (
            f"rank {rank}: tensor {place.tensor}/{layout.tensor}, pipeline {place.pipeline}/{layout.pipeline},"
            f" data {place.data}/{world // (layout.tensor * layout.pipeline)};"
            f" layers {first}-{first + layers - 1},"
            f" vocabulary rows {place.tensor * rows}-{(place.tensor + 1) * rows - 1}"
        )
        if engine_size and rank in engine_leaders(world, engine_size):
            members = f"ranks {rank}-{rank + engine_size - 1}" if engine_size > 1 else "this rank"
            line += f"; starts engine {rank // engine_size} on {members}"
        yield line + ("; coordinator" if engine_size and rank == 0 else "")

"""Checks of a recipe that depend on the kind of model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config import (
    Experts,
    LatentAttention,
    ModelShape,
    RecipeError,
    RlRecipe,
    Rope,
    SftRecipe,
    Window,
    check_recipe,
    load_recipe,
)
from tests.small_job import write_small_job

GIVEN = ModelShape("qwen3", 6, 64, 8, 4, 32, 160, 1001, 1024, 1e-5, Rope(theta=1e6), True, qk_norm=True)


def recipe_of(directory: Path, *overrides: str) -> SftRecipe | RlRecipe:
    if not (directory / "rl.yaml").exists():
        write_small_job(directory)
    return load_recipe(directory / "rl.yaml", ["batch.prompts=24", *overrides])


def test_a_model_whose_engines_cannot_be_verified_is_only_fine_tuned(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path)
    for change, what in [
        ({"experts": Experts(8, 2, 16, layers=(0,))}, "experts"),
        ({"latent": LatentAttention(None, 8, 8, 8, 8)}, "latent attention"),
        ({"window": Window(8, layers=(0,))}, "windows or sinks"),
        ({"unit_norms": True}, "norms of 1 \\+ weight"),
    ]:
        with pytest.raises(RecipeError, match=f"model.path: models with {what} can be fine-tuned, but not rolled out"):
            check_recipe(recipe, replace(GIVEN, **change), world=6, ranks_per_node=6)


def test_ranks_share_key_value_heads_but_never_attention_heads(tmp_path: Path) -> None:
    equal = replace(GIVEN, heads=4)
    for key in ("layout.tensor", "rollout.tensor_parallel"):
        recipe = recipe_of(tmp_path, f"{key}=8")
        check_recipe(recipe, GIVEN, world=24, ranks_per_node=24)
        with pytest.raises(RecipeError, match=rf"{key}: 8 does not divide the model's attention heads \(4\);"):
            check_recipe(recipe, equal, world=24, ranks_per_node=24)
    recipe = recipe_of(tmp_path, "layout.tensor=6")
    thirds = replace(GIVEN, heads=6, kv_heads=2, ffn=180)  # a group's rows cannot be divided by three
    with pytest.raises(RecipeError, match=r"layout.tensor: 6 does not divide the model's key-value heads \(2\);"):
        check_recipe(recipe, thirds, world=18, ranks_per_node=18)


def test_balance_is_for_experts_and_their_bias(tmp_path: Path) -> None:
    experts = Experts(8, 2, 16, layers=(0,))
    recipe = recipe_of(tmp_path, "balance.z_coefficient=0.1", "balance.bias_update_rate=0.1")
    with pytest.raises(RecipeError, match="balance: z_coefficient and bias_update_rate are for models with experts"):
        check_recipe(recipe, GIVEN, world=6, ranks_per_node=6)
    with pytest.raises(RecipeError, match=r"balance.bias_update_rate: this model's routers have no correction bias"):
        check_recipe(recipe, replace(GIVEN, experts=experts), world=6, ranks_per_node=6)
    biased = replace(GIVEN, experts=replace(experts, correction_bias=True))
    with pytest.raises(RecipeError) as error:  # the model is refused, but not for this
        check_recipe(recipe, biased, world=6, ranks_per_node=6)
    assert "balance" not in str(error.value)

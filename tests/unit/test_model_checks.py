"""Checks of a recipe that depend on the kind of model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config import (
    Experts,
    ModelShape,
    RecipeError,
    RlRecipe,
    Rope,
    SftRecipe,
    check_recipe,
    load_recipe,
)
from tests.small_job import write_small_job

GIVEN = ModelShape("qwen3", 6, 64, 8, 4, 32, 160, 1001, 1024, 1e-5, Rope(theta=1e6), True, qk_norm=True)


def recipe_of(directory: Path, *overrides: str) -> SftRecipe | RlRecipe:
    if not (directory / "rl.yaml").exists():
        write_small_job(directory)
    return load_recipe(directory / "rl.yaml", ["batch.prompts=24", *overrides])


def test_what_engines_cannot_do_with_experts_is_refused(tmp_path: Path) -> None:
    experts = Experts(8, 2, 18, layers=(0,))
    moe = replace(GIVEN, experts=experts)
    for overrides, shape, said in [
        (
            ["rollout.expert_parallel=2"],
            GIVEN,
            "expert_parallel: this model has no experts",
        ),
        (
            [],
            replace(GIVEN, experts=replace(experts, bias=True)),
            r"model.path: experts with biases \(gpt-oss\)",
        ),
        (["rollout.expert_parallel=2"], moe, r"2 must divide rollout.tensor_parallel \(1\) and the model's 8 experts"),
        (["rollout.tensor_parallel=4"], moe, r"the 4 ranks of an engine .* do not divide the experts' width \(18\)"),
    ]:
        with pytest.raises(RecipeError, match=said):
            check_recipe(recipe_of(tmp_path, *overrides), shape, world=8, ranks_per_node=8)
    recipe = recipe_of(tmp_path, "rollout.tensor_parallel=4", "rollout.expert_parallel=4")
    check_recipe(recipe, moe, world=8, ranks_per_node=8)


def test_what_would_move_weights_in_engines_is_refused(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, "rollout.server_args={pp_size: 2, quantization: fp8}")
    with pytest.raises(RecipeError, match=r"server_args\.pp_size: would change .*\n.*server_args\.quantization: would"):
        check_recipe(recipe, GIVEN, world=6, ranks_per_node=6)


def test_fp8_is_sent_to_engines_that_compute_in_bfloat16(tmp_path: Path) -> None:
    assert GIVEN.vocab % 64
    for overrides, said in [
        (["rollout.fp8=true"], r"tokens must divide by 64 and by rollout\.tensor_parallel"),
        (["rollout.fp8=true"], "rollout.fp8: engines that hold FP8 compute in bfloat16; set rollout.dtype=bfloat16"),
        (["rollout.fp8=true", "rollout.dtype=bfloat16", "publish.type=full"], "set publish.type=direct, not full"),
    ]:
        with pytest.raises(RecipeError, match=said):
            check_recipe(recipe_of(tmp_path, *overrides), GIVEN, world=6, ranks_per_node=6)


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
    check_recipe(recipe, biased, world=6, ranks_per_node=6)

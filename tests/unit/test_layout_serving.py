"""How long rollouts take, beside the simulator's own runs, and what a recipe asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.config import load_recipe, make_recipe
from megarl.layout import KNOWN, Lengths, Rollouts, Serving, phase_s, served_model, staged, steady_s, work_of
from megarl.layout.serving import engine_model
from megarl.simulator import (
    GPUS,
    MODELS,
    GroupLengths,
    LengthModel,
    Mode,
    Trainer,
    Workload,
    make_scheduler,
    simulate,
    simulate_training,
)

RECIPES = Path(__file__).parents[2] / "launch/recipes"
QWEN3_8B = KNOWN["qwen3-8b"]


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-32b", "qwen3-235b-a22b", "llama3.1-405b", "moonlight-16b-a3b"])
def test_a_served_model_is_the_simulators_own(name: str) -> None:
    derived, listed = served_model(KNOWN[name]), MODELS[name]
    assert derived.kv_values == listed.kv_values
    assert derived.attention_flops == listed.attention_flops
    assert derived.parameters == pytest.approx(listed.parameters, rel=0.01)
    assert derived.active == pytest.approx(listed.active, rel=0.01)
    assert derived.routed == pytest.approx(listed.routed, rel=0.01)


def test_a_part_of_the_engines_stands_for_all() -> None:
    groups = LengthModel(2000, 4096, 0.6, 0.4, groups=256, group_size=8).draw()
    engine = engine_model(served_model(QWEN3_8B), GPUS["H100"], Serving(1, 16, 0.8))
    whole = simulate(groups, engine, 16, make_scheduler("context")).makespan
    assert phase_s(Rollouts(groups), engine, 16) == pytest.approx(whole, rel=0.1)


@pytest.mark.parametrize(("max_lag", "engines"), [(2, 4), (4, 8), (4, 2)])
def test_engines_that_never_wait_take_what_a_long_simulation_says(max_lag: int, engines: int) -> None:
    """With a trainer that takes no time, so that rollouts are all that a step waits for."""
    prompts, steps = 48, 12
    drawn = LengthModel(1500, 4096, 0.6, 0.4, groups=prompts * (steps + max_lag), group_size=8, prompt=256).draw()
    engine = engine_model(served_model(QWEN3_8B), GPUS["H100"], Serving(1, engines, 0.8))
    one = Rollouts(Workload(drawn.groups[:prompts], drawn.cap), "divided", max_lag=max_lag, interrupt=True)
    measured = simulate_training(
        drawn,
        engine,
        engines,
        make_scheduler("divided"),
        Trainer(0.0, 0.0, 0.0, takes_turns=False),
        Mode(max_lag, interrupt=True),
        groups_per_step=prompts,
        warm_up=2 * max_lag,
    )
    assert steady_s(one, engine, engines) == pytest.approx(measured.seconds, rel=0.2)


def test_a_recipe_says_what_a_step_asks() -> None:
    recipe = load_recipe(RECIPES / "rlhf_ppo.yaml", [])
    work = work_of(recipe, Lengths(prompt=20, mean=60), QWEN3_8B)
    assert len(work.lengths) == 128
    assert max(work.lengths) <= 180
    assert sum(work.lengths) == pytest.approx(128 * 80, rel=0.01)
    assert (work.critic, work.frozen) == (True, 2), "a reference and a reward model"
    assert work.scored == 4, "these, the values, and old log-probabilities, as there are two updates"
    assert (work.updates, work.epochs) == (2, 1)
    assert work.rollouts is not None
    assert (work.rollouts.weight_bytes, work.rollouts.value_bytes) == (4, 4)


def test_measured_lengths_are_taken_as_they_are() -> None:
    small = ["batch.prompts=3", "batch.group_size=2", "algorithm.minibatches=1"]
    recipe = load_recipe(RECIPES / "rlvr_grpo.yaml", small)
    measured = Workload((GroupLengths(10, (1, 2)), GroupLengths(20, (3, 4, 5))), 160)
    assert work_of(recipe, Lengths(), QWEN3_8B, measured).lengths == (11, 12, 23, 24, 11, 12)
    tree: dict[str, Any] = {
        "type": "sft",
        "model": {"path": "m"},
        "data": {"train": "t"},
        "batch": {"sequences": 4},
        "optimizer": {"learning_rate": 1.0},
        "steps": 1,
    }
    assert work_of(make_recipe(tree, [], named="test"), Lengths(), QWEN3_8B, measured).lengths == (11, 12, 23, 24)


def test_a_stage_can_be_chosen() -> None:
    work = work_of(load_recipe(RECIPES / "rlvr_grpo.yaml", []), Lengths(), QWEN3_8B)
    assert staged(work, "sft").rollouts is None
    ppo = staged(work, "ppo")
    assert (ppo.critic, ppo.frozen, ppo.scored) == (True, 1, 3)
    assert staged(ppo, "grpo") == work


def test_sequences_are_divided_as_the_trainer_does() -> None:
    work = work_of(load_recipe(RECIPES / "rlvr_grpo.yaml", ["algorithm.minibatches=1"]), Lengths(16, 80), QWEN3_8B)
    for ranks, max_tokens in ((1, 1024), (4, 1024), (4, 100_000)):
        division = work.divided(ranks, max_tokens)
        assert division.imbalance >= 1
        assert division.largest <= max_tokens
        assert division.micro_batches >= work.tokens / ranks / max_tokens
        assert division.micro_batches <= 1.5 * work.tokens / ranks / max_tokens + 1

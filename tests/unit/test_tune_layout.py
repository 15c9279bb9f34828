"""The tuner as a user runs it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megarl.config import RewardModelRecipe, RlRecipe, check_recipe, load_recipe
from megarl.data.carry_addition import build_tokenizer
from megarl.layout import KNOWN
from tools import tune_layout

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "launch/recipes/rlvr_grpo.yaml"
SFT = ROOT / "launch/recipes/carry_addition_sft.yaml"
SMALL = ["--workload", str(RECIPE), "--model", "qwen3-0.6b"]
GRPO = ["--model", "qwen3-8b", "--stage", "grpo", "batch.prompts=16", "rollout.max_new_tokens=2048"]


@dataclass
class Done:
    returncode: int | str | None
    stdout: str
    stderr: str


def tune(*arguments: str | Path) -> Done:
    """In this process: starting another takes longer than a search."""
    out, err, code = io.StringIO(), io.StringIO(), None
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["tune_layout", *map(str, arguments)])
        try:
            tune_layout.main()
        except SystemExit as end:
            code = end.code
            print(code, file=err)
    return Done(code, out.getvalue(), err.getvalue())


def rows(*arguments: str | Path) -> list[dict[str, Any]]:
    done = tune(*arguments, "--json")
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def test_it_prints_a_table() -> None:
    done = tune(*GRPO, "--top", "3", "--fix", "tensor=2")
    assert not done.returncode, done.stderr
    said = done.stdout.splitlines()
    assert "8.2B parameters (8.2B active)" in said[0]
    assert "training layouts" in said[1]
    assert "engines timed" in said[2]
    assert said[4].split()[:5] == ["step", "rollout", "score", "update", "publish"]
    assert len(said) == 5 + 3
    assert all(line.split()[7] == "2" for line in said[5:]), "tensor"


def test_it_prints_json() -> None:
    found = rows(*GRPO, "--top", "4")
    assert len(found) == 4
    assert [row["step_s"] for row in found] == sorted(row["step_s"] for row in found)
    for row in found:
        assert row["step_s"] == pytest.approx(sum(row["phases_s"].values()))
        assert 0 < row["mfu"] < 1
        assert (
            row["train_gpus"]
            == row["data"] * row["layout"]["tensor"] * row["layout"]["pipeline"] * (row["layout"]["context"])
        )


def test_what_it_writes_is_a_recipe_that_can_run(tmp_path: Path) -> None:
    for placement in ("colocated", "disaggregated"):
        file = tmp_path / f"{placement}.yaml"
        given = ["--workload", RECIPE, "--model", "qwen3-8b", "--nodes", "2", "--fix", f"placement={placement}"]
        best = rows(*given, "--top", "1", "--write", file, "model.dtype=bfloat16")[0]
        recipe = load_recipe(file, [])
        assert isinstance(recipe, RlRecipe)
        assert recipe.layout.model_dump() == best["layout"]
        assert recipe.batch.max_tokens_per_rank == best["max_tokens_per_rank"]
        assert recipe.rollout.tensor_parallel == best["engines"]["tensor"]
        assert recipe.rollout.server_args["mem_fraction_static"] == best["engines"]["fraction"]
        assert recipe.placement.type == placement
        assert recipe.train_ranks(16) == best["train_gpus"]
        check_recipe(recipe, KNOWN["qwen3-8b"], world=16, ranks_per_node=8)


def test_a_model_directory_or_its_file_can_be_given(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    sft = ["--stage", "sft", "--top", "1", "--fix", "tensor=8"]
    plan = tmp_path / "plan.yaml"
    tune("--model", tmp_path / "config.json", *sft, "--write", plan)
    assert load_recipe(plan, []).model.path == tmp_path
    assert (
        rows("--model", tmp_path, *sft)
        == rows("--model", tmp_path / "config.json", *sft)
        == rows("--model", "Qwen3-8B", *sft)
    )


def test_overrides_and_options_mix() -> None:
    found = rows(*GRPO, "--top", "1", "batch.group_size=8", "--fix", "tensor=2", "mode.max_lag=1")
    assert found[0]["placement"] == "disaggregated"


def test_ppo_has_a_critic_and_a_reference(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    given = ["--model", "qwen3-0.6b", "--fix", "tensor=1", "--top", "1", "batch.prompts=16"]
    best = rows("--stage", "ppo", *given, "--write", plan)[0]
    grpo = rows("--stage", "grpo", *given)[0]
    assert best["phases_s"]["update"] > 1.5 * grpo["phases_s"]["update"]
    assert best["phases_s"]["score"] > 0
    recipe = load_recipe(plan, [])
    check_recipe(recipe, KNOWN["qwen3-0.6b"], world=8, ranks_per_node=8)


def test_smaller_nodes_have_fewer_links() -> None:
    given = ["--model", "qwen3-8b", "--stage", "sft", "--fix", "tensor=8", "--top", "1"]
    whole = rows(*given, "--nodes", "2")[0]
    halves = rows(*given, "--nodes", "4", "--gpus-per-node", "4")[0]
    assert halves["step_s"] > 1.2 * whole["step_s"]


def test_lengths_of_pairs_come_from_the_recipes_data(tmp_path: Path) -> None:
    """Of two answers of which one has three more digits."""
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "2000"}\n')
    overrides = [f"data.train={tmp_path}/pairs.jsonl", f"model.path={tmp_path}"]
    recipe = load_recipe(ROOT / "launch/recipes/carry_addition_reward_model.yaml", overrides)
    assert isinstance(recipe, RewardModelRecipe)
    first, second = tune_layout.learned_lengths(recipe, KNOWN["qwen3-0.6b"]).groups
    assert second.lengths[0] - first.lengths[0] == 3


def test_nobody_need_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind `| head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        tune_layout.show("a table")


def test_lengths_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text('{"prompt": 100, "lengths": [100]}\n')
    done = tune("--model", "qwen3-8b", "--stage", "sft", "--lengths", file, "batch.sequences=50", "--top", "1")
    assert "50 sequences, 10,000 tokens, longest 200" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected a recipe (--workload), or a --stage with a --model"),
        (["--stage", "sft", "--model", "gpt-9"], "--model gpt-9: no such directory, nor a known model (llama3.2-1b"),
        ([*GRPO, "--gpu", "K80"], "--gpu K80: expected a FILE.json or one of A100"),
        ([*GRPO, "--fix", "tensors=2"], "--fix tensors=2: expected NAME=VALUE with a name of tensor, pipeline"),
        ([*GRPO, "--fix", "tensor=two"], "override 'layout.tensor=two': layout.tensor"),
        ([*GRPO, "--fix", "train_ranks=0"], "--fix train_ranks: expected a positive whole number, got '0'"),
        ([*GRPO, "--fix", "train_ranks=8"], "--fix train_ranks: 8 of 8 GPUs leave none for engines"),
        ([*GRPO, "--fix", "mem_fraction_static=2"], "--fix mem_fraction_static: expected a number between 0 and 1"),
        ([*GRPO, "--fix", "placement=hybrid"], "--fix placement: expected colocated or disaggregated"),
        ([*GRPO, "--response", "4096"], "no log-normal clipped at 2,048 tokens has a mean of 4,096"),
        ([*GRPO, "batch.prompt=3"], "override 'batch.prompt=3': batch.prompt"),
        (["--workload", "none.yaml"], "none.yaml: cannot read the recipe"),
        ([*GRPO, "--lengths", "none.jsonl"], "none.jsonl"),
        (["--model", "deepseek-v3", "--stage", "sft"], "no layout fits: the smallest needs"),
        (
            [*GRPO, "rollout.max_new_tokens=131072"],
            "131,584 tokens, prompts included, and the model has 40,960",
        ),
        ([*SMALL, "mode.interrupt=true"], "mode.interrupt: with max_lag 0 all responses are finished"),
        ([*SMALL, "algorithm.minibatches=3"], "cannot be divided evenly into 3 parts"),
        ([*SMALL, "publish.type=full", "--fix", "placement=disaggregated"], "publish.type: full has ranks send"),
        ([*SMALL, "--fix", "placement=colocated", "--fix", "train_ranks=2"], "colocated, all ranks train"),
        ([*SMALL, "--fix", "placement=colocated", "mode.max_lag=1"], "without mode.interrupt needs GPUs of its own"),
        ([*SMALL, "--stage", "ppo", "--write", "plan.yaml"], "--write: a plan for --stage ppo is none for"),
        ([*SMALL, "--write", "none/plan.yaml"], "--write none/plan.yaml: No such file or directory"),
        ([*SMALL, "--write", "/dev/null"], "--write /dev/null: File exists"),
        (["--model", "qwen3-8b", "--stage", "sft", "--fix", "tensor_parallel=2"], "only learns has no engines"),
        (["--workload", str(SFT), "--stage", "grpo"], "--stage grpo: a recipe of type sft has no rollouts"),
        (
            ["--workload", str(ROOT / "launch/recipes/rlvr_grpo.yaml"), "model.path=none"],
            "model.path: there is no none",
        ),
        ([*GRPO, "--nodes", "x"], "expected a positive whole number, got 'x'"),
    ],
)
def test_mistakes_are_told(arguments: list[str], said: str) -> None:
    done = tune(*arguments)
    assert done.returncode
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_known_models_are_listed() -> None:
    command = [sys.executable, ROOT / "tools/tune_layout.py", "--list"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert {line.split()[0] for line in listed.splitlines()} == set(KNOWN)


def test_known_models_have_their_published_sizes() -> None:
    """Billions of parameters, as their model cards say."""
    published = {"llama3.1-8b": 8.03, "qwen2.5-7b": 7.62, "qwen3-32b": 32.8, "qwen3-30b-a3b": 30.5, "deepseek-v3": 671}
    for name, billions in published.items():
        assert KNOWN[name].parameters / 1e9 == pytest.approx(billions, rel=0.005)

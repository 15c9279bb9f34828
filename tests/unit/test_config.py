"""The recipe: how it is read, written, overridden and explained; placement, the model's shape, and the cross-checks."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config import (
    Layout,
    ModelShape,
    RecipeError,
    RlRecipe,
    Rope,
    SftRecipe,
    check_recipe,
    dump_recipe,
    engine_leaders,
    load_recipe,
    read_model_shape,
    train_place,
)
from megarl.config.yaml12 import YamlError, read_yaml, write_yaml

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "launch/recipes").glob("*.yaml"))
SFT = """
type: sft
steps: 10
model: {path: model}
data: {train: train.jsonl}
batch: {sequences: 8}
optimizer: {learning_rate: 1e-4}
"""
RL = """
type: rl
steps: 10
model: {path: model}
data: {train: train.jsonl, test: test.jsonl}
batch: {prompts: 4, group_size: 8}
rollout: {max_new_tokens: 100}
reward: {sources: {answer: {type: exact_match}}}
optimizer: {learning_rate: 1e-4}
"""


def load(tmp_path: Path, text: str, *overrides: str) -> Any:
    path = tmp_path / "given.yaml"
    path.write_text(text)
    return load_recipe(path, list(overrides))


def complaint(action: Callable[[], object]) -> str:
    """What is wrong in the eyes of `action`, "" if nothing is; any other exception fails the test."""
    try:
        action()
    except (RecipeError, YamlError) as error:
        return str(error)
    return ""


def value_at(recipe: RlRecipe | SftRecipe, key: str) -> Any:
    return reduce(lambda node, name: node.get(name) if node else None, key.split("."), recipe.model_dump(mode="json"))


# --- reading and writing


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("3E5", 3e5),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("7.", 7.0),
        ("-.inf", float("-inf")),
        ("+12", 12),
        ("0", 0),
        ("true", True),
        ("~", None),
        ("", None),
        # what YAML 1.1 would turn into something else
        ("no", "no"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("010", "010"),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("2024-01-01", "2024-01-01"),
        ("'1e-4'", "1e-4"),
        ("[1, a, {b: 2e3}]", [1, "a", {"b": 2000.0}]),
    ],
)
def test_yaml_is_read_as_version_1_2(text: str, value: Any) -> None:
    found = read_yaml(text)
    assert (found, type(found)) == (value, type(value))


fixed = settings(derandomize=True, deadline=None)  # the same examples each time; the machine may be busy
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.from_regex(r"[-+.0-9eE_:xo~]+")
)
TREES = st.recursive(PLAIN, lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(), below, max_size=3))


@given(TREES)
@settings(fixed, max_examples=150)
def test_what_is_written_reads_back(tree: Any) -> None:
    assert read_yaml(write_yaml(tree)) == tree


@given(st.text(alphabet="abc:-[]{}&*!#|>'\"%@`\t\n ,?0123~<=.", max_size=30))
@settings(fixed, max_examples=300)
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    assert complaint(lambda: read_yaml(text)).isprintable()


def test_values_that_contain_themselves_are_refused() -> None:
    with pytest.raises(YamlError, match="line 1"):
        read_yaml("a: &a [*a]")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_resolved_recipe_loads_back(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path, [])
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_recipe(recipe))
    assert load_recipe(resolved, []) == recipe
    assert recipe.name == path.stem


def test_recipes_need_no_torch() -> None:
    code = "import sys, megarl.config; print({'torch', 'numpy', 'transformers'} & sys.modules.keys())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


# --- defaults and overrides


def test_defaults_are_resolved(tmp_path: Path) -> None:
    recipe = load(tmp_path, RL)
    assert isinstance(recipe, RlRecipe)
    assert (recipe.name, recipe.directory, recipe.seed) == ("given", Path("runs/given"), 0)
    assert (recipe.layout, recipe.sequences) == (Layout(tensor=1, pipeline=1), 32)
    assert (recipe.optimizer.schedule.type, recipe.algorithm.loss.type) == ("constant", "ppo")
    assert "clip_low: 0.2" in dump_recipe(recipe)
    assert isinstance(load(tmp_path, SFT), SftRecipe)


def test_a_file_name_becomes_a_name_and_run_dir_overrides_it(tmp_path: Path) -> None:
    path = tmp_path / "my recipe (2).yaml"
    path.write_text(SFT)
    assert load_recipe(path, []).name == "my_recipe_2_"
    assert load_recipe(path, ["name=other"]).directory == Path("runs/other")
    assert load_recipe(path, ["run_dir=/tmp/here"]).directory == Path("/tmp/here")


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["steps=3"], "steps", 3),
        (["steps=3", "steps=4"], "steps", 4),
        (["optimizer.learning_rate=5e-5"], "optimizer.learning_rate", 5e-5),
        (["optimizer.weight_decay=1"], "optimizer.weight_decay", 1.0),
        (["optimizer.betas=[0.5, 0.75]"], "optimizer.betas", [0.5, 0.75]),
        (["layout.tensor=2"], "layout.tensor", 2),  # a section the file does not have
        (["optimizer.schedule.type=cosine"], "optimizer.schedule.final_ratio", 0.1),
        (["optimizer.schedule={type: cosine, final_ratio: 0.5}"], "optimizer.schedule.final_ratio", 0.5),
        (["layout={tensor: 4}", "layout.pipeline=2"], "layout.tensor", 4),
        (["layout={tensor: 4}", "layout.pipeline=2"], "layout.pipeline", 2),
        (["name='12'"], "name", "12"),
        (['name="1e5"'], "name", "1e5"),
        (["rollout.server_args.log_level=info"], "rollout.server_args", {"log_level": "info"}),
        (["reward.sources.answer.pattern='a=(\\d+)'"], "reward.sources.answer.pattern", r"a=(\d+)"),
        (["run_dir=a=b"], "run_dir", "a=b"),
        (["algorithm.loss.clip_high=0.3"], "algorithm.loss.type", "ppo"),  # the default's, if none is given
        (["batch=", "batch.prompts=1", "batch.group_size=2"], "batch.prompts", 1),
    ],
)
def test_overrides(tmp_path: Path, overrides: list[str], key: str, value: Any) -> None:
    assert value_at(load(tmp_path, RL, *overrides), key) == value


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("optimiser.clip", "optimiser: unknown key; did you mean optimizer?"),
        ("batch.prompt", "batch.prompt: unknown key; did you mean batch.prompts?"),
        ("rollout.temprature", "rollout.temprature: unknown key; did you mean rollout.temperature?"),
        ("learning_rate", "learning_rate: unknown key; did you mean optimizer.learning_rate?"),
        ("algorithm.group_size", "algorithm.group_size: unknown key; did you mean batch.group_size?"),
        (
            "reward.sources.answer.patern",
            "reward.sources.answer.patern: unknown key; did you mean reward.sources.answer.pattern?",
        ),
        ("batch.sequences", "batch.sequences: unknown key; a recipe of type sft has it"),
        ("layout.qqq", "layout.qqq: unknown key; known here are tensor, pipeline"),
        ("optimizer.schedule.final_ratio", "optimizer.schedule.final_ratio: unknown key; another type of optimizer"),
    ],
)
def test_unknown_keys_are_answered_with_the_nearest(tmp_path: Path, key: str, suggestion: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, RL, f"{key}=1")
    assert str(caught.value).startswith(f"override '{key}=1': {suggestion}")


@pytest.mark.parametrize("number", [".inf", "-.inf", ".nan"])
def test_numbers_are_finite_everywhere(tmp_path: Path, number: str) -> None:
    """JSON and YAML do not agree on others: a recipe that is written must read back the same."""
    floats = [key for key in KEYS if isinstance(value_at(load(tmp_path, RL), key), float)]
    for override in [*(f"{key}={number}" for key in floats), f"rollout.server_args={{a: [{number}]}}"]:
        assert "got " in complaint(lambda override=override: load(tmp_path, RL, override)), override


def test_all_problems_come_together_each_with_its_source(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, RL.replace("steps: 10", "steps: ten") + "sed: 1\n", "batch.prompts=0", "layout.tensor=2.5")
    path = tmp_path / "given.yaml"
    assert set(str(caught.value).splitlines()) == {
        f"{path}: steps: must be an integer, got 'ten'",
        f"{path}: sed: unknown key; did you mean seed?",
        "override 'batch.prompts=0': batch.prompts: must be greater than 0, got 0",
        "override 'layout.tensor=2.5': layout.tensor: must be an integer, got 2.5",
    }


def test_a_hopeless_recipe_gives_a_short_message(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, RL + "".join(f"k{i}: 1\n" for i in range(100)))
    assert len(str(caught.value).splitlines()) == 11
    assert str(caught.value).endswith("and 90 more problems")


def recipe_keys(node: Any, path: str = "") -> list[str]:
    if not isinstance(node, dict):
        return [path]
    return [path, *(key for name in node for key in recipe_keys(node[name], f"{path}.{name}".lstrip(".")))]


KEYS = [*recipe_keys(load_recipe(RECIPES[0], []).model_dump(mode="json"))[1:], "optimizer.schedule.final_ratio"]
ODD = st.one_of(TREES, st.sampled_from([-1, 0, 2.0, 10**30, "", "x", True, [], {}, {"type": "cosine"}, [1, 2, 3]]))


@given(st.lists(st.tuples(st.sampled_from(KEYS), ODD), min_size=1, max_size=3))
@settings(fixed, max_examples=200)
def test_any_value_anywhere_is_taken_or_explained(changes: list[tuple[str, Any]]) -> None:
    """The value itself is shown short and on one line; a recipe that is taken survives being written."""

    def use() -> None:
        recipe = load_recipe(RECIPES[0], [f"{key}={write_yaml(value)}" for key, value in changes])
        check_recipe(recipe, SHAPE, world=4, ranks_per_node=4)
        assert type(recipe).model_validate(recipe.model_dump(mode="json")) == recipe

    lines = complaint(use).splitlines()
    assert len(lines) <= 11
    assert all(len(line) < 500 for line in lines)


# --- placement


def worlds() -> list[tuple[int, int, int]]:
    sizes = [1, 2, 3, 4, 8]
    return [(t * p * d, t, p) for t, p, d in product(sizes, repeat=3)]


@pytest.mark.parametrize(("world", "tensor", "pipeline"), worlds())
def test_places_are_unique_complete_and_in_megatrons_order(world: int, tensor: int, pipeline: int) -> None:
    places = [train_place(rank, world, Layout(tensor=tensor, pipeline=pipeline)) for rank in range(world)]
    data = world // (tensor * pipeline)
    expected = [(t, p, d) for p in range(pipeline) for d in range(data) for t in range(tensor)]
    assert [(place.tensor, place.pipeline, place.data) for place in places] == expected


@given(first=st.integers(0, 64), engines=st.integers(1, 64), size=st.integers(1, 16))
def test_each_rank_belongs_to_one_engine(first: int, engines: int, size: int) -> None:
    ranks = range(first, first + engines * size)
    leaders = engine_leaders(ranks, size)
    assert [rank for leader in leaders for rank in range(leader, leader + size)] == list(ranks)


# --- the model's shape

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "vocab_size": 1001,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "rope_theta": None}
WRITTEN_BY_TRANSFORMERS_5 = {name: value for name, value in QWEN3.items() if name != "rope_theta"} | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "dtype": "float32",
    "eos_token_id": 2,
    "layer_types": ["full_attention"] * 6,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "sliding_window": None,
    "tie_word_embeddings": True,
    "transformers_version": "5.19.0",
    "use_sliding_window": False,
}
SHAPE = ModelShape("qwen3", 6, 64, 8, 4, 32, 160, 1001, 1024, 1e-5, Rope(theta=1e6), True, qk_norm=True)


def shape_of(tmp_path: Path, config: Any) -> ModelShape:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_model_shape(tmp_path)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, {"family": "llama", "head_dim": 8, "rope_theta": 500000.0, "tied": False, "kv_heads": 4}),
        (LLAMA | {"rope_scaling": None, "tie_word_embeddings": True}, {"rope_theta": 500000.0, "tied": True}),
        (LLAMA | {"rope_scaling": {"type": "default"}}, {"rope_theta": 500000.0}),
        (LLAMA | {"rope_theta": None}, {"rope_theta": 10000.0}),
        (LLAMA | {"num_key_value_heads": None, "head_dim": None}, {"kv_heads": 8, "head_dim": 8}),
        (LLAMA | {"rope_theta": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 2}}, {"rope_theta": 2.0}),
        (LLAMA | {"rope_theta": 3, "rope_parameters": {"rope_type": "default"}}, {"rope_theta": 3.0}),
        (QWEN3 | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"family": "qwen3", "head_dim": 32}),
        (QWEN3 | {"rope_theta": 1000000, "use_sliding_window": False, "sliding_window": None}, {"rope_theta": 1e6}),
        (WRITTEN_BY_TRANSFORMERS_5, {"family": "qwen3", "head_dim": 32, "rope_theta": 1e6, "tied": True}),
        (LLAMA | {"architectures": ["Qwen2ForCausalLM"], "max_window_layers": 28}, {"family": "qwen2", "ffn": 160}),
    ],
)
def test_the_shapes_of_each_familys_files(tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]) -> None:
    shape = shape_of(tmp_path, config)
    assert {name: shape.rope.theta if name == "rope_theta" else getattr(shape, name) for name in expected} == expected
    assert (shape.layers, shape.vocab, shape.max_positions, shape.norm_epsilon) == (6, 1001, 1024, 1e-5)


def test_the_vocabulary_is_padded_to_equal_parts() -> None:
    for tensor in range(1, 65):
        padded = SHAPE.padded_vocab(tensor)
        assert padded % tensor == 0
        assert SHAPE.vocab <= padded < SHAPE.vocab + tensor


@given(st.sampled_from(sorted(QWEN3)), st.one_of(TREES, st.sampled_from([0, -1, 7, True, 1e9, "8", [1], {"a": 1}])))
@settings(fixed, max_examples=200)
def test_any_config_json_is_taken_or_explained(tmp_path_factory: pytest.TempPathFactory, name: str, value: Any) -> None:
    message = complaint(lambda: shape_of(tmp_path_factory.getbasetemp(), QWEN3 | {name: value}))
    assert len(message.splitlines()) <= 1
    assert not message or "config.json: " in message


# --- checks that join sections

CRITIC = "critic={type: critic, model: {path: m}, optimizer: {learning_rate: 1e-4}}"
FITS = ["layout.tensor=2", "layout.pipeline=3", "batch.prompts=4", "rollout.tensor_parallel=2"]
APART = "placement={type: disaggregated, train_ranks: 6}"


@pytest.mark.parametrize(
    ("overrides", "world", "complaint"),
    [
        ([], 12, ""),
        ([], 6, ""),
        (
            [],
            10,
            "10 ranks cannot be divided into tensor 2 x pipeline 3 x context 1 = 6; train on a multiple of 6 ranks",
        ),
        (["layout.tensor=8"], 24, ""),  # two ranks share a key-value head
        (["layout.tensor=3"], 18, "attention heads (8), key-value heads (4), MLP width (160); use one of 1, 2, 4, 8"),
        (["layout.pipeline=4"], 8, "layout.pipeline: 4 does not divide the model's 6 layers; use one of 1, 2, 3, 6"),
        (["layout.context=2"], 12, ""),
        (["layout.context=2"], 18, "x context 2 = 12; train on a multiple of 12 ranks"),
        (["layout.interleave=2"], 6, ""),
        (["layout.interleave=3"], 6, "pipeline x interleave = 9 does not divide the model's 6 layers; use one of"),
        (["layout.pipeline=1", "layout.interleave=2"], 6, "2 parts need a pipeline to interleave"),
        (["layout.expert=2"], 12, "expert and expert_tensor are for models with experts, and this one has none"),
        (["optimizer.warmup_steps=11"], 6, "optimizer.warmup_steps: 11 is more than steps (10)"),
        (["optimizer.warmup_steps=10"], 6, ""),
        (["algorithm.minibatches=3"], 6, "minibatches: 4 prompts x 8 samples = 32 sequences cannot be divided"),
        (["algorithm.minibatches=32"], 6, ""),
        (["algorithm.minibatches=32"], 12, "into 32 parts of at least 2 (one for each data-parallel rank)"),
        (["algorithm.kl={coefficient: 0.1, estimator: full}"], 6, "layout.pipeline is 3; use k2 or k3, or set"),
        (["algorithm.kl={coefficient: 0.1, estimator: full}", "layout.pipeline=1"], 6, ""),
        (["batch.group_size=1", "algorithm.advantage.type=reinforce_plus_plus"], 6, ""),
        (["batch.group_size=1", "algorithm.advantage.type=remax"], 6, ""),
        (["batch.group_size=1", "algorithm.advantage.type=gae", CRITIC], 6, ""),
        (["batch.group_size=1", "algorithm.advantage={type: own, function: 'm:f'}"], 6, ""),
        (
            ["batch.group_size=1", "algorithm.advantage={type: reinforce_plus_plus, group_baseline: true}"],
            6,
            "batch.group_size: 1 sample has nothing to be compared with, and the reinforce_plus_plus advantage",
        ),
        (
            ["batch.group_size=1", "algorithm.advantage.type=remax", "batch.sampling.type=informative"],
            6,
            "right ones among 1 samples is never between 0 and 1, so that no group would be taken",
        ),
        (
            ["batch.sampling={type: informative, low: 0.25, high: 0.375}"],
            6,
            "8 samples is never between 0.25 and 0.375",
        ),
        (["batch.sampling={type: informative, low: 0.2, high: 0.375}"], 6, ""),
        (
            ["rollout.tensor_parallel=4"],
            6,
            "engines of 4 ranks must divide those that roll out evenly, and each lie on one node",
        ),
        (["rollout.tensor_parallel=3"], 6, "tensor_parallel: 3 does not divide the model's attention heads (8)"),
        ([APART, "algorithm.minibatches=32"], 12, ""),  # 6 ranks that train are one data-parallel rank
        ([APART], 6, "placement.train_ranks: 6 of 6 ranks leave none that only rolls out; start more ranks"),
        (["placement={type: hybrid, train_ranks: 6}"], 4, "placement.train_ranks: 6 of 4 ranks leave none"),
        (["placement={type: disaggregated, train_ranks: 4}"], 12, "layout: 4 ranks cannot be divided into tensor 2"),
        ([APART, "rollout.tensor_parallel=2"], 9, "must divide those that roll out evenly, and each lie on one node"),
        ([APART, "rollout.tensor_parallel=2"], 9, "; ranks 6 to 8 roll out, 9 a node"),
        ([APART, "rollout.tensor_parallel=2"], 7, "; only rank 6 rolls out, 7 a node"),
        (["placement={type: hybrid, train_ranks: 6}", "rollout.tensor_parallel=2"], 8, ""),
        ([APART, "publish.type=full"], 12, "publish.type: full has ranks send the model that they train"),
        ([APART, "publish.type=disk"], 12, ""),
        (["rollout.tensor_parallel=8"], 24, ""),  # each key-value head on two ranks
        (["rollout.tensor_parallel=12"], 12, "12 does not divide"),
        (["rollout.max_new_tokens=1024"], 6, "rollout.max_new_tokens: 1024 leaves no room for a prompt"),
        (["rollout.max_new_tokens=1023"], 6, ""),
        (["rollout.server_args={port: 1, tp_size: 2}"], 6, "rollout.server_args.port: megarl sets this one itself"),
    ],
)
def test_checks_of_an_rl_recipe(tmp_path: Path, overrides: list[str], world: int, complaint: str) -> None:
    recipe = load(tmp_path, RL, *FITS, *overrides)
    if not complaint:
        return check_recipe(recipe, SHAPE, world=world, ranks_per_node=world)
    with pytest.raises(RecipeError) as caught:
        check_recipe(recipe, SHAPE, world=world, ranks_per_node=world)
    assert complaint in str(caught.value)


def test_an_engine_lies_on_one_node_or_on_whole_ones(tmp_path: Path) -> None:
    recipe = load(tmp_path, RL, "rollout.tensor_parallel=4")
    for ranks_per_node in (2, 4, 8):
        check_recipe(recipe, SHAPE, world=8, ranks_per_node=ranks_per_node)
    with pytest.raises(RecipeError, match="there are 12 ranks, 3 a node"):
        check_recipe(recipe, SHAPE, world=12, ranks_per_node=3)


@pytest.mark.parametrize(
    ("size", "train", "world", "ranks_per_node", "fits"),
    [
        (2, 2, 10, 4, True),
        (4, 1, 5, 5, True),  # not where a multiple of its size begins, but on one node
        (4, 2, 10, 8, False),  # 6 to 9
        (8, 4, 12, 4, True),
        (8, 2, 10, 4, False),  # parts of three nodes
    ],
)
def test_engines_beside_ranks_that_train_lie_well(
    tmp_path: Path, size: int, train: int, world: int, ranks_per_node: int, fits: bool
) -> None:
    placement = f"placement={{type: disaggregated, train_ranks: {train}}}"
    recipe = load(tmp_path, RL, f"rollout.tensor_parallel={size}", placement)
    if fits:
        return check_recipe(recipe, SHAPE, world=world, ranks_per_node=ranks_per_node)
    with pytest.raises(RecipeError, match=f"ranks {train} to {world - 1} roll out, {ranks_per_node} a node"):
        check_recipe(recipe, SHAPE, world=world, ranks_per_node=ranks_per_node)


def test_placements_say_who_trains_and_who_rolls_out(tmp_path: Path) -> None:
    roles = {}
    for placement in ("{type: colocated}", "{type: disaggregated, train_ranks: 3}", "{type: hybrid, train_ranks: 3}"):
        recipe = load(tmp_path, RL, f"placement={placement}")
        roles[recipe.placement.type] = (recipe.train_ranks(8), list(recipe.rollout_ranks(8)))
    assert roles == {
        "colocated": (8, [0, 1, 2, 3, 4, 5, 6, 7]),
        "disaggregated": (3, [3, 4, 5, 6, 7]),
        "hybrid": (3, [0, 1, 2, 3, 4, 5, 6, 7]),
    }


def test_the_batch_of_an_sft_recipe_is_enough_for_the_data_parallel_ranks(tmp_path: Path) -> None:
    recipe = load(tmp_path, SFT)
    for world in (1, 2, 4, 8):
        check_recipe(recipe, SHAPE, world=world, ranks_per_node=world)
    with pytest.raises(RecipeError, match=r"batch.sequences: 8 sequences are less than the 9 data-parallel ranks"):
        check_recipe(recipe, SHAPE, world=9, ranks_per_node=9)

"""Everything that can be known to be wrong before a model is built, and what each rank would do."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from megarl.config import (
    AnyRecipe,
    Critic,
    Head,
    HeadName,
    InformativeGroups,
    Layout,
    ModelShape,
    Own,
    OwnRule,
    RecipeError,
    Reward,
    RewardEngine,
    RewardHead,
    RewardModelRecipe,
    RlRecipe,
    SftRecipe,
    check_layout,
    check_recipe,
    engine_leaders,
    load_function,
    read_model_shape,
    scorer_leaders,
    train_place,
)
from megarl.data import (
    DataError,
    PromptSet,
    encode_conversations,
    load_tokenizer,
    prompt_ids,
    read_conversations,
    read_preferences,
    whole_pairs,
)
from megarl.trainer.run_state import RunDirectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def preflight(recipe: AnyRecipe, *, world: int, ranks_per_node: int, resume: bool) -> ModelShape:
    """Check recipe, model directory, data and run directory; returns the model's shape.

    Raises RecipeError or DataError with what was given, what was expected and what to do.
    """
    try:
        shape = read_model_shape(recipe.model.path, recipe.head)
        check_recipe(recipe, shape, world=world, ranks_per_node=ranks_per_node)
        _check_run_directory(recipe, resume=resume)
        _check_weights(recipe.model.path)
        tokenizer = _checked_tokenizer(recipe.model.path, shape)
        match recipe:
            case SftRecipe():
                _check_conversations(recipe, tokenizer, shape)
            case RewardModelRecipe():
                _check_padding(recipe.model.path, shape.head, tokenizer)
                _check_preferences(recipe, tokenizer, shape)
            case RlRecipe():
                _check_models(recipe, shape, world)
                _check_problems(recipe, tokenizer, shape)
                _check_own_functions(recipe)
    except OSError as error:
        raise RecipeError(f"{error.filename or recipe.model.path}: {error.strerror or error}") from None
    return shape


def _check_weights(path: Path) -> None:
    """Each weight file is there and whole; only the files' heads are read."""
    for file in _weight_files(path):
        if not file.is_file():
            raise RecipeError(f"model.path: {file} is missing; expected *.safetensors weights beside config.json")
        file.open("rb").close()  # safe_open calls a file that may not be read missing
        try:
            with safe_open(file, "numpy"):
                pass
        except SafetensorError as error:
            raise RecipeError(f"model.path: {file} is cut off or damaged ({error}); copy or convert it again") from None


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return [path / "model.safetensors"]
    try:
        files = sorted({path / name for name in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, AttributeError, TypeError):
        files = []
    if not files:
        raise RecipeError(
            f"model.path: {index} is damaged; expected an object with a weight_map from tensor names to files"
        )
    return files


def _checked_tokenizer(path: Path, shape: ModelShape) -> PreTrainedTokenizerFast:
    try:
        tokenizer = load_tokenizer(path)
    except DataError as error:
        raise DataError(f"model.path: {error}") from error
    # not its length: ids may have gaps. Special ones may lie beyond the vocabulary, as Gemma's for images does
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    tokens = max((number for text, number in tokenizer.get_vocab().items() if text not in special), default=-1) + 1
    if tokens > shape.vocab:
        raise RecipeError(
            f"model.path: {path}: the tokenizer has token ids up to {tokens - 1} and config.json's vocab_size is only"
            f" {shape.vocab}; tokenizer and weights must be of one model"
        )
    try:
        ids = prompt_ids(tokenizer, "a prompt")
    except Exception as error:  # noqa: BLE001 (a template is a program, and may raise anything)
        raise RecipeError(f"model.path: {path}: the chat template cannot be applied: {error}") from None
    if not ids:
        raise RecipeError(f"model.path: {path}: the chat template makes nothing of a message; correct it")
    return tokenizer


def _check_conversations(recipe: SftRecipe, tokenizer: PreTrainedTokenizerFast, shape: ModelShape) -> None:
    with _naming("data.train", recipe.data.train):
        conversations = read_conversations(recipe.data.train)
        encode_conversations(tokenizer, conversations, shape.max_positions, recipe.data.roles)


def _check_preferences(recipe: RewardModelRecipe, tokenizer: PreTrainedTokenizerFast, shape: ModelShape) -> None:
    for key, path in (("data.train", recipe.data.train), ("data.test", recipe.data.test)):
        with _naming(key, path):
            encode_conversations(tokenizer, whole_pairs(read_preferences(path)), shape.max_positions)


_SCORED_BY_ENGINES = tuple(f"{family}ForSequenceClassification" for family in ("Llama", "Qwen2", "Qwen3"))


def _check_models(recipe: RlRecipe, policy: ModelShape, world: int) -> None:
    """Critic and reward models are there, and read the policy's tokens."""
    named: list[tuple[str, Path, HeadName, bool]] = []
    if isinstance(recipe.critic, Critic):
        named.append(("critic.model.path", recipe.critic.model.path, "critic", False))
    for name, source in (recipe.reward.models | recipe.reward.engines).items():
        served = isinstance(source, RewardEngine)
        named.append((f"reward.sources.{name}.model.path", source.model.path, "reward", served))
    vocabulary, tokenizer = (recipe.model.path / "tokenizer.json").read_bytes(), load_tokenizer(recipe.model.path)
    for key, path, head, served in named:
        try:
            shape = read_model_shape(path, head)
            if isinstance(shape.head, RewardHead):
                _check_padding(path, shape.head, tokenizer)
                _check_scores(path, shape.head, served=served)
            if not served:
                check_layout(recipe, shape, world)
            _check_weights(path)
            if served:
                _check_score_layer(path, shape.hidden)
        except RecipeError as error:
            raise RecipeError(f"{key}: {str(error).removeprefix('model.path: ')}") from None
        if shape.max_positions < policy.max_positions:
            raise RecipeError(
                f"{key}: {path} has {shape.max_positions} positions and the policy {policy.max_positions}; it must read"
                " all that the policy may write"
            )
        if (path / "tokenizer.json").read_bytes() != vocabulary:
            raise RecipeError(f"{key}: {path} has another tokenizer.json than the policy; the models share tokens")


def _check_padding(path: Path, head: Head, tokenizer: PreTrainedTokenizerFast) -> None:
    if isinstance(head, RewardHead) and tokenizer.eos_token_id == head.padding:
        raise RecipeError(
            f"model.path: {path}: its padding is the eos token, with which answers end, so that they would be scored"
            " before it; train it with another pad_token_id"
        )


def _check_scores(path: Path, head: RewardHead, *, served: bool) -> None:
    if head.missing:
        raise RecipeError(f"{path} has no layer that scores; expected the result of a recipe of type reward_model")
    if served and head.architecture not in _SCORED_BY_ENGINES:
        raise RecipeError(
            f"{path} is {head.architecture}, and of engines it is known only that they score"
            f" {', '.join(_SCORED_BY_ENGINES)} right; use type model, which scores others on the ranks that train"
        )


def _check_score_layer(path: Path, hidden: int) -> None:
    """SGLang takes what a file lacks as it comes, at random."""
    for file in _weight_files(path):
        with safe_open(file, "numpy") as tensors:
            if "score.weight" in tensors.keys():  # noqa: SIM118 (it is no dictionary)
                if (found := tensors.get_slice("score.weight").get_shape()) == [1, hidden]:
                    return
                raise RecipeError(f"{file}: score.weight has the shape {found}, expected {[1, hidden]}")
    raise RecipeError(f"{path}: no tensor score.weight in its files; copy or convert it again")


def _check_own_functions(recipe: RlRecipe) -> None:
    algorithm = {"algorithm.advantage": recipe.algorithm.advantage, "algorithm.loss": recipe.algorithm.loss}
    sources = {f"reward.sources.{name}": rule for name, rule in recipe.reward.rules.items()}
    for key, section in (algorithm | sources).items():
        if isinstance(section, Own | OwnRule):
            try:
                load_function(section.function, 2 if isinstance(section, OwnRule) else 1, section.options)
            except ValueError as error:
                raise RecipeError(f"{key}.function: {error}") from None


def _check_problems(recipe: RlRecipe, tokenizer: PreTrainedTokenizerFast, shape: ModelShape) -> None:
    room = {"max_positions": shape.max_positions, "max_new_tokens": recipe.rollout.max_new_tokens}
    with _naming("data.train", recipe.data.train):
        train = PromptSet(recipe.data.train, tokenizer, **room)
    with _naming("data.test", recipe.data.test):
        test = PromptSet(recipe.data.test, tokenizer, count=recipe.evaluation.problems, **room)
    _check_datasets(recipe.reward, train.datasets, test.datasets)
    for name, source in recipe.reward.engines.items():
        positions, most = read_model_shape(source.model.path, "reward").max_positions, recipe.rollout.max_new_tokens
        if train.longest + most >= positions:  # SGLang keeps the last one for a token that is not generated here
            raise RecipeError(
                f"reward.sources.{name}: its engine reads {positions - 1} tokens, less than the longest prompt"
                f" ({train.longest}) and rollout.max_new_tokens ({most}); lower that, or use type model"
            )
    with _naming("data.train", recipe.data.train):
        _check_routes(recipe, train, judged=isinstance(recipe.batch.sampling, InformativeGroups))
    with _naming("data.test", recipe.data.test):
        _check_routes(recipe, test, judged=True)


def _check_datasets(reward: Reward, train: set[str], test: set[str]) -> None:
    """What a source is said to score is there. Rules alone score rows of data.test."""
    for name, source in reward.sources.items():
        there, where = (train | test, "") if name in reward.rules else (train, " of data.train")
        for unknown in sorted(set(source.datasets or ()) - there):
            known = [repr(dataset) for dataset in sorted(there) if dataset] + ["rows without one"] * ("" in there)
            missing = f"has the dataset {unknown!r}" if unknown else "is without a dataset"
            raise RecipeError(f"reward.sources.{name}.datasets: no row{where} {missing}; there are {', '.join(known)}")


def _check_routes(recipe: RlRecipe, prompts: PromptSet, *, judged: bool) -> None:
    """Each row has a source, an answer if it has a rule, and if it is `judged` a rule."""
    for line in range(1, len(prompts) + 1):
        row = prompts[line - 1]
        where = f"line {line} ({f'dataset {row.dataset!r}' if row.dataset else 'no dataset'})"
        judge = recipe.reward.judge(row.dataset)
        if not any(source.scores(row.dataset) for source in recipe.reward.sources.values()):
            raise DataError(f"{where}: no source of reward.sources scores it; name {row.dataset!r} in one's datasets")
        if judge is None and judged:
            raise DataError(
                f"{where}: no rule of reward.sources scores it, so that nothing says what is right; add one with weight"
                " 0, or set evaluation.problems to 0 and batch.sampling.type to all"
            )
        if judge is not None and not row.answer.strip():
            raise DataError(f"line {line}: no answer, which the rule {judge} compares with")


@contextmanager
def _naming(key: str, path: Path) -> Iterator[None]:
    """A complaint about data starts with the recipe's key and the file, once."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{key}: {path}: {str(error).removeprefix(f'{path}: ')}") from error


def _check_run_directory(recipe: AnyRecipe, *, resume: bool) -> None:
    there = path = recipe.directory
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise RecipeError(f"run_dir: {path} cannot be made, since {there} is no directory; give another run_dir")
    if not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        raise RecipeError(
            f"run_dir: {path} cannot be written, since {there} is not writable for you; give another run_dir"
        )
    RunDirectory(path).check(recipe.type, resume=resume)


def describe_models(recipe: AnyRecipe, shape: ModelShape, *, world: int) -> Iterator[str]:
    """One line a model of the run: what it is, and where; and what placement, engines and mode come to."""
    yield f"model: {_size(shape)}"
    if not isinstance(recipe, RlRecipe):
        return
    if recipe.algorithm.kl.coefficient:
        yield f"reference: {recipe.model.path}, {_size(shape)}, frozen, in the model's layout"
    if isinstance(recipe.critic, Critic):
        path = recipe.critic.model.path
        yield f"critic: {path}, {_size(read_model_shape(path, 'critic'))}, trained in the model's layout"
    for name, source in (recipe.reward.models | recipe.reward.engines).items():
        path = source.model.path
        where = "on an engine of its own" if isinstance(source, RewardEngine) else "frozen, in the model's layout"
        yield f"reward.sources.{name}: {path}, {_size(read_model_shape(path, 'reward'))}, {where}"
    rollout, size = recipe.rollout, recipe.rollout.tensor_parallel
    engines = len(recipe.rollout_ranks(world)) // size
    numbers = "float8 with bfloat16" if rollout.fp8 else recipe.engine_dtype
    yield (
        f"rollouts: {engines} engine{'s' * (engines > 1)} of {size} rank{'s' * (size > 1)} each, in {numbers},"
        f" policy {rollout.policy}, weights by {recipe.publish.type}"
    )
    train, placed = recipe.train_ranks(world), len(recipe.rollout_ranks(world))
    meanwhile = {
        "colocated": "engines wait while the model trains",
        "hybrid": "engines on ranks that train wait meanwhile",
        "disaggregated": "engines may go on while the model trains",
    }[recipe.placement.type]
    yield f"placement: {recipe.placement.type}, of {world} ranks {train} train, {placed} roll out; {meanwhile}"
    yield f"mode: {_mode(recipe)}"


def _mode(recipe: RlRecipe) -> str:
    mode, at_once = recipe.mode, f"at most {recipe.most_groups} groups at once"
    if not mode.max_lag:
        return f"synchronous, {at_once}"
    corrected = f"algorithm.correction {recipe.algorithm.correction.type}"
    then = "go on with new weights" if mode.interrupt else "are finished before new weights, and training waits"
    return f"tokens lag by {mode.max_lag} versions at most, {at_once}; responses under way {then}; {corrected}"


def _size(shape: ModelShape) -> str:
    return f"{shape.family}, {shape.parameters / 1e6:.2f}M parameters, {shape.layers} layer{'s' * (shape.layers > 1)}"


def describe_ranks(recipe: AnyRecipe, shape: ModelShape, *, world: int) -> Iterator[str]:
    """One line a rank: its coordinates, layers, experts, vocabulary rows and engine, all counted from 0."""
    train = recipe.train_ranks(world)
    for rank in range(world):
        parts = [_part_of_model(recipe.layout, shape, rank, train) if rank < train else "does not train"]
        if isinstance(recipe, RlRecipe):
            parts += _engines_of(recipe, rank, world)
        yield f"rank {rank}: {'; '.join(parts)}"


def _part_of_model(layout: Layout, shape: ModelShape, rank: int, train: int) -> str:
    """What one of `train` ranks has of it."""
    rows, parts = shape.padded_vocab(layout.tensor) // layout.tensor, layout.pipeline * layout.interleave
    layers, place = shape.layers // parts, train_place(rank, train, layout)
    firsts = [part * layers for part in range(place.pipeline, parts, layout.pipeline)]
    spans = [_span("layer", first, layers) for first in firsts]
    if shape.experts and any(shape.has_experts(first + i) for first in firsts for i in range(layers)):
        count = shape.experts.count // layout.expert
        spans.append(_span("expert", place.expert * count, count))
    if place.pipeline in (0, layout.pipeline - 1):  # embedding and output
        spans.append(_span("vocabulary row", place.tensor * rows, rows))
    others = "".join(
        f" {name} {getattr(place, name)}/{size},"
        for name in ("context", "expert", "expert_tensor")
        if (size := getattr(layout, name)) > 1
    )
    return (
        f"tensor {place.tensor}/{layout.tensor}, pipeline {place.pipeline}/{layout.pipeline},{others}"
        f" data {place.data}/{train // layout.model_ranks}; {', '.join(spans)}"
    )


def _engines_of(recipe: RlRecipe, rank: int, world: int) -> Iterator[str]:
    """What a rank starts."""
    ranks, size, sources = recipe.rollout_ranks(world), recipe.rollout.tensor_parallel, recipe.reward.engines
    leaders = engine_leaders(ranks, size)
    if rank in leaders:
        yield f"starts engine {leaders.index(rank)} on {_span('rank', rank, size)}"
    for name, leader in scorer_leaders(ranks, sources).items():
        if leader == rank:
            yield f"starts reward engine {name} on {_span('rank', rank, sources[name].tensor_parallel)}"
    if rank == 0:
        yield "coordinator"


def _span(what: str, first: int, count: int) -> str:
    return f"{what} {first}" if count == 1 else f"{what}s {first}-{first + count - 1}"

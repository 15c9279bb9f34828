"""Checks that join sections of a recipe, the model's shape and the world size.

Called on the login node by a dry run and by every rank before anything is built.
"""

from __future__ import annotations

from megarl.config.algorithm import AdaptiveKl, GaeAdvantage, ImportanceCorrection, PassAtKAdvantage, RemaxAdvantage
from megarl.config.errors import RecipeError
from megarl.config.model import ModelShape
from megarl.config.recipe import AnyRecipe, Critic, InformativeGroups, Layout, RlRecipe, SftBatch
from megarl.config.reward import Serving
from megarl.config.rollout import Colocated, DirectPublish, FullPublish, Rollout

_MOST_NAMED = 64


def check_recipe(recipe: AnyRecipe, shape: ModelShape, *, world: int, ranks_per_node: int) -> None:
    """Raise RecipeError with every reason why `recipe` cannot run on `world` ranks, and what to change."""
    train = recipe.train_ranks(world)
    problems = [*layout_problems(recipe.layout, shape, train), *_optimizer(recipe), *_balance(recipe, shape)]
    if isinstance(recipe, RlRecipe):
        problems += [*_placement(recipe, world), *_algorithm(recipe), *_groups(recipe), *_mode(recipe)]
        problems += _reward(recipe)
    if not problems:
        problems += _batch(recipe, data=train // recipe.layout.model_ranks)
    if isinstance(recipe, RlRecipe):
        problems += _rollout(recipe, shape, recipe.rollout_ranks(world), ranks_per_node)
    if problems:
        raise RecipeError("\n".join(problems))


def check_layout(recipe: AnyRecipe, shape: ModelShape, world: int) -> None:
    """Raise RecipeError if a model of `shape` cannot be divided as the recipe says."""
    if problems := layout_problems(recipe.layout, shape, recipe.train_ranks(world)):
        raise RecipeError("\n".join(problems))


def _placement(recipe: RlRecipe, world: int) -> list[str]:
    if isinstance(recipe.placement, Colocated):
        return []
    train, problems = recipe.placement.train_ranks, []
    if train >= world:
        problems.append(
            f"placement.train_ranks: {train} of {world} ranks leave none that only rolls out; start more ranks, lower"
            " it, or use type colocated"
        )
    if isinstance(recipe.publish, FullPublish):
        problems.append(
            "publish.type: full has ranks send the model that they train, and not all that have an engine train here;"
            " use direct or disk"
        )
    return problems


def layout_problems(layout: Layout, shape: ModelShape, train: int) -> list[str]:
    """Every reason why a model of `shape` cannot be divided so over `train` ranks, and what to change."""
    ranks = layout.model_ranks
    problems = []
    if train % ranks:
        problems.append(
            f"layout: {train} ranks cannot be divided into tensor {layout.tensor} x pipeline {layout.pipeline}"
            f" x context {layout.context} = {ranks}; train on a multiple of {ranks} ranks or change layout"
        )
    # ranks that share a key-value head hold equal parts of its group's rows, and gather what they compute
    rows = 2 * shape.kv_heads * shape.head_dim
    if wrong := _indivisible(shape, layout.tensor, rows):
        problems.append(
            f"layout.tensor: {layout.tensor} does not divide the model's {', '.join(wrong)};"
            f" use one of {_dividing(shape, rows)}"
        )
    return [*problems, *_pipeline(layout, shape), *_experts(layout, shape, train)]


def _pipeline(layout: Layout, shape: ModelShape) -> list[str]:
    parts = layout.pipeline * layout.interleave
    if layout.interleave > 1 and layout.pipeline == 1:
        return [f"layout.interleave: {layout.interleave} parts need a pipeline to interleave; set layout.pipeline or 1"]
    if shape.layers % parts == 0:
        return []
    good = f"use one of {_divisors(shape.layers)}"
    if layout.interleave == 1:
        return [f"layout.pipeline: {parts} does not divide the model's {shape.layers} layers; {good}"]
    return [f"layout: pipeline x interleave = {parts} does not divide the model's {shape.layers} layers; {good}"]


def _experts(layout: Layout, shape: ModelShape, train: int) -> list[str]:
    if layout.expert == layout.expert_tensor == 1:
        return []
    if shape.experts is None:
        return ["layout: expert and expert_tensor are for models with experts, and this one has none; set both to 1"]
    problems = []
    if shape.experts.count % layout.expert:
        problems.append(
            f"layout.expert: {layout.expert} does not divide the model's {shape.experts.count} experts;"
            f" use one of {_divisors(shape.experts.count)}"
        )
    if shape.experts.ffn % layout.expert_tensor:
        problems.append(
            f"layout.expert_tensor: {layout.expert_tensor} does not divide the experts' width ({shape.experts.ffn});"
            f" use one of {_divisors(shape.experts.ffn)}"
        )
    if shape.experts.bias and layout.expert_tensor > 1:
        problems.append("layout.expert_tensor: experts with biases cannot be split; set it to 1 and use layout.expert")
    stage = train // layout.pipeline
    if stage % (layout.expert * layout.expert_tensor):
        problems.append(
            f"layout: the {stage} ranks of a pipeline stage cannot be divided into expert {layout.expert}"
            f" x expert_tensor {layout.expert_tensor}; make them divide it"
        )
    return problems


def _optimizer(recipe: AnyRecipe) -> list[str]:
    if recipe.optimizer.warmup_steps > recipe.steps:
        return [
            f"optimizer.warmup_steps: {recipe.optimizer.warmup_steps} is more than steps ({recipe.steps}),"
            " so the learning rate would never reach its peak; make it smaller"
        ]
    return []


def _balance(recipe: AnyRecipe, shape: ModelShape) -> list[str]:
    used = [name for name, value in recipe.balance if value]
    if used and shape.experts is None:
        return [f"balance: {' and '.join(used)} are for models with experts, and this one has none; leave them out"]
    if recipe.balance.bias_update_rate and shape.experts is not None and not shape.experts.correction_bias:
        return ["balance.bias_update_rate: this model's routers have no correction bias; leave it out"]
    return []


def _batch(recipe: AnyRecipe, data: int) -> list[str]:
    if not isinstance(recipe, RlRecipe):
        batch = recipe.batch
        what, size = ("sequences", batch.sequences) if isinstance(batch, SftBatch) else ("pairs", 2 * batch.pairs)
        if size < data:
            return [
                f"batch.{what}: {size} sequences are less than the {data} data-parallel ranks, some of which would be"
                f" idle; use more {what} or fewer ranks"
            ]
        return []
    minibatches = recipe.algorithm.minibatches
    if recipe.sequences % minibatches or recipe.sequences // minibatches < data:
        return [
            f"algorithm.minibatches: {recipe.batch.prompts} prompts x {recipe.batch.group_size} samples ="
            f" {recipe.sequences} sequences cannot be divided evenly into {minibatches} parts of at least {data}"
            " (one for each data-parallel rank); use fewer minibatches or more prompts"
        ]
    return []


def _algorithm(recipe: RlRecipe) -> list[str]:
    algorithm, problems = recipe.algorithm, []
    has_critic, wants_critic = isinstance(recipe.critic, Critic), isinstance(algorithm.advantage, GaeAdvantage)
    if wants_critic and not has_critic:
        problems.append("algorithm.advantage: gae needs the values of a critic; set critic.type=critic and its model")
    if has_critic and not wants_critic:
        problems.append("critic: only the gae advantage uses one; set algorithm.advantage.type=gae or leave critic out")
    if algorithm.kl.where == "reward" and not algorithm.kl.coefficient:
        problems.append("algorithm.kl.where: reward says what a coefficient of 0 does; set algorithm.kl.coefficient")
    if algorithm.kl.estimator == "full" and algorithm.kl.coefficient and recipe.layout.pipeline > 1:
        problems.append(
            f"algorithm.kl.estimator: full needs the whole reference model on a rank, and layout.pipeline is"
            f" {recipe.layout.pipeline}; use k2 or k3, or set layout.pipeline=1"
        )
    if isinstance(algorithm.kl.control, AdaptiveKl) and not algorithm.kl.coefficient:
        problems.append("algorithm.kl.control: adaptive needs one to start from; set algorithm.kl.coefficient")
    if isinstance(algorithm.correction, ImportanceCorrection) and algorithm.correction.low >= algorithm.correction.high:
        problems.append("algorithm.correction: low must be below high")
    return problems


def _groups(recipe: RlRecipe) -> list[str]:
    advantage, batch, problems = recipe.algorithm.advantage, recipe.batch, []
    size, sampling = batch.group_size, batch.sampling
    if recipe.algorithm.compares and size < 2:
        problems.append(
            f"batch.group_size: 1 sample has nothing to be compared with, and the {advantage.type} advantage compares"
            " those of a group; use 2 or more, or gae, remax or reinforce_plus_plus without group_baseline"
        )
    if isinstance(advantage, PassAtKAdvantage) and advantage.k > size:
        problems.append(f"algorithm.advantage.k: {advantage.k} is more than batch.group_size ({size}); make it smaller")
    if isinstance(sampling, InformativeGroups):
        if not any(sampling.low < right / size < sampling.high for right in range(size + 1)):
            problems.append(
                f"batch.sampling: the share of right ones among {size} samples is never between {sampling.low:g} and"
                f" {sampling.high:g}, so that no group would be taken; use more samples, other bounds or type all"
            )
        if sampling.ask is not None and sampling.ask < batch.prompts:
            problems.append(
                f"batch.sampling.ask: {sampling.ask} is less than batch.prompts ({batch.prompts}); use at least that"
            )
    if recipe.rollout.chunk_tokens is not None and recipe.rollout.policy not in ("context", "divided"):
        problems.append(
            f"rollout.chunk_tokens: {recipe.rollout.policy} has whole responses generated; leave it out, or use context"
            " or divided"
        )
    return problems


def _mode(recipe: RlRecipe) -> list[str]:
    mode, prompts, problems = recipe.mode, recipe.batch.prompts, []
    most = (mode.max_lag + 1) * prompts
    if not prompts <= recipe.most_groups <= most:
        bounds = (
            f"use at least batch.prompts ({prompts}), which a step takes, and at most (max_lag + 1) x batch.prompts"
            f" ({most}), so that none becomes too old"
        )
        if not mode.max_lag:
            bounds = f"with max_lag 0 these are batch.prompts ({prompts}); leave it out, or raise mode.max_lag"
        problems.append(f"mode.ask: {mode.ask} groups at once; {bounds}")
    if mode.interrupt and not mode.max_lag:
        problems.append(
            "mode.interrupt: with max_lag 0 all responses are finished when the weights change; leave it out, or set"
            " mode.max_lag"
        )
    if mode.max_lag and not mode.interrupt and recipe.takes_turns:
        problems.append(
            f"mode.interrupt: with placement {recipe.placement.type} rollouts and training take turns on the same"
            " ranks, and responses that are under way wait while the weights change; set mode.interrupt=true or"
            " mode.max_lag=0, or use placement disaggregated"
        )
    if mode.max_lag and isinstance(recipe.batch.sampling, InformativeGroups):
        problems.append(
            "batch.sampling: a step that looks for informative groups asks for them itself; use type all with"
            " mode.max_lag, or max_lag 0"
        )
    return problems


def _reward(recipe: RlRecipe) -> list[str]:
    reward, problems = recipe.reward, []
    if not any(source.weight for source in reward.sources.values()):
        problems.append("reward.sources: all weights are 0, so that nothing would be learned; give one source another")
    if isinstance(recipe.algorithm.advantage, RemaxAdvantage):
        unfit = [*reward.models, *(name for name, source in reward.sources.items() if source.standardise)]
        if unfit:
            problems.append(
                f"reward.sources.{unfit[0]}: remax scores greedy answers as they come, which rules and engines can;"
                " use type engine for a reward model, and leave standardise out"
            )
    if isinstance(recipe.algorithm.advantage, RemaxAdvantage) and reward.overlong_buffer:
        problems.append("reward.overlong_buffer: remax compares with greedy answers as they come; leave it out")
    if reward.overlong_buffer >= recipe.rollout.max_new_tokens:
        problems.append("reward.overlong_buffer: must be smaller than rollout.max_new_tokens")
    return problems


def _rollout(recipe: RlRecipe, shape: ModelShape, ranks: range, ranks_per_node: int) -> list[str]:
    problems = engine_problems(shape, recipe.rollout.tensor_parallel, recipe.rollout.expert_parallel)
    problems += _fp8(recipe, shape)
    served: dict[str, Serving] = {f"reward.sources.{name}": source for name, source in recipe.reward.engines.items()}
    for key, serving in ({"rollout": recipe.rollout} | served).items():
        problems += _serving(key, serving, ranks, ranks_per_node)
    problems += [
        f"rollout.server_args.{name}: would change where engines keep weights, so that no new ones could be sent;"
        " leave it out"
        for name in _PLACES
        if name in recipe.rollout.server_args
    ]
    if recipe.rollout.max_new_tokens >= shape.max_positions:
        problems.append(
            f"rollout.max_new_tokens: {recipe.rollout.max_new_tokens} leaves no room for a prompt in the model's"
            f" {shape.max_positions} positions; make it smaller"
        )
    return problems


_OWNED = (
    "api_key",
    "custom_weight_loader",
    "dtype",
    "ep_size",
    "host",
    "model_path",
    "nccl_port",
    "port",
    "random_seed",
    "tp_size",
    "weight_version",
)


_PLACES = ("dp_size", "json_model_override_args", "load_format", "pp_size", "quantization")


def _serving(key: str, serving: Serving, ranks: range, ranks_per_node: int) -> list[str]:
    problems, size, spans = [], serving.tensor_parallel, isinstance(serving, Rollout)
    if len(ranks) % size or not all(_lies_well(first, size, ranks_per_node, spans) for first in ranks[::size]):
        places = "on one node or on whole ones" if spans else "on one node"
        first, last = ranks.start, ranks[-1]
        apart = f"ranks {first} to {last} roll out" if first < last else f"only rank {last} rolls out"
        there = apart if first else f"there are {len(ranks)} ranks"
        problems.append(
            f"{key}.tensor_parallel: engines of {size} ranks must divide those that roll out evenly, and each lie"
            f" {places}; {there}, {ranks_per_node} a node"
        )
    owned = [name for name in _OWNED if name in serving.server_args]
    return problems + [f"{key}.server_args.{name}: megarl sets this one itself; leave it out" for name in owned]


def _lies_well(first: int, size: int, ranks_per_node: int, spans: bool) -> bool:
    """Whether the engine of the ranks from `first` on is on one node, or if it `spans` several on whole ones."""
    whole = first % ranks_per_node == size % ranks_per_node == 0
    return (whole and spans) or first // ranks_per_node == (first + size - 1) // ranks_per_node


def _sizes(shape: ModelShape) -> dict[str, int]:
    """What tensor-parallel ranks divide."""
    sizes = {"attention heads": shape.heads, "key-value heads": shape.kv_heads}
    experts, latent = shape.experts, shape.latent
    if experts is None or len(experts.layers) < shape.layers:
        sizes["MLP width"] = shape.ffn
    if experts is not None and experts.shared_ffn:
        sizes["width of the shared expert"] = experts.shared_ffn
    if latent is not None:
        sizes["rows of keys and values"] = latent.kv_rank + latent.rope
        if latent.query_rank is not None:
            sizes["rank of queries"] = latent.query_rank
    return sizes


def _indivisible(shape: ModelShape, ranks: int, rows: int) -> list[str]:
    """What `ranks` ranks cannot divide; several of them may have one key-value head if they divide `rows`."""
    shared = ranks % shape.kv_heads == 0 and rows % ranks == 0
    sizes = _sizes(shape).items()
    return [f"{what} ({n})" for what, n in sizes if n % ranks and not (what == "key-value heads" and shared)]


def _dividing(shape: ModelShape, rows: int) -> str:
    return ", ".join(str(n) for n in range(1, _MOST_NAMED + 1) if not _indivisible(shape, n, rows))


def engine_problems(shape: ModelShape, size: int, groups: int) -> list[str]:
    """Every reason why engines of `size` ranks cannot hold the model, its experts divided among `groups` of them."""
    problems = _engine_experts(shape, size, groups)
    if wrong := _indivisible(shape, size, rows=0):  # an engine repeats a key-value head that its ranks share
        problems.append(
            f"rollout.tensor_parallel: {size} does not divide the model's {', '.join(wrong)};"
            f" use one of {_dividing(shape, rows=0)}"
        )
    return problems


def _engine_experts(shape: ModelShape, size: int, groups: int) -> list[str]:
    experts = shape.experts
    if experts is None:
        if groups > 1:
            return ["rollout.expert_parallel: this model has no experts; set it to 1"]
        return []
    if experts.bias:
        return [
            "model.path: experts with biases (gpt-oss) can be fine-tuned, but not rolled out: where an engine keeps"
            " them depends on its kernel, so that new weights could not be sent there"
        ]
    if size % groups or experts.count % groups:
        return [
            f"rollout.expert_parallel: {groups} must divide rollout.tensor_parallel ({size}) and the model's"
            f" {experts.count} experts"
        ]
    if experts.ffn % (size // groups):
        return [
            f"rollout: the {size // groups} ranks of an engine that share an expert (tensor_parallel / expert_parallel)"
            f" do not divide the experts' width ({experts.ffn}); use more expert_parallel"
        ]
    return []


_VOCABULARY_MULTIPLE = 64  # SGLang pads to it


def _fp8(recipe: RlRecipe, shape: ModelShape) -> list[str]:
    if not recipe.rollout.fp8:
        return []
    problems = []
    if recipe.engine_dtype != "bfloat16":
        problems.append("rollout.fp8: engines that hold FP8 compute in bfloat16; set rollout.dtype=bfloat16")
    if shape.vocab % _VOCABULARY_MULTIPLE or shape.vocab % recipe.rollout.tensor_parallel:
        problems.append(
            f"rollout.fp8: such engines start from random numbers, also where they pad the vocabulary; the model's"
            f" {shape.vocab} tokens must divide by {_VOCABULARY_MULTIPLE} and by rollout.tensor_parallel"
        )
    if not isinstance(recipe.publish, DirectPublish):
        problems.append(
            f"rollout.fp8: only weights that are sent are made FP8; set publish.type=direct, not {recipe.publish.type}"
        )
    return problems


def _divisors(size: int) -> str:
    return ", ".join(str(n) for n in range(1, min(size, _MOST_NAMED) + 1) if size % n == 0)

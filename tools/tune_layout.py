#!/usr/bin/env python
"""Finds the layouts of training and rollouts with which a recipe's step should be fastest, without a GPU, in seconds.

    python tools/tune_layout.py --workload launch/recipes/rlvr_grpo.yaml --gpu H100 --nodes 1
    python tools/tune_layout.py --model qwen3-8b --stage grpo --gpu H100 --nodes 8 \\
        batch.prompts=512 batch.group_size=16 rollout.max_new_tokens=16384 mode.max_lag=4 mode.interrupt=true
    python tools/tune_layout.py --model deepseek-v3 --stage sft --gpu H800 --nodes 64 --fix recompute=full --top 3

A step is that of --workload, a recipe, with further keys as overrides; without one, that of a plain recipe of --stage.
--model is a Hugging Face directory, of which only config.json is read, or the name of a known model (--list); without
it, it is the recipe's. Critic, reference and reward models on the ranks that train count as models of its size.

Lengths are those of --lengths, a file of JSON lines as in tools/simulate_rollout.py: {"prompt": tokens, "lengths":
[tokens, ...]}, for demonstrations one length a line. Otherwise they are those of the recipe's data, if that and the
model's tokenizer are there, with responses of --response tokens on average.

All sizes that megarl can run are tried, but for those that --fix gives, by the last names of a recipe's keys: tensor,
pipeline, interleave, context, expert, expert_tensor, recompute, overlap, max_tokens_per_rank, placement (colocated or
disaggregated), train_ranks, tensor_parallel (of an engine), mem_fraction_static.

Columns:
  step       seconds of a step, and those of its phases: rollout, score (forward passes of all models), update,
             publish. Where rollouts run ahead (mode.max_lag, ranks of their own) a step takes the longer of rollout
             and training
  MFU        % of the training GPUs' 16-bit peak that the model's own operations are, while it is updated
  train      GPUs, TP, PP, interleave (VP), CP, EP, ETP, DP, thousands of tokens of a rank's micro-batch, recomputation
  memory     GB on a rank of the pipeline stage that needs most, that stage, and what takes most of it
  engines    how many, of how many GPUs, and the share of each GPU's memory for weights and cache
  slower by  what takes longer than in the first plan

Training is predicted by rooflines whose constants tools/bench/layout_accuracy.py checks, rollouts by the simulator;
docs/tune.md says how far both can be trusted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megarl.config import (
    AnyRecipe,
    Layout,
    ModelShape,
    RecipeError,
    RlRecipe,
    SftRecipe,
    dump_recipe,
    load_recipe,
    make_recipe,
    read_model_shape,
)
from megarl.layout import (
    GENERATIONS,
    KNOWN,
    WORK_STAGES,
    Choice,
    Lengths,
    Machine,
    Request,
    Search,
    planned,
    search,
    staged,
    work_of,
)
from megarl.simulator import GPUS, GroupLengths, Workload, read_lengths

PLAIN: dict[str, Any] = {
    "model": {"path": ".", "dtype": "bfloat16"},
    "optimizer": {"learning_rate": 1e-6},
    "steps": 1,
}
PLAIN_STAGES: dict[str, dict[str, Any]] = {
    "sft": {"type": "sft", "data": {"train": "train.jsonl"}, "batch": {"sequences": 512}},
    "grpo": {
        "type": "rl",
        "data": {"train": "train.jsonl", "test": "test.jsonl"},
        "batch": {"prompts": 128, "group_size": 16},
        "rollout": {"max_new_tokens": 8192},
        "reward": {"sources": {"answer": {"type": "math_verify"}}},
    },
}
ROWS_READ = 1000
"""Of the recipe's data."""
NUMBERS = ("max_tokens_per_rank", "train_ranks", "tensor_parallel")


def main() -> None:
    given = arguments()
    if given.list:
        print("\n".join(f"{name:20} {shape.parameters / 1e9:8.1f}e9 parameters" for name, shape in KNOWN.items()))
        return
    started = time.perf_counter()
    try:
        recipe = read_recipe(given)
        request = make_request(given, recipe)
        found = search(request)
    except (RecipeError, ValueError, OSError) as error:
        sys.exit(f"tune_layout: {error}")
    shown = sorted((planned(request, one) for one in found.ranked[: given.top]), key=lambda one: one.seconds)
    if given.json:
        print(json.dumps([as_json(request, choice) for choice in shown], indent=1))
    else:
        print(summary(request, found, time.perf_counter() - started))
        print(table(request, shown))
    if given.write is not None:
        given.write.write_text(dump_recipe(rewritten(recipe, shown[0])))
        print(f"{given.write}: the recipe with the first plan; launch it on {request.gpus} ranks", file=sys.stderr)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", type=Path, help="a recipe")
    parser.add_argument("--model", help="Hugging Face directory, or the name of a known model")
    parser.add_argument("--stage", choices=WORK_STAGES, help="what a step does; by default what the recipe does")
    parser.add_argument("--gpu", default="H100", help=f"one of {', '.join(sorted(GENERATIONS))}")
    parser.add_argument("--nodes", type=positive, default=1)
    parser.add_argument("--gpus-per-node", type=positive, help="8, or 4 of a Grace system")
    parser.add_argument("--lengths", type=Path, help="file of lengths")
    parser.add_argument("--prompt", type=positive, help="tokens of a prompt; by default the data's, or 512")
    parser.add_argument("--response", type=positive, help="its mean tokens; by default half of the most")
    parser.add_argument("--fix", action="append", default=[], metavar="NAME=VALUE", help="a size that is given")
    parser.add_argument("--offload", action="store_true", help="as if colocated phases moved out of each other's way")
    parser.add_argument("--top", type=positive, default=10, help="how many are shown")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the recipe with the first plan")
    parser.add_argument("--list", action="store_true", help="print the known models")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe, such as batch.prompts=512")
    return parser.parse_args()


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def read_recipe(given: argparse.Namespace) -> AnyRecipe:
    """Raises RecipeError or ValueError: what is given is no recipe."""
    if given.workload is not None:
        return load_recipe(given.workload, given.overrides)
    if given.stage is None or given.model is None:
        raise ValueError("expected a recipe (--workload), or a --stage with a --model")
    return make_recipe(plain(given.stage), given.overrides, named=f"--stage {given.stage}")


def plain(stage: str) -> dict[str, Any]:
    """The tree of a recipe."""
    return deepcopy(PLAIN | PLAIN_STAGES["sft" if stage == "sft" else "grpo"])


def make_request(given: argparse.Namespace, recipe: AnyRecipe) -> Request:
    """Raises RecipeError or ValueError."""
    shape = read_shape(given.model or str(recipe.model.path))
    name = {known.lower(): known for known in GENERATIONS}.get(given.gpu.lower())
    if name is None:
        raise ValueError(f"--gpu {given.gpu}: expected one of {', '.join(sorted(GENERATIONS))}")
    node = given.gpus_per_node or (4 if name.startswith("G") else 8)
    groups, prompt = read_data(given, recipe, shape)
    fixed, gpus = read_fixed(given.fix), given.nodes * node
    if fixed.get("train_ranks", 0) >= gpus:
        raise ValueError(f"--fix train_ranks: {fixed['train_ranks']} of {gpus} GPUs leave none for engines")
    work = work_of(recipe, Lengths(prompt, given.response), shape, groups)
    if (given.stage is not None and given.workload is not None) or given.stage == "ppo":
        work = staged(work, given.stage)
    return Request(
        shape,
        Machine(GPUS[name], GENERATIONS[name]),
        given.nodes,
        node,
        work,
        precision="fp32" if recipe.model.dtype == "float32" else "bf16",
        fixed=fixed,
        offload=given.offload,
    )


def read_shape(model: str) -> ModelShape:
    """Raises RecipeError: neither a directory nor a known model."""
    path = Path(model)
    if not path.exists():
        if (known := KNOWN.get(model.lower())) is not None:
            return known
        raise RecipeError(f"--model {model}: no such directory, nor a known model ({', '.join(KNOWN)})")
    return read_model_shape(path.parent if path.name == "config.json" else path, fp8=True)


def read_data(given: argparse.Namespace, recipe: AnyRecipe, shape: ModelShape) -> tuple[Workload | None, int]:
    """Measured lengths, if there are any, and tokens of a prompt."""
    if given.lengths is not None:
        return read_lengths(given.lengths), 0
    prompt = given.prompt
    if given.model is None and recipe.data.train.is_file():
        from megarl.data import DataError, PromptSet, encode_conversations, load_tokenizer, read_conversations

        try:
            tokenizer = load_tokenizer(recipe.model.path)
            if isinstance(recipe, SftRecipe):
                rows = read_conversations(recipe.data.train)[:ROWS_READ]
                encoded = encode_conversations(tokenizer, rows, shape.max_positions, recipe.data.roles)
                lengths = [GroupLengths(0, (len(one.input_ids),)) for one in encoded]
                return Workload(tuple(lengths), shape.max_positions), 0
            if isinstance(recipe, RlRecipe) and prompt is None:
                room = {"max_positions": shape.max_positions, "max_new_tokens": recipe.rollout.max_new_tokens}
                prompts = PromptSet(recipe.data.train, tokenizer, count=ROWS_READ, **room)
                prompt = round(sum(len(prompts[i].input_ids) for i in range(len(prompts))) / len(prompts))
        except DataError as error:
            raise ValueError(error) from None
    return None, prompt or Lengths.prompt


def read_fixed(given: list[str]) -> dict[str, Any]:
    """Raises ValueError: not NAME=VALUE, or no such name or value."""
    names = [*Layout.model_fields, *NUMBERS, "mem_fraction_static", "placement"]
    texts: dict[str, str] = {}
    for one in given:
        name, equals, text = one.partition("=")
        if not equals or name not in names:
            raise ValueError(f"--fix {one}: expected NAME=VALUE with a name of {', '.join(names)}")
        texts[name] = text
    fixed: dict[str, Any] = {}
    layout = {name: text for name, text in texts.items() if name in Layout.model_fields}
    for name, text in texts.items():
        try:
            if name in NUMBERS:
                fixed[name] = positive(text)
            elif name == "mem_fraction_static":
                fixed[name] = fraction(text)
            elif name == "placement" and text not in ("colocated", "disaggregated"):
                raise argparse.ArgumentTypeError(f"expected colocated or disaggregated, got {text!r}")
            elif name == "placement":
                fixed[name] = text
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"--fix {name}: {error}") from None
    overrides = [f"layout.{name}={text}" for name, text in layout.items()]
    fields = make_recipe(plain("sft"), overrides, named="--fix").layout.model_dump()
    return fixed | {name: fields[name] for name in layout}


def fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"expected a number between 0 and 1, got {text!r}")
    return value


def summary(request: Request, found: Search, seconds: float) -> str:
    work, counts = request.work, found.counts
    lines = [
        f"{request.shape.parameters / 1e9:.1f}e9 parameters ({request.shape.active_parameters / 1e9:.1f}e9 active), "
        f"{request.gpus} GPUs; a step: {len(work.lengths):,} sequences, {work.tokens:,} tokens, longest "
        f"{max(work.lengths):,}",
        f"{counts.layouts:,} training layouts, {counts.indivisible:,} of which do not divide the model or the GPUs; "
        f"{counts.asked:,} with micro-batches and recomputation, {counts.too_large:,} too large",
    ]
    if work.rollouts is not None:
        lines.append(
            f"{found.engines} layouts of engines timed; {found.plans:,} plans of both, {found.pruned:,} pruned by bounds;"
            f" {found.splits} splits of the GPUs, {found.splits_pruned} pruned"
        )
    return "\n".join([*lines, f"{seconds:.1f} s"])


def table(request: Request, shown: list[Choice]) -> str:
    rollouts = request.work.rollouts is not None
    head = f"{'step':>8} " + (f"{'rollout':>8} {'score':>7} {'update':>7} {'publish':>7} " if rollouts else "")
    head += (
        f"{'MFU':>5} {'GPUs':>5} {'TP':>3} {'PP':>3} {'VP':>3} {'CP':>3} {'EP':>3} {'ETP':>3} {'DP':>4} {'tokens':>6} "
    )
    head += f"{'recompute':<9} {'memory':<34} " + (f"{'engines':<20} " if rollouts else "") + "slower by"
    lines = [head]
    for choice in shown:
        training, phases, serving = choice.trained.training, choice.phases, choice.serving
        layout = training.layout
        line = f"{choice.seconds:7.2f}s "
        if rollouts:
            parts = (phases.rollout, phases.score, phases.update)
            line += f"{parts[0]:8.2f} {parts[1]:7.2f} {parts[2]:7.2f} {phases.publish:7.2f} "
        sizes = (layout.tensor, layout.pipeline, layout.interleave, layout.context, layout.expert)
        line += f"{100 * mfu(request, choice):4.1f}% {choice.train_gpus:5d} "
        line += " ".join(f"{size:3d}" for size in (*sizes, layout.expert_tensor))
        line += f" {training.data:4d} {choice.trained.max_tokens / 1024:5.0f}k {layout.recompute:<9}"
        line += f" {held_in_words(choice):<34} "
        if serving is not None:
            line += f"{f'{serving.count} x {serving.tensor}, {serving.fraction:.2f}':<20} "
        lines.append((line + slower(choice, shown[0])).rstrip())
    return "\n".join(lines)


def mfu(request: Request, choice: Choice) -> float:
    """Of an update, with attention's causal half, as megarl's trainer logs it."""
    work, shape = request.work, request.shape
    pairs = sum(length * length for length in work.lengths)
    flops = 6.0 * shape.active_parameters * work.tokens + 6.0 * shape.layers * shape.heads * shape.head_dim * pairs
    models = 2 if work.critic else 1
    return models * work.epochs * flops / (choice.train_gpus * request.machine.gpu.flops_16 * choice.phases.update)


def held_in_words(choice: Choice) -> str:
    parts = asdict(choice.trained.memory)
    largest = max(parts, key=lambda name: parts[name])
    total = choice.trained.memory.total
    return f"{total / 1e9:.0f} GB, stage {choice.trained.stage}, {largest} {parts[largest] / 1e9:.0f}"


def slower(choice: Choice, best: Choice) -> str:
    """What takes longer than in the best plan, the two largest differences."""
    base, own = seconds_of(best), seconds_of(choice)
    more = {name: own[name] - base[name] for name in own}
    largest = sorted((name for name in more if more[name] > 0.005), key=lambda name: -more[name])[:2]
    return ", ".join(f"{name} {more[name]:.2f} s" for name in largest)


def seconds_of(choice: Choice) -> dict[str, float]:
    """Seconds by what they go to; those of the update's parts are of one of its updates."""
    step, phases = choice.trained.step, choice.phases
    parts = asdict(step.work) | {name: getattr(step, name) for name in ("bubble", "pipeline", "data", "optimizer")}
    return {"rollout": phases.rollout, "score": phases.score} | parts | {"publish": phases.publish}


def as_json(request: Request, choice: Choice) -> dict[str, Any]:
    trained = choice.trained
    return {
        "step_s": choice.seconds,
        "phases_s": {name: value for name, value in asdict(choice.phases).items() if name != "ahead"},
        "ahead": choice.phases.ahead,
        "mfu": mfu(request, choice),
        "placement": choice.placement,
        "train_gpus": choice.train_gpus,
        "layout": trained.training.layout.model_dump(),
        "data": trained.training.data,
        "max_tokens_per_rank": trained.max_tokens,
        "update_s": {**asdict(trained.step.work), "bubble": trained.step.bubble, "data": trained.step.data},
        "memory_bytes": asdict(trained.memory),
        "stage": trained.stage,
        "engines": None if choice.serving is None else asdict(choice.serving),
    }


def rewritten(recipe: AnyRecipe, choice: Choice) -> AnyRecipe:
    """The recipe with the plan in it."""
    changed: dict[str, Any] = recipe.model_dump(mode="json")
    changed["layout"] = choice.trained.training.layout.model_dump()
    changed["batch"]["max_tokens_per_rank"] = choice.trained.max_tokens
    if choice.serving is not None:
        changed["placement"] = {"type": choice.placement}
        if choice.placement == "disaggregated":
            changed["placement"]["train_ranks"] = choice.train_gpus
        serving, rollout = choice.serving, changed["rollout"]
        rollout |= {"tensor_parallel": serving.tensor, "expert_parallel": serving.expert}
        rollout["server_args"] |= {"mem_fraction_static": serving.fraction}
    return make_recipe(changed, [], named="the plan")


if __name__ == "__main__":
    main()

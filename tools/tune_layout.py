#!/usr/bin/env python
"""Finds the layouts of training and rollouts with which a recipe's step should be fastest, without a GPU, in seconds.

    python tools/tune_layout.py --workload launch/recipes/rlvr_grpo.yaml --gpu H100 --nodes 1
    python tools/tune_layout.py --model qwen3-8b --stage grpo --gpu H100 --nodes 8 \\
        batch.prompts=512 batch.group_size=16 rollout.max_new_tokens=16384 mode.max_lag=4 mode.interrupt=true
    python tools/tune_layout.py --model deepseek-v3 --stage sft --gpu H800 --nodes 64 --fix recompute=full --top 3

A step is that of --workload, a recipe, with further keys as overrides; without one, that of a plain recipe of --stage
(ppo: with a critic, and a reference whose divergence is in the reward).
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
  MFU        % of the training GPUs' 16-bit peak that the model's own operations are, while it is updated; with a
             measured table, of the fastest product in it
  train      GPUs, TP, PP, interleave (VP), CP, EP, ETP, DP, most tokens of a micro-batch on a rank, recomputation
  memory     GB on a rank of the pipeline stage that needs most, that stage, and what takes most of it
  engines    how many, of how many GPUs, and the share of each GPU's memory for weights and cache
  slower by  what takes longer than in the first plan
Of plans that differ only in the interleave, micro-batches, recomputation or share of memory, the fastest is a row.

Training is predicted by rooflines whose constants tools/bench/layout_accuracy.py checks, rollouts by the simulator;
docs/tune.md says how far both can be trusted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megarl.config import (
    AnyRecipe,
    Colocated,
    Critic,
    Disaggregated,
    FullPublish,
    Layout,
    ModelShape,
    RecipeError,
    RewardModelRecipe,
    RlRecipe,
    SftRecipe,
    check_recipe,
    dump_recipe,
    load_recipe,
    make_recipe,
    read_model_shape,
)
from megarl.layout import (
    GENERATIONS,
    KNOWN,
    MEGARL,
    MEGARL_CPU,
    WORK_STAGES,
    Choice,
    Lengths,
    Machine,
    Precision,
    Request,
    Software,
    Work,
    as_json,
    in_words,
    planned,
    read_table,
    search,
    staged,
    summary,
    table,
    work_of,
)
from megarl.simulator import GPUS, EngineModel, GroupLengths, Workload, read_lengths
from megarl.simulator import measured as measured_engine

PLAIN: dict[str, Any] = {
    "model": {"path": ".", "dtype": "bfloat16"},
    "optimizer": {"learning_rate": 1e-6},
    "steps": 1,
}
GRPO: dict[str, Any] = {
    "type": "rl",
    "data": {"train": "train.jsonl", "test": "test.jsonl"},
    "batch": {"prompts": 128, "group_size": 16},
    "rollout": {"max_new_tokens": 8192},
    "reward": {"sources": {"answer": {"type": "math_verify"}}},
}
PLAIN_STAGES: dict[str, dict[str, Any]] = {
    "sft": {"type": "sft", "data": {"train": "train.jsonl"}, "batch": {"sequences": 512}},
    "grpo": GRPO,
    "ppo": GRPO
    | {
        "critic": {"type": "critic", "model": PLAIN["model"], "optimizer": PLAIN["optimizer"]},
        "algorithm": {"advantage": {"type": "gae"}, "kl": {"coefficient": 0.01, "where": "reward"}},
    },
}
ROWS_READ = 1000
"""Of the recipe's data."""
ENGINES = ("placement", "train_ranks", "tensor_parallel", "mem_fraction_static")
"""What --fix has beside the sizes of training."""


def main() -> None:
    given = arguments()
    if given.list:
        print("\n".join(f"{name:20} {in_words(shape.parameters):>8} parameters" for name, shape in KNOWN.items()))
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
        show(json.dumps([as_json(request, choice) for choice in shown], indent=1))
    else:
        show(f"{summary(request, found, time.perf_counter() - started)}\n{table(request, shown)}")
    if given.write is not None:
        write(given, recipe, request, shown[0])


def show(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # nobody reads on, as behind | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", type=Path, help="a recipe")
    parser.add_argument("--model", help="Hugging Face directory, or the name of a known model")
    parser.add_argument("--stage", choices=WORK_STAGES, help="what a step does; by default what the recipe does")
    parser.add_argument("--gpu", default="H100", help=f"{', '.join(sorted(GENERATIONS))}, or a measured FILE.json")
    parser.add_argument("--nodes", type=positive, default=1)
    parser.add_argument("--gpus-per-node", type=positive, help="8, or 4 of a Grace system")
    parser.add_argument("--lengths", type=Path, help="file of lengths")
    parser.add_argument("--prompt", type=positive, help="tokens of a prompt; by default the data's, or 512")
    parser.add_argument("--response", type=positive, help="its mean tokens; by default half of the most")
    parser.add_argument("--fix", action="append", default=[], metavar="NAME=VALUE", help="a size that is given")
    parser.add_argument("--offload", action="store_true", help="as if colocated phases moved out of each other's way")
    parser.add_argument("--top", type=positive, default=10, help="how many are shown")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--write", type=Path, metavar="FILE", help="a new file for the recipe with the first plan")
    parser.add_argument("--list", action="store_true", help="print the known models")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe, such as batch.prompts=512")
    return parser.parse_intermixed_args()


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def read_recipe(given: argparse.Namespace) -> AnyRecipe:
    """Raises RecipeError or ValueError: what is given is no recipe."""
    if given.workload is not None:
        recipe = load_recipe(given.workload, given.overrides)
        if given.stage not in (None, "sft") and not isinstance(recipe, RlRecipe):
            raise ValueError(f"--stage {given.stage}: a recipe of type {recipe.type} has no rollouts")
        return recipe
    if given.stage is None or given.model is None:
        raise ValueError("expected a recipe (--workload), or a --stage with a --model")
    return make_recipe(plain(given.stage), given.overrides, named=f"--stage {given.stage}")


def plain(stage: str) -> dict[str, Any]:
    """The tree of a recipe."""
    return deepcopy(PLAIN | PLAIN_STAGES[stage])


def make_request(given: argparse.Namespace, recipe: AnyRecipe) -> Request:
    """Raises RecipeError or ValueError."""
    shape = read_shape(given, recipe)
    precision: Precision = "fp32" if recipe.model.dtype == "float32" else "bf16"
    node, machine, software, engine = read_machine(given, precision)
    groups, prompt = read_data(given, recipe, shape)
    work = work_of(recipe, Lengths(prompt, given.response), shape, groups)
    check_lengths(recipe, work, shape)
    own = work
    if given.stage is not None and given.workload is not None:
        work = staged(work, given.stage)
    asked = Request(
        shape,
        machine,
        given.nodes,
        node,
        work,
        precision=precision,
        fixed=given_sizes(given.fix, recipe, work, given.nodes * node),
        software=software,
        offload=given.offload,
        engine=engine,
    )
    if work != own:  # another kind of step than the recipe's, whose checks say nothing of it
        if given.write is not None:
            raise ValueError(f"--write: a plan for --stage {given.stage} is none for {given.workload}")
        return asked

    def check(choice: Choice) -> None:
        check_recipe(rewritten(recipe, choice), shape, world=asked.gpus, ranks_per_node=node)

    return replace(asked, check=check)


def read_machine(given: argparse.Namespace, precision: Precision) -> tuple[int, Machine, Software, EngineModel | None]:
    """GPUs of a node, what they do, what runs on them, and an engine if one was measured. Raises ValueError."""
    file = Path(given.gpu)
    if file.suffix == ".json" or file.is_file():
        measured = read_table(file)
        node = given.gpus_per_node or measured.ranks_per_node
        machine = measured.machine(given.nodes * node, precision)
        engine = measured_engine(file) if measured.engine is not None else None
        return node, machine, MEGARL if measured.device == "cuda" else MEGARL_CPU, engine
    name = {known.lower(): known for known in GENERATIONS}.get(given.gpu.lower())
    if name is None:
        raise ValueError(f"--gpu {given.gpu}: expected a FILE.json or one of {', '.join(sorted(GENERATIONS))}")
    node = given.gpus_per_node or (4 if name.startswith("G") else 8)
    gpu = GPUS[name] if name.startswith("G") else replace(GPUS[name], linked=node)
    return node, Machine(gpu, GENERATIONS[name]), MEGARL, None


def check_lengths(recipe: AnyRecipe, work: Work, shape: ModelShape) -> None:
    """Raises ValueError: the model has not so many positions."""
    longest = max(work.lengths)
    if isinstance(recipe, RlRecipe) and work.rollouts is not None:
        prompt = max(group.prompt for group in work.rollouts.groups.groups)
        longest = max(longest, prompt + recipe.rollout.max_new_tokens)
    if longest > shape.max_positions:
        raise ValueError(
            f"sequences may have {longest:,} tokens, prompts included, and the model has {shape.max_positions:,}"
            " positions (max_position_embeddings)"
        )


def given_sizes(texts: list[str], recipe: AnyRecipe, work: Work, gpus: int) -> dict[str, Any]:
    """Of --fix, and what the recipe's other choices leave. Raises ValueError."""
    fixed = read_fixed(texts)
    if work.rollouts is None and (unused := [name for name in ENGINES if name in fixed]):
        raise ValueError(f"--fix {unused[0]}: a step that only learns has no engines")
    if fixed.get("train_ranks", 0) >= gpus:
        raise ValueError(f"--fix train_ranks: {fixed['train_ranks']} of {gpus} GPUs leave none for engines")
    if fixed.get("placement") == "colocated" and "train_ranks" in fixed:
        raise ValueError("--fix train_ranks: colocated, all ranks train; use placement=disaggregated or leave it out")
    if isinstance(recipe, RlRecipe):
        if isinstance(recipe.publish, FullPublish):
            fixed.setdefault("placement", "colocated")
        if recipe.algorithm.kl.coefficient and recipe.algorithm.kl.estimator == "full":
            fixed.setdefault("pipeline", 1)
    return fixed


def read_shape(given: argparse.Namespace, recipe: AnyRecipe) -> ModelShape:
    """Raises RecipeError: neither a directory nor a known model."""
    path = recipe.model.path if given.model is None else Path(given.model)
    if not path.exists():
        if (known := KNOWN.get(str(path).lower())) is not None:
            return known
        if given.model is None:
            raise RecipeError(
                f"model.path: there is no {path}, which the recipe starts from; give --model a Hugging Face directory"
                " or a known model's name (--list) of the same size"
            )
        raise RecipeError(f"--model {path}: no such directory, nor a known model ({', '.join(KNOWN)})")
    return read_model_shape(path.parent if path.name == "config.json" else path, fp8=True)


def read_data(given: argparse.Namespace, recipe: AnyRecipe, shape: ModelShape) -> tuple[Workload | None, int]:
    """Measured lengths, if there are any, and tokens of a prompt."""
    prompt = given.prompt
    if given.lengths is not None:
        try:
            return read_lengths(given.lengths, prompt=prompt or Lengths.prompt), 0
        except UnicodeDecodeError as error:
            raise ValueError(f"{given.lengths}: not UTF-8 text ({error})") from None
    if given.model is None and recipe.data.train.is_file():
        from megarl.data import DataError

        try:
            if not isinstance(recipe, RlRecipe):
                return learned_lengths(recipe, shape), 0
            prompt = prompt or prompt_tokens(recipe, shape)
        except DataError as error:
            raise ValueError(error) from None
    return None, prompt or Lengths.prompt


def learned_lengths(recipe: SftRecipe | RewardModelRecipe, shape: ModelShape) -> Workload:
    """Of the recipe's demonstrations, or of both answers of its pairs. Raises DataError."""
    from megarl.data import encode_conversations, load_tokenizer, read_conversations, read_preferences, whole_pairs

    tokenizer, most = load_tokenizer(recipe.model.path), shape.max_positions
    if isinstance(recipe, SftRecipe):
        rows = read_conversations(recipe.data.train)[:ROWS_READ]
        encoded = encode_conversations(tokenizer, rows, most, recipe.data.roles)
    else:
        rows = whole_pairs(read_preferences(recipe.data.train)[:ROWS_READ])
        encoded = encode_conversations(tokenizer, rows, most)
    return Workload(tuple(GroupLengths(0, (len(one.input_ids),)) for one in encoded), most)


def prompt_tokens(recipe: RlRecipe, shape: ModelShape) -> int:
    """The mean of the recipe's prompts. Raises DataError."""
    from megarl.data import PromptSet, load_tokenizer

    room = {"max_positions": shape.max_positions, "max_new_tokens": recipe.rollout.max_new_tokens}
    prompts = PromptSet(recipe.data.train, load_tokenizer(recipe.model.path), count=ROWS_READ, **room)
    return round(sum(len(prompts[i].input_ids) for i in range(len(prompts))) / len(prompts))


def read_fixed(given: list[str]) -> dict[str, Any]:
    """Raises ValueError: not NAME=VALUE, or no such name or value."""
    names = [*Layout.model_fields, "max_tokens_per_rank", *ENGINES]
    texts: dict[str, str] = {}
    for one in given:
        name, equals, text = one.partition("=")
        if not equals or name not in names:
            raise ValueError(f"--fix {one}: expected NAME=VALUE with a name of {', '.join(names)}")
        texts[name] = text
    fixed: dict[str, Any] = {}
    for name, text in texts.items():
        try:
            if name in ("train_ranks", "tensor_parallel"):
                fixed[name] = positive(text)
            elif name == "mem_fraction_static":
                fixed[name] = fraction(text)
            elif name == "placement" and text not in ("colocated", "disaggregated"):
                raise argparse.ArgumentTypeError(f"expected colocated or disaggregated, got {text!r}")
            elif name == "placement":
                fixed[name] = text
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"--fix {name}: {error}") from None
    places = dict.fromkeys(Layout.model_fields, "layout") | {"max_tokens_per_rank": "batch"}
    trained = {name: text for name, text in texts.items() if name in places}
    overrides = [f"{places[name]}.{name}={text}" for name, text in trained.items()]
    filled = make_recipe(plain("sft"), overrides, named="--fix")
    return fixed | {name: getattr(getattr(filled, places[name]), name) for name in trained}


def fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"expected a number between 0 and 1, got {text!r}")
    return value


def rewritten(recipe: AnyRecipe, choice: Choice) -> AnyRecipe:
    """The recipe with the plan in it."""
    batch = recipe.batch.model_copy(update={"max_tokens_per_rank": choice.trained.max_tokens})
    changed: dict[str, Any] = {"layout": choice.trained.training.layout, "batch": batch}
    if isinstance(recipe, RlRecipe) and choice.serving is not None:
        serving, together = choice.serving, choice.placement == "colocated"
        apart = Disaggregated(type="disaggregated", train_ranks=choice.train_gpus)
        changed["placement"] = Colocated() if together else apart
        rollout = {
            "tensor_parallel": serving.tensor,
            "expert_parallel": serving.expert,
            "server_args": recipe.rollout.server_args | {"mem_fraction_static": serving.fraction},
        }
        changed["rollout"] = recipe.rollout.model_copy(update=rollout)
    return recipe.model_copy(update=changed)


def write(given: argparse.Namespace, recipe: AnyRecipe, request: Request, choice: Choice) -> None:
    """The recipe with the plan, and with the model if that was given as a directory."""
    plan, mine = rewritten(recipe, choice), []
    if given.model is not None and Path(given.model).exists():
        path = Path(given.model)
        model = recipe.model.model_copy(update={"path": path.parent if path.name == "config.json" else path})
        plan = plan.model_copy(update={"model": model})
    elif given.model is not None:
        mine.append("model.path")
    if given.workload is None:
        mine += ["data", "optimizer", "steps"]
        mine += ["critic"] if isinstance(recipe, RlRecipe) and isinstance(recipe.critic, Critic) else []
    try:
        with given.write.open("x") as file:
            file.write(dump_recipe(plan))
    except OSError as error:
        sys.exit(f"tune_layout: --write {given.write}: {error.strerror}")
    yours = f"; set its {', '.join(mine)}" if mine else ""
    print(f"{given.write}: the recipe with the first plan, for {request.gpus} ranks{yours}", file=sys.stderr)


if __name__ == "__main__":
    main()

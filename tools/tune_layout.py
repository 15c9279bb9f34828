#!/usr/bin/env python
"""Finds the training layouts of a model on so many GPUs that should be fastest, without a GPU, in seconds.

    python tools/tune_layout.py --model models/qwen3-8b --gpu H100 --gpus 64 --tokens 4096 --sequences 512
    python tools/tune_layout.py --model models/qwen3-8b --gpu H100 --gpus 64 --tokens 4096 --sequences 512 \\
        --fix tensor=4 --fix recompute=full --top 3 --json

--model is a Hugging Face directory, of which only config.json is read. A step is --sequences sequences of --tokens
tokens. All sizes that megarl can train with are tried, but for those that --fix gives (names as in a recipe's layout).

Columns:
  step       seconds of an optimizer step: forward and backward passes, update
  MFU        % of the GPUs' 16-bit peak in the model's own operations, without recomputation
  memory     GB on a rank of the pipeline stage that needs most, that stage, and what takes most of it
  slower by  what costs more than in the first layout
Predictions come from rooflines whose constants are checked by tools/bench/layout_accuracy.py; they are for the
training phase alone, and for sequences of equal length.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megarl.config import Layout, RecipeError, read_model_shape
from megarl.layout import GENERATIONS, Choice, Machine, Request, Search, search
from megarl.simulator import GPUS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory")
    parser.add_argument("--gpu", choices=sorted(GENERATIONS), default="H100")
    parser.add_argument("--gpus", type=int, required=True, help="how many in all")
    parser.add_argument("--tokens", type=int, required=True, help="of a sequence")
    parser.add_argument("--sequences", type=int, required=True, help="of an optimizer step")
    parser.add_argument("--fix", action="append", default=[], metavar="NAME=VALUE", help="a field of the layout")
    parser.add_argument("--top", type=int, default=10, help="how many are shown")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if min(arguments.gpus, arguments.tokens, arguments.sequences, arguments.top) < 1:
        parser.error("--gpus, --tokens, --sequences and --top are above 0")
    try:
        shape = read_model_shape(arguments.model)
        fixed = read_fixed(arguments.fix)
        machine = Machine(GPUS[arguments.gpu], GENERATIONS[arguments.gpu])
        found = search(Request(shape, machine, arguments.gpus, arguments.tokens, arguments.sequences, fixed))
    except (RecipeError, ValueError) as error:
        sys.exit(f"tune_layout: {error}")
    flops = shape.active_parameters * 6.0 * arguments.tokens + attention_flops(shape, arguments.tokens)
    peak = arguments.gpus * GPUS[arguments.gpu].flops_16
    useful_s = flops * arguments.sequences / peak
    if arguments.json:
        print(json.dumps([as_json(choice, useful_s) for choice in found.ranked[: arguments.top]], indent=1))
    else:
        print(table(found, arguments.top, useful_s))


def read_fixed(given: list[str]) -> dict[str, int | str | bool]:
    """Fields of Layout. Raises ValueError: not NAME=VALUE, or no such field."""
    texts = {}
    for one in given:
        name, equals, text = one.partition("=")
        if not equals or name not in Layout.model_fields:
            raise ValueError(f"--fix {one}: expected NAME=VALUE with a name of {', '.join(Layout.model_fields)}")
        texts[name] = int(text) if text.isdigit() else {"true": True, "false": False}.get(text, text)
    fields = Layout.model_validate(texts).model_dump()
    return {name: fields[name] for name in texts}


def attention_flops(shape: Any, tokens: int) -> float:
    """Of the scores and values of one sequence, forward and backward (as megarl.model_engine.flops counts them)."""
    return float(6.0 * shape.layers * shape.heads * shape.head_dim * tokens**2)


def table(found: Search, top: int, useful_s: float) -> str:
    best = found.ranked[0]
    lines = [
        f"{found.layouts} layouts, {found.indivisible} of which do not divide the model; {found.asked} trainings asked,"
        f" {found.too_large} too large, {len(found.ranked)} fit",
        f"{'step':>8} {'MFU':>5} {'TP':>3} {'PP':>3} {'VP':>3} {'CP':>3} {'EP':>3} {'ETP':>3} {'DP':>4} {'micro':>5}"
        f" {'recompute':<9} {'memory':<34} slower by",
    ]
    for choice in found.ranked[:top]:
        layout, training = choice.training.layout, choice.training
        sizes = (layout.tensor, layout.pipeline, layout.interleave, layout.context, layout.expert)
        lines.append(
            f"{choice.step.seconds:7.2f}s {100 * useful_s / choice.step.seconds:4.1f}% "
            + " ".join(f"{size:3d}" for size in (*sizes, layout.expert_tensor))
            + f" {training.data:4d} {training.micro_batch:5d} {layout.recompute:<9}"
            + f" {held_in_words(choice):<34} {slower(choice, best)}"
        )
    return "\n".join(lines)


def held_in_words(choice: Choice) -> str:
    parts = asdict(choice.memory)
    largest = max(parts, key=lambda name: parts[name])
    return f"{choice.memory.total / 1e9:.0f} GB, stage {choice.stage}, {largest} {parts[largest] / 1e9:.0f}"


def phases(choice: Choice) -> dict[str, float]:
    """Seconds of a step by what they go to."""
    return asdict(choice.step.work) | {
        name: getattr(choice.step, name) for name in ("bubble", "pipeline", "data", "optimizer", "host")
    }


def slower(choice: Choice, best: Choice) -> str:
    """What of a step takes longer than in the best layout, the two largest differences."""
    base = phases(best)
    more = {name: seconds - base[name] for name, seconds in phases(choice).items()}
    largest = sorted((name for name in more if more[name] > 0.005), key=lambda name: -more[name])[:2]
    return ", ".join(f"{name} {more[name]:.2f} s" for name in largest)


def as_json(choice: Choice, useful_s: float) -> dict[str, Any]:
    return {
        "step_s": choice.step.seconds,
        "mfu": useful_s / choice.step.seconds,
        "layout": choice.training.layout.model_dump(),
        "data": choice.training.data,
        "micro_batch": choice.training.micro_batch,
        "seconds": phases(choice),
        "memory_bytes": asdict(choice.memory),
        "stage": choice.stage,
    }


if __name__ == "__main__":
    main()

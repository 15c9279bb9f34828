"""A search's result in words, as a table, and as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megarl.layout.search import Choice, Request, Search


def summary(request: Request, found: Search, seconds: float) -> str:
    work, counts = request.work, found.counts
    lines = [
        f"{in_words(request.shape.parameters)} parameters ({in_words(request.shape.active_parameters)} active), "
        f"{request.gpus} GPUs; a step: {len(work.lengths):,} sequences, {work.tokens:,} tokens, longest "
        f"{max(work.lengths):,}",
        f"{counts.layouts:,} training layouts, {counts.indivisible:,} of which do not divide the model or the GPUs; "
        f"{counts.asked:,} with micro-batches and recomputation, {counts.too_large:,} too large",
    ]
    if work.rollouts is not None:
        lines.append(
            f"{found.engines} layouts of engines timed; {found.plans:,} plans of both, {found.pruned:,} pruned by"
            f" bounds; {found.splits} splits of the GPUs, {found.splits_pruned} pruned"
        )
    return "\n".join([*lines, f"{seconds:.1f} s"])


def in_words(number: float) -> str:
    """As models are named: 8.2B, 1.7M."""
    return f"{number / 1e9:.1f}B" if number >= 1e8 else f"{number / 1e6:.1f}M"


def table(request: Request, shown: list[Choice]) -> str:
    rollouts = request.work.rollouts is not None
    head = f"{'step':>8} " + (f"{'rollout':>8} {'score':>7} {'update':>7} {'publish':>7} " if rollouts else "")
    head += (
        f"{'MFU':>5} {'GPUs':>5} {'TP':>3} {'PP':>3} {'VP':>3} {'CP':>3} {'EP':>3} {'ETP':>3} {'DP':>4} {'tokens':>7} "
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
        line += f" {training.data:4d} {choice.trained.max_tokens:7d} {layout.recompute:<9}"
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

"""Every layout of a model on so many GPUs that can be trained here, and the fastest of those that fit.

The order of the search is what prunes it. A layout that `megarl.config` would refuse is not asked. Recomputation only
adds time, so of a layout and micro-batch the first of none, selective and full that fits ends the question; and where
full recomputation does not fit, neither does a larger micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal

from megarl.config import Layout, ModelShape, layout_problems
from megarl.layout.machine import Machine
from megarl.layout.memory import NOMINAL, Memory, memory
from megarl.layout.model import Decoder, decoder
from megarl.layout.step import Step, step_time
from megarl.layout.training import MEGARL, Software, Training

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
LARGEST_MICRO_BATCH = 64
MORE_GPUS = (2, 4, 8, 16, 32, 64)
"""How many times more are tried where nothing fits."""


@dataclass(frozen=True)
class Request:
    """Steps of `sequences` sequences of `sequence` tokens each on `gpus` GPUs; `fixed` are given fields of Layout."""

    shape: ModelShape
    machine: Machine
    gpus: int
    sequence: int
    sequences: int
    fixed: Mapping[str, int | str | bool] = field(default_factory=dict)
    software: Software = MEGARL


@dataclass(frozen=True)
class Choice:
    """A layout and micro-batch that fits, its step, and the memory of a rank of the stage that needs most."""

    training: Training
    step: Step
    memory: Memory
    stage: int


@dataclass(frozen=True)
class Search:
    """`ranked`: what fits, fastest first. How many layouts there were, and trainings whose memory was computed."""

    ranked: tuple[Choice, ...]
    layouts: int
    indivisible: int
    asked: int
    too_large: int


def search(request: Request) -> Search:
    """Raises ValueError: nothing fits; says what would."""
    model, ranked = decoder(request.shape), list[Choice]()
    layouts = indivisible = asked = 0
    for layout in _layouts(request):
        layouts += 1
        if not _divides(request, layout):
            indivisible += 1
            continue
        for training, needed, stage in _trainings(request, model, layout):
            asked += 1
            if _fits(request, needed):
                ranked.append(Choice(training, step_time(training, request.machine), needed, stage))
    if not ranked:
        raise ValueError(_impossible(request, model))
    ranked.sort(key=lambda choice: (choice.step.seconds, choice.memory.total))
    return Search(tuple(ranked), layouts, indivisible, asked, asked - len(ranked))


def _trainings(request: Request, model: Decoder, layout: Layout) -> Iterator[tuple[Training, Memory, int]]:
    """Micro-batches of a layout, each with as much recomputation as it needs, up to the first that never fits."""
    base = Training(
        model,
        layout,
        request.gpus,
        request.sequence,
        request.sequences,
        sequence_parallel=layout.tensor > 1,
        software=replace(request.software, data_overlap=layout.overlap),
    )
    ways = [how for how in RECOMPUTE if request.fixed.get("recompute", how) == how]
    size = 1
    while size <= min(LARGEST_MICRO_BATCH, request.sequences // base.data):
        for how in ways:
            one = replace(base, micro_batch=size, layout=layout.model_copy(update={"recompute": how}))
            stages = memory(one)
            stage = max(range(len(stages)), key=lambda number: stages[number].total)
            yield one, stages[stage], stage
            if _fits(request, stages[stage]):
                break
        else:
            return
        size *= 2


def _layouts(request: Request) -> Iterator[Layout]:
    """All combinations of sizes that a node, the layers, the experts and the GPUs allow by themselves."""
    shape, gpus, node = request.shape, request.gpus, request.machine.gpu.linked
    count = shape.experts.count if shape.experts is not None else 1
    choices: dict[str, Sequence[int | str | bool]] = {
        "tensor": [size for size in _divisors(gpus) if size <= min(node, shape.heads)],
        "pipeline": [size for size in _divisors(gpus) if shape.layers % size == 0],
        "interleave": [size for size in _divisors(shape.layers) if size <= 8],
        "context": [size for size in _divisors(gpus) if size <= max(1, request.sequence // 1024)],
        "expert": [size for size in _divisors(count) if gpus % size == 0],
        "expert_tensor": [size for size in _divisors(gpus) if size <= (1 if shape.experts is None else node)],
        "overlap": [True],
    }
    choices |= {name: [value] for name, value in request.fixed.items() if name != "recompute"}
    for values in product(*choices.values()):
        yield Layout.model_validate(dict(zip(choices, values, strict=True)))


def _divides(request: Request, layout: Layout) -> bool:
    data = request.gpus // layout.model_ranks
    return 0 < data <= request.sequences and not layout_problems(layout, request.shape, request.gpus)


def _fits(request: Request, needed: Memory) -> bool:
    return needed.total <= NOMINAL * request.machine.gpu.memory


def _impossible(request: Request, model: Decoder) -> str:
    """What is missing, and the fewest GPUs of those tried on which something fits."""
    least = _least(request, model)
    if least is None:
        return f"no layout divides the model over {request.gpus} GPUs; take another number of them, or fix less"
    have = NOMINAL * request.machine.gpu.memory / 1e9
    text = f"no layout fits: the smallest needs {least / 1e9:.0f} GB on a GPU, which has {have:.0f} GB"
    for times in MORE_GPUS:
        more = replace(request, gpus=times * request.gpus, sequences=max(request.sequences, times * request.gpus))
        found = _least(more, model)
        if found is not None and found <= NOMINAL * request.machine.gpu.memory:
            return f"{text}; {more.gpus} GPUs are enough"
    return f"{text}; nor do {MORE_GPUS[-1]} times as many GPUs help"


def _least(request: Request, model: Decoder) -> float | None:
    """Bytes of the layout that needs least; None if none divides."""
    peaks = [
        needed.total
        for layout in _layouts(request)
        if layout.interleave == 1 and _divides(request, layout)
        for _, needed, _ in _trainings(request, model, layout)
    ]
    return min(peaks, default=None)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]

"""Every way to train a step on so many GPUs that megarl has, and that fits.

The order is what prunes it. A layout that `megarl.config` would refuse is not asked. Recomputation only adds time, so
of a layout and micro-batch the first of none, selective and full that fits ends the question; and where full
recomputation does not fit, neither does a larger micro-batch.
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
from megarl.layout.step import Step, forward_time, step_time
from megarl.layout.training import Precision, Software, Training
from megarl.layout.workload import Division, Work

MEGARL = Software(kernel="flash2", fused_mlp=False, tensor_overlap=False, send_once=False, chunked_logits=True)
"""How megarl trains: torch's attention, norms in one kernel, activations and rotary positions not, logits in parts."""

PLANNED = 0.95
"""Of a GPU's memory, what a plan may fill: predictions are some percent off."""
Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
TOKENS_STEP = 1024
"""Micro-batches are multiples of it."""
LEAST_CONTEXT = 1024
"""Tokens of the longest sequence that context-parallel ranks have at least."""
MOST_PARTS = 8
"""Of a pipeline stage (interleave)."""

Fixed = Mapping[str, int | str | bool | float]


@dataclass(frozen=True)
class Ask:
    """Steps of `work` on `gpus` GPUs, of which `busy` bytes each are not for the trainer. `fixed`: fields of Layout,
    and max_tokens_per_rank."""

    shape: ModelShape
    machine: Machine
    gpus: int
    work: Work
    precision: Precision = "bf16"
    fixed: Fixed = field(default_factory=dict)
    software: Software = MEGARL
    busy: float = 0.0

    @property
    def room(self) -> float:
        """Bytes of a GPU for the trainer."""
        return PLANNED * NOMINAL * self.machine.gpu.memory - self.busy


@dataclass(frozen=True)
class Trained:
    """A layout with micro-batches of `max_tokens` on a rank, which fits.

    `training` is one update, `step` its seconds, `memory` that of a rank of `stage`, which needs most.
    """

    training: Training
    max_tokens: int
    step: Step
    memory: Memory
    stage: int
    score_s: float
    update_s: float
    """Of all updates of a step; of policy and critic."""

    @property
    def seconds(self) -> float:
        return self.score_s + self.update_s


@dataclass
class Counts:
    """Layouts tried, those that do not divide the model, trainings whose memory was asked, and those too large."""

    layouts: int = 0
    indivisible: int = 0
    asked: int = 0
    too_large: int = 0


def trainings(ask: Ask, counts: Counts) -> list[Trained]:
    """Fastest first; empty if nothing fits."""
    model, found = decoder(ask.shape), list[Trained]()
    for layout in _layouts(ask):
        counts.layouts += 1
        if not _divides(ask, layout):
            counts.indivisible += 1
            continue
        for training, division, max_tokens, needed, stage in _candidates(ask, model, layout):
            counts.asked += 1
            if needed.total > ask.room:
                counts.too_large += 1
            else:
                found.append(_timed(ask, training, division, max_tokens, needed, stage))
    return sorted(found, key=lambda one: (one.seconds, one.memory.total))


def least_bytes(ask: Ask) -> float | None:
    """Of a GPU, by the layout that needs least; None if none divides the model."""
    model = decoder(ask.shape)
    peaks = [
        needed.total
        for layout in _layouts(ask)
        if layout.interleave == 1 and _divides(ask, layout)
        for *_, needed, _ in _candidates(ask, model, layout)
    ]
    return min(peaks, default=None)


def _timed(ask: Ask, training: Training, division: Division, max_tokens: int, needed: Memory, stage: int) -> Trained:
    work, machine = ask.work, ask.machine
    step = step_time(training, machine)
    each = step.seconds + (division.imbalance - 1) * step.work.seconds
    update = each * work.updates
    if work.critic:
        update += step_time(replace(training, decoder=_critic(training.decoder)), machine).seconds * work.updates
    score = 0.0
    if work.scored:
        score = work.scored * division.imbalance * forward_time(training, machine) * work.updates / work.epochs
    return Trained(training, max_tokens, step, needed, stage, score, update)


def _critic(policy: Decoder) -> Decoder:
    return replace(policy, tied=False, head=policy.hidden + 1)


def _candidates(ask: Ask, model: Decoder, layout: Layout) -> Iterator[tuple[Training, Division, int, Memory, int]]:
    """Micro-batches of a layout, each with as much recomputation as it needs, up to the first that never fits."""
    work = ask.work
    share = work.tokens * work.epochs / work.updates / work.sequence
    base = Training(
        model,
        layout,
        ask.gpus,
        work.sequence,
        share,
        precision=ask.precision,
        sequence_parallel=layout.tensor > 1,
        software=replace(ask.software, data_overlap=layout.overlap),
    )
    ways = [how for how in RECOMPUTE if ask.fixed.get("recompute", how) == how]
    for max_tokens in _micro_batches(ask, base):
        division = work.divided(base.data, max_tokens * layout.context)
        peak = replace(base, micro_batch=division.largest / work.sequence)
        mean = replace(base, micro_batch=share / base.data / division.micro_batches)
        for how in ways:
            chosen = layout.model_copy(update={"recompute": how})
            stages = [_with_others(work, one) for one in memory(replace(peak, layout=chosen))]
            stage = max(range(len(stages)), key=lambda number: stages[number].total)
            yield replace(mean, layout=chosen), division, max_tokens, stages[stage], stage
            if stages[stage].total <= ask.room:
                break
        else:
            return


def _with_others(work: Work, policy: Memory) -> Memory:
    """With the other models on the same ranks."""
    critic = (policy.weights + policy.gradients + policy.optimizer) if work.critic else 0.0
    return replace(policy, others=work.frozen * policy.weights + critic)


def _micro_batches(ask: Ask, base: Training) -> Iterator[int]:
    """Tokens of a micro-batch on a rank: the longest sequence, and its doubles until one micro-batch has all."""
    if given := ask.fixed.get("max_tokens_per_rank"):
        yield int(given)
        return
    longest = -(-max(ask.work.lengths) // base.layout.context)
    size = -(-longest // TOKENS_STEP) * TOKENS_STEP
    all_tokens = base.global_batch * base.sequence / base.data / base.layout.context
    while True:
        yield size
        if size >= all_tokens:
            return
        size *= 2


def _layouts(ask: Ask) -> Iterator[Layout]:
    """All combinations of sizes that a node, the layers, the experts and the GPUs allow by themselves."""
    shape, gpus, node = ask.shape, ask.gpus, ask.machine.gpu.linked
    count = shape.experts.count if shape.experts is not None else 1
    longest = max(ask.work.lengths)
    choices: dict[str, Sequence[int | str | bool | float]] = {
        "tensor": [size for size in divisors(gpus) if size <= min(node, shape.heads)],
        "pipeline": [size for size in divisors(gpus) if shape.layers % size == 0],
        "interleave": [size for size in divisors(shape.layers) if size <= MOST_PARTS],
        "context": [size for size in divisors(gpus) if size <= max(1, longest // LEAST_CONTEXT)],
        "expert": [size for size in divisors(count) if gpus % size == 0],
        "expert_tensor": [size for size in divisors(gpus) if size <= (1 if shape.experts is None else node)],
        "overlap": [True],
    }
    fixed = {name: [value] for name, value in ask.fixed.items() if name in Layout.model_fields and name != "recompute"}
    choices |= fixed
    for values in product(*choices.values()):
        yield Layout.model_validate(dict(zip(choices, values, strict=True)))


def _divides(ask: Ask, layout: Layout) -> bool:
    data = ask.gpus // layout.model_ranks
    share = len(ask.work.lengths) * ask.work.epochs // ask.work.updates
    return 0 < data <= share and not layout_problems(layout, ask.shape, ask.gpus)


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]

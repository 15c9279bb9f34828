"""Training and rollout layouts together: how a step's phases add up, and the fastest plan of those that fit.

Colocated, engines have what training leaves of each GPU (or, with `offload`, all but a little: each side moves out of
the other's way). Disaggregated, each has GPUs of its own. A synchronous step is the sum of its phases; one step off and
asynchronous, the longer of rollout and training, and the publication.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from megarl.config import Layout, ModelShape, RecipeError, engine_problems, layout_problems
from megarl.layout.machine import Machine
from megarl.layout.memory import NOMINAL
from megarl.layout.publication import least_s, planned_s
from megarl.layout.serving import Serving, engine_model, phase_s, served_model, steady_s
from megarl.layout.training import MEGARL, Precision, Software
from megarl.layout.training_search import (
    PLANNED,
    Ask,
    Counts,
    Fixed,
    Trained,
    divisors,
    least_bytes,
    trainings,
)
from megarl.layout.workload import Work
from megarl.simulator import EngineModel, ServedModel

Placement = Literal["alone", "colocated", "disaggregated"]

MOST_FRACTION, FRACTION_STEP = 0.85, 0.05
"""Of a GPU's memory for an engine's weights and cache; one that is given may leave no margin."""
LEAST_FRACTIONS = (0.25, 0.4, 0.55, 0.7)
"""What engines beside a trainer that stays are left at least: the more, the more it recomputes."""
HOST_SHARE = 0.8
"""Of the link to the host's memory, when copies are large."""
MOST_SPLITS = 12
KEPT, FAR = 32, 1.5
"""Plans that are ranked, of each kind one, and how many times longer than the best they take at most."""
OF_EACH_SPLIT = 4
NEGLIGIBLE = 2e-4
"""Share of a step for which publications are not planned: of the largest models that takes seconds."""
MORE_GPUS = (2, 4, 8, 16, 32, 64)
"""How many times more are tried where nothing fits."""


def _anything(_choice: Choice) -> None:
    pass


@dataclass(frozen=True)
class Request:
    """Steps of `work` on `nodes` nodes of `node` GPUs. `fixed` are fields of a recipe by their last names: those of
    `layout`, and max_tokens_per_rank, tensor_parallel, mem_fraction_static, placement and train_ranks. `check` raises
    RecipeError for a plan that the recipe could not be run with."""

    shape: ModelShape
    machine: Machine
    nodes: int
    node: int
    work: Work
    precision: Precision = "bf16"
    fixed: Fixed = field(default_factory=dict)
    software: Software = MEGARL
    offload: bool = False
    engine: EngineModel | None = None
    """One of a single GPU that was measured; others are not planned then."""
    check: Callable[[Choice], None] = _anything

    @property
    def gpus(self) -> int:
        return self.nodes * self.node

    def ask(self, gpus: int, busy: float = 0.0) -> Ask:
        return Ask(self.shape, self.machine, gpus, self.work, self.precision, self.fixed, self.software, busy)


@dataclass(frozen=True)
class Phases:
    """Seconds of a step. `ahead`: rollouts and training go on at once."""

    rollout: float
    score: float
    update: float
    publish: float
    offload: float
    ahead: bool

    @property
    def seconds(self) -> float:
        training = self.score + self.update
        busy = max(self.rollout, training) if self.ahead else self.rollout + training
        return busy + self.publish + self.offload


@dataclass(frozen=True)
class Choice:
    """A plan that fits: what trains on how many GPUs, with which engines."""

    placement: Placement
    train_gpus: int
    trained: Trained
    phases: Phases
    serving: Serving | None = None

    @property
    def seconds(self) -> float:
        return self.phases.seconds

    @property
    def kind(self) -> tuple[object, ...]:
        """The sizes in which plans differ that are worth a choice; of those that are alike the fastest is ranked."""
        layout = self.trained.training.layout
        engine = self.serving.tensor if self.serving is not None else 0
        sizes = (layout.tensor, layout.pipeline, layout.context, layout.expert, layout.expert_tensor)
        return self.placement, self.train_gpus, *sizes, engine


@dataclass(frozen=True)
class Search:
    """`ranked`: fastest first, one of each kind. What was tried, and what a bound made needless."""

    ranked: tuple[Choice, ...]
    counts: Counts
    engines: int
    """Layouts of engines with their memory whose rollouts were timed."""
    plans: int
    """Trainings that fit, each with each layout of engines."""
    pruned: int
    """Those of them that could not be among the ranked, by a bound."""
    splits: int
    """Ways to divide the GPUs between training and rollouts."""
    splits_pruned: int
    """Those of which nothing was asked, by a bound."""


def search(request: Request) -> Search:
    """Raises ValueError: nothing fits; says what would."""
    found = _Joint(request)
    ranked = found.ranked()
    if not ranked:
        raise ValueError(found.refused or _impossible(request, engines=found.some_engines))
    tried = (found.plans, found.pruned, found.splits, found.splits_pruned)
    return Search(tuple(ranked), found.counts, len(found.simulated), *tried)


class _Joint:
    def __init__(self, request: Request) -> None:
        self.request, self.counts = request, Counts()
        self.plans = self.pruned = self.splits = self.splits_pruned = 0
        self.simulated: dict[Serving, float] = {}
        """Seconds of a step's rollouts; infinite where a response does not fit."""
        self.refused = ""
        """Why the last plan that the recipe's checks refuse cannot run."""
        self._best: list[Choice] = []

    def ranked(self) -> list[Choice]:
        request = self.request
        if request.work.rollouts is None:
            for one in trainings(request.ask(request.gpus), self.counts):
                self._keep(Choice("alone", request.gpus, one, Phases(0.0, one.score_s, one.update_s, 0.0, 0.0, False)))
            return self._best
        given = request.fixed.get("placement")
        if given != "disaggregated" and "train_ranks" not in request.fixed:
            self._colocated()
        if given != "colocated":
            self._disaggregated()
        return self._best

    def _keep(self, choice: Choice) -> None:
        alike = [one for one in self._best if one.kind == choice.kind]
        if choice.seconds >= min([self._worst, *(one.seconds for one in alike)]):
            return
        try:
            self.request.check(choice)
        except RecipeError as error:
            self.refused = str(error)
            return
        others = (one for one in self._best if one.kind != choice.kind)
        kept = sorted([*others, choice], key=lambda one: one.seconds)[:KEPT]
        self._best = [one for one in kept if one.seconds <= FAR * kept[0].seconds]

    @property
    def _worst(self) -> float:
        """Seconds that a plan of a new kind must stay below to be ranked."""
        if not self._best:
            return math.inf
        far = FAR * self._best[0].seconds
        return min(far, self._best[-1].seconds) if len(self._best) == KEPT else far

    def _colocated(self) -> None:
        request, rollouts = self.request, self.request.work.rollouts
        assert rollouts is not None
        if rollouts.max_lag and not rollouts.interrupt:
            return  # the recipe would be refused
        gpus, gpu = request.gpus, request.machine.gpu
        most = float(request.fixed.get("mem_fraction_static", MOST_FRACTION))
        engines = [self._serving(tensor, gpus, most) for tensor in self._tensors(gpus)]
        least = min((self._rollout_s(one) for one in engines), default=math.inf)
        tried = set[tuple[Layout, int]]()
        for share in (0.0,) if request.offload else LEAST_FRACTIONS:
            found = trainings(
                request.ask(gpus, request.software.engine_bytes + share * NOMINAL * gpu.memory), self.counts
            )
            new = [one for one in found if (one.training.layout, one.max_tokens) not in tried]
            tried.update((one.training.layout, one.max_tokens) for one in new)
            self.plans += len(new) * len(engines)
            for number, one in enumerate(new):
                if one.seconds + least >= self._worst:
                    self.pruned += (len(new) - number) * len(engines)
                    break
                held = one.memory.buffers if request.offload else one.memory.total
                for serving in engines:
                    if one.seconds + self._rollout_s(serving) >= self._worst:
                        self.pruned += 1
                    elif (fraction := self._fraction(held)) is not None:
                        self._add("colocated", gpus, one, replace(serving, fraction=fraction))

    @property
    def some_engines(self) -> bool:
        """Whether engines can be made, be it that memory has no room for them."""
        return bool(self.simulated) or self._fraction(0.0) is None

    def _fraction(self, held: float) -> float | None:
        """The share of a GPU that engines have beside so many bytes; None where none is left, or not the given one."""
        whole = NOMINAL * self.request.machine.gpu.memory
        taken = (held + self.request.software.engine_bytes) / whole
        if given := self.request.fixed.get("mem_fraction_static"):
            return float(given) if float(given) <= 1 - taken else None
        left = round(math.floor((PLANNED - taken) / FRACTION_STEP) * FRACTION_STEP, 2)
        return min(MOST_FRACTION, left) if left > 0 else None

    def _disaggregated(self) -> None:
        request, fraction = self.request, self._fraction(0.0)
        if fraction is None:
            return
        for train in self._splits():
            self.splits += 1
            rest = request.gpus - train
            engines = [self._serving(tensor, rest, fraction) for tensor in self._tensors(rest)]
            engines.sort(key=self._rollout_s)
            if not engines or self._rollout_s(engines[0]) >= self._worst or self._least_s(train) >= self._worst:
                self.splits_pruned += 1
                continue
            found = trainings(request.ask(train), self.counts)
            self.plans += len(found) * len(engines)
            self.pruned += len(found) * len(engines) - min(len(found), OF_EACH_SPLIT) * min(len(engines), OF_EACH_SPLIT)
            for one in found[:OF_EACH_SPLIT]:  # others of this split are slower on both sides
                for serving in engines[:OF_EACH_SPLIT]:
                    self._add("disaggregated", train, one, serving)

    def _splits(self) -> list[int]:
        """GPUs that train: whole nodes, or part of the only one; of many, those that can be divided in most ways."""
        request = self.request
        if given := request.fixed.get("train_ranks"):
            return [int(given)]
        unit = request.node if request.nodes > 1 else 1
        count = request.gpus // unit
        every = max(1, math.ceil((count - 1) / MOST_SPLITS))
        chosen = [
            max(range(start, min(start + every, count)), key=lambda part: self._ways(unit * part))
            for start in range(1, count, every)
        ]
        return [unit * part for part in sorted(chosen, key=lambda part: abs(part - count / 2))]

    def _ways(self, train: int) -> int:
        """Into how many sizes these GPUs, the others, and layers and experts among them can be divided."""
        shape = self.request.shape
        shared = (shape.layers, shape.experts.count if shape.experts is not None else 1)
        ways = math.prod(len(divisors(math.gcd(train, size))) for size in (train, *shared))
        return ways * len(self._tensors(self.request.gpus - train))

    def _least_s(self, gpus: int) -> float:
        """Seconds to train, were all GPUs at their best all the time."""
        work, shape, machine = self.request.work, self.request.shape, self.request.machine
        flops = 2.0 * shape.active_parameters * work.tokens * (3 * work.epochs + work.scored)
        return flops / gpus / machine.flops(self.request.precision)

    def _tensors(self, gpus: int) -> list[int]:
        """Tensor-parallel sizes of engines that divide the GPUs and the model, on part of a node or on whole ones."""
        request = self.request
        sizes = [size for size in divisors(gpus) if request.node % size == 0 or size % request.node == 0]
        if request.engine is not None:
            sizes = [1]
        if given := request.fixed.get("tensor_parallel"):
            sizes = [size for size in sizes if size == given]
        return [size for size in sizes if not engine_problems(request.shape, size, self._groups(size))]

    def _groups(self, tensor: int) -> int:
        """Groups of an engine's ranks among which experts are divided: as many as can be."""
        experts = self.request.shape.experts
        return 1 if experts is None else math.gcd(tensor, experts.count)

    def _serving(self, tensor: int, gpus: int, fraction: float) -> Serving:
        return Serving(tensor, gpus // tensor, fraction, self._groups(tensor))

    @cached_property
    def _served(self) -> ServedModel:
        assert self.request.work.rollouts is not None
        rollouts = self.request.work.rollouts
        return served_model(self.request.shape, rollouts.weight_bytes, rollouts.value_bytes)

    def _engine(self, serving: Serving) -> EngineModel:
        return self.request.engine or engine_model(self._served, self.request.machine.gpu, serving)

    def _rollout_s(self, serving: Serving) -> float:
        if serving not in self.simulated:
            rollouts = self.request.work.rollouts
            assert rollouts is not None
            how = steady_s if rollouts.interrupt else phase_s
            try:
                self.simulated[serving] = how(rollouts, self._engine(serving), serving.count)
            except ValueError:
                self.simulated[serving] = math.inf
        return self.simulated[serving]

    def _add(self, placement: Placement, train: int, trained: Trained, serving: Serving) -> None:
        request = self.request
        assert request.work.rollouts is not None
        rollout = self._rollout_s(serving)
        if not math.isfinite(rollout):
            return
        colocated = placement == "colocated"
        phases = Phases(
            rollout,
            trained.score_s,
            trained.update_s,
            least_s(request.shape, serving, request.work.rollouts.weight_bytes, request.machine),
            self._moved_s(trained) if colocated and request.offload else 0.0,
            ahead=not colocated and request.work.rollouts.max_lag > 0,
        )
        if phases.seconds < self._worst:
            self._keep(Choice(placement, train, trained, phases, serving))
        else:
            self.pruned += 1

    def _moved_s(self, trained: Trained) -> float:
        """To move weights and the optimizer's state to the host's memory, and back."""
        gpu, memory = self.request.machine.gpu, trained.memory
        return 2 * (memory.weights + memory.optimizer) / (gpu.host * HOST_SHARE)


def planned(request: Request, choice: Choice) -> Choice:
    """With the publication's time by the reshard plan of this very choice, unless it is negligible; loads torch."""
    serving, rollouts = choice.serving, request.work.rollouts
    if serving is None or rollouts is None or choice.phases.publish < NEGLIGIBLE * choice.seconds:
        return choice
    first = choice.train_gpus if choice.placement == "disaggregated" else 0
    seconds = planned_s(
        request.shape,
        choice.trained.training.layout,
        serving,
        request.machine,
        train=choice.train_gpus,
        first=first,
        node=request.node,
        weight_bytes=rollouts.weight_bytes,
    )
    return replace(choice, phases=replace(choice.phases, publish=seconds))


def _impossible(request: Request, *, engines: bool) -> str:
    """What is missing (`engines`: some were possible), and the fewest GPUs of those tried on which something fits."""
    gpus = int(request.fixed.get("train_ranks", request.gpus))
    have = request.ask(gpus).room / 1e9
    least = least_bytes(request.ask(gpus))
    if least is None:
        given = {name: value for name, value in request.fixed.items() if name in Layout.model_fields}
        problems = layout_problems(Layout.model_validate(given), request.shape, gpus)
        why = "; ".join(problems) or "take another number of them, or fix less"
        return f"no layout divides the model over {gpus} GPUs: {why}"
    if least / 1e9 <= have and not engines:
        return (
            f"no engines can be made of {request.gpus} GPUs beside those that train: they must divide them, the nodes"
            " and the model; and what is rolled out ahead of training (mode.max_lag) without mode.interrupt needs GPUs"
            " of its own"
        )
    if least / 1e9 <= have:
        return (
            f"training alone fits on {gpus} GPUs ({least / 1e9:.0f} of {have:.0f} GB on each), but not with"
            " engines that hold the model and the longest response; take more nodes, or fix less"
        )
    text = f"no layout fits: the smallest needs {least / 1e9:.0f} GB on a GPU, which has {have:.0f} GB"
    for times in MORE_GPUS:
        more = replace(request, nodes=times * request.nodes)
        smallest = least_bytes(more.ask(more.gpus))
        if smallest is not None and smallest / 1e9 <= have:
            return f"{text}; {more.nodes} nodes are enough to train"
    return f"{text}; nor do {MORE_GPUS[-1]} times as many nodes help"

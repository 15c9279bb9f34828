"""A rollout phase, event by event: the scheduler of the real system over simulated engines.

An engine is looked at only when a chunk ends, a request arrives, or its cache is full; what lies between is arithmetic.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megarl.rollout_engine.scheduler import POLICIES, Request, Scheduler
from megarl.simulator.engine import Job, SimulatedEngine
from megarl.simulator.speed import EngineModel
from megarl.simulator.workload import GroupLengths, Workload

Sample = tuple[float, int, int, int]
"""An engine at a time: seconds, running requests, tokens that they hold of the cache, queued requests.

All is linear from one sample to the next; where something jumps there are two.
"""

EVENTS_A_REPORT = 4096


@dataclass(frozen=True)
class Run:
    """What came out. Seconds are simulated ones, except `wall_s`."""

    workload: Workload
    model: EngineModel
    engines: list[SimulatedEngine]
    jobs: list[Job]
    makespan: float
    finish: dict[int, float]
    """When each finished request (by number) finished."""
    groups_finished: int
    chunks: int
    migrations: int
    """Chunks that went on where the one before had not been."""
    timelines: list[list[Sample]]
    wall_s: float


def make_scheduler(policy: str, **options: Any) -> Scheduler:
    """Options are those of the policy's constructor."""
    if policy not in POLICIES:
        raise ValueError(f"no policy {policy!r}, expected one of {', '.join(POLICIES)}")
    return POLICIES[policy](**options)


def simulate(
    workload: Workload,
    model: EngineModel,
    engines: int,
    scheduler: Scheduler,
    *,
    know_lengths: bool = False,
    enough_groups: int | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Run:
    """Runs until all responses are finished, or `enough_groups` groups are.

    `know_lengths` tells the scheduler the lengths, as only an oracle may have it. `progress` is called now and then
    with the number of finished requests and the simulated seconds.
    """
    check_room(workload, model)
    started, groups_finished = time.perf_counter(), list[int]()
    cluster = Cluster(model, engines, scheduler, workload.cap, groups_finished.append, know_lengths)
    for number, group in enumerate(workload.groups):
        cluster.add(number, group)
    cluster.dispatch()
    looked = 0
    while len(groups_finished) < (enough_groups or len(workload.groups)):
        cluster.next()
        looked += 1
        if progress and looked % EVENTS_A_REPORT == 0:
            progress(len(cluster.finish), cluster.now)
    cluster.stop()
    return Run(
        workload,
        model,
        cluster.engines,
        cluster.jobs,
        cluster.now,
        cluster.finish,
        len(groups_finished),
        cluster.chunks,
        cluster.migrations,
        cluster.timelines,
        time.perf_counter() - started,
    )


def check_room(workload: Workload, model: EngineModel) -> None:
    """Raise ValueError: an engine's cache is too small for the longest response."""
    longest = max(group.prompt for group in workload.groups) + workload.cap
    if longest > model.kv_tokens:
        raise ValueError(
            f"an engine's cache holds {model.kv_tokens:,} tokens, a prompt with the longest response needs {longest:,}"
            ": give the engine more GPUs, or the responses a lower cap"
        )


@dataclass
class Cluster:
    """`count` engines under a scheduler, as they are at `now` (seconds). Responses are `cap` tokens at most."""

    model: EngineModel
    count: int
    scheduler: Scheduler
    cap: int
    group_finished: Callable[[int], object]
    """Called with a group's number when the last of its responses is finished."""
    know_lengths: bool = False
    now: float = 0.0
    chunks: int = 0
    migrations: int = 0
    jobs: list[Job] = field(default_factory=list)
    finish: dict[int, float] = field(default_factory=dict)
    _events: list[tuple[float, int, int, Job | None]] = field(default_factory=list)
    """(time, order, engine, the request that arrives; None: a planned end)"""
    _order: int = 0

    def __post_init__(self) -> None:
        self.engines = [SimulatedEngine(number, self.model) for number in range(self.count)]
        self.timelines: list[list[Sample]] = [[] for _ in self.engines]
        self._due = [-1] * self.count  # the order of each engine's valid planned end
        self._job_of: dict[Request, Job] = {}
        self._left: dict[int, int] = {}
        self._next_arrival = [0.0] * self.count
        self._last_engine: dict[int, int] = {}
        for number in range(self.count):
            self.scheduler.join(number, kv_tokens=self.model.kv_tokens, max_running=self.model.max_running)

    def add(self, number: int, group: GroupLengths) -> None:
        """The group waits from now on; `dispatch` starts what can start."""
        self._left[number] = len(group.lengths)
        requests = [Request(group.prompt, self.cap, length if self.know_lengths else None) for length in group.lengths]
        for request, length in zip(requests, group.lengths, strict=True):
            job = Job(len(self.jobs), number, group.prompt, length, request)
            self.jobs.append(job)
            self._job_of[request] = job
        self.scheduler.add(requests)

    def dispatch(self) -> None:
        while assignment := self.scheduler.next():
            job, number = self._job_of[assignment.request], assignment.engine
            self.chunks += 1
            self.migrations += self._last_engine.setdefault(job.number, number) != number
            self._last_engine[job.number] = number
            job.asked, job.begun = assignment.tokens, job.generated
            arrival = max(self.now + self.model.request_s, self._next_arrival[number])
            self._next_arrival[number] = arrival + self.model.call_s
            if arrival > self.now:
                self._push(arrival, number, job)
            else:
                self._arrive(job, number)

    def next(self) -> None:
        """Up to the next event, which may be one that has become void."""
        assert self._events, f"nothing runs and {self.scheduler.waiting} requests wait"
        at, order, number, job = heapq.heappop(self._events)
        if job is None and self._due[number] != order:
            return
        self.now = max(self.now, at)  # requests that came while engines stood still are looked at after that
        if job is None:
            self._step(self.engines[number])
            self.dispatch()
        else:
            self._arrive(job, number)

    def run(self, until: float) -> None:
        """Up to that time."""
        while self._events and self._events[0][0] <= until:
            self.next()
        self.now = max(self.now, until)

    def stand_still(self, seconds: float) -> None:
        """Engines end the step that they are in, forget what they have cached, and go on `seconds` after the last."""
        for engine in self.engines:
            engine.interrupt(self.now)
            self._advance(engine)
        self.now = max(self.now, *(engine.clock for engine in self.engines)) + seconds
        for engine in self.engines:
            engine.forget(self.now)
            self._plan(engine)
        self.dispatch()

    def stop(self) -> None:
        """What still runs is cut off at the end of its step."""
        for engine in self.engines:
            if engine.running:
                engine.interrupt(self.now)
                engine.advance()
                for job in engine.running.values():
                    job.generated = job.offset + engine.steps

    def _arrive(self, job: Job, number: int) -> None:
        engine = self.engines[number]
        engine.queue.append(job)
        if len(engine.queue) == 1:
            engine.interrupt(self.now)
            self._plan(engine)

    def _step(self, engine: SimulatedEngine) -> None:
        timeline = self.timelines[engine.number]
        timeline.append((engine.next_event, len(engine.running), engine.locked_then, len(engine.queue)))
        self._advance(engine)
        engine.plan()
        timeline.append((engine.clock, len(engine.running), engine.locked, len(engine.queue)))
        if engine.running:
            self._plan(engine)

    def _advance(self, engine: SimulatedEngine) -> None:
        for job in engine.advance():
            done = job.generated == job.length
            if done:
                self.finish[job.number] = engine.clock
                self._left[job.group] -= 1
                if not self._left[job.group]:
                    self.group_finished(job.group)
            self.scheduler.finished(job.request, job.generated - job.begun, done=done)

    def _plan(self, engine: SimulatedEngine) -> None:
        self._due[engine.number] = self._order
        self._push(engine.next_event, engine.number, None)

    def _push(self, at: float, number: int, job: Job | None) -> None:
        heapq.heappush(self._events, (at, self._order, number, job))
        self._order += 1

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
from megarl.simulator.workload import Workload

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
    longest = max(group.prompt for group in workload.groups) + workload.cap
    if longest > model.kv_tokens:
        raise ValueError(
            f"an engine's cache holds {model.kv_tokens:,} tokens, a prompt with the longest response needs {longest:,}"
            ": give the engine more GPUs, or the responses a lower cap"
        )
    return _Cluster(workload, model, engines, scheduler, know_lengths).run(
        enough_groups or len(workload.groups), progress
    )


@dataclass
class _Cluster:
    workload: Workload
    model: EngineModel
    count: int
    scheduler: Scheduler
    know_lengths: bool
    events: list[tuple[float, int, int, Job | None]] = field(default_factory=list)
    """(time, order, engine, the request that arrives; None: a planned end)"""
    order: int = 0
    chunks: int = 0
    migrations: int = 0

    def __post_init__(self) -> None:
        self.engines = [SimulatedEngine(number, self.model) for number in range(self.count)]
        self.timelines: list[list[Sample]] = [[] for _ in self.engines]
        self.due = [-1] * self.count  # the order of each engine's valid planned end
        self.jobs: list[Job] = []
        self.job_of: dict[Request, Job] = {}
        self.left = [len(group.lengths) for group in self.workload.groups]
        self.next_arrival = [0.0] * self.count
        self.last_engine: dict[int, int] = {}
        self.finish: dict[int, float] = {}
        self.groups_finished = 0

    def run(self, enough: int, progress: Callable[[int, float], None] | None) -> Run:
        started = time.perf_counter()
        self._submit()
        self._dispatch(0.0)
        now, looked = 0.0, 0
        while self.groups_finished < enough:
            assert self.events, f"nothing runs and {self.scheduler.waiting} requests wait"
            at, order, number, job = heapq.heappop(self.events)
            if job is None and self.due[number] != order:
                continue
            now = at
            if job is None:
                self._step(self.engines[number])
                self._dispatch(now)
            else:
                self._arrive(job, number, now)
            looked += 1
            if progress and looked % EVENTS_A_REPORT == 0:
                progress(len(self.finish), now)
        self._stop(now)
        return Run(
            self.workload,
            self.model,
            self.engines,
            self.jobs,
            now,
            self.finish,
            self.groups_finished,
            self.chunks,
            self.migrations,
            self.timelines,
            time.perf_counter() - started,
        )

    def _submit(self) -> None:
        for engine in self.engines:
            self.scheduler.join(engine.number, kv_tokens=self.model.kv_tokens, max_running=self.model.max_running)
        for number, group in enumerate(self.workload.groups):
            requests = []
            for length in group.lengths:
                request = Request(group.prompt, self.workload.cap, length if self.know_lengths else None)
                job = Job(len(self.jobs), number, group.prompt, length, request)
                self.jobs.append(job)
                self.job_of[request] = job
                requests.append(request)
            self.scheduler.add(requests)

    def _dispatch(self, now: float) -> None:
        while assignment := self.scheduler.next():
            job, number = self.job_of[assignment.request], assignment.engine
            self.chunks += 1
            self.migrations += self.last_engine.setdefault(job.number, number) != number
            self.last_engine[job.number] = number
            job.asked, job.begun = assignment.tokens, job.generated
            arrival = max(now + self.model.request_s, self.next_arrival[number])
            self.next_arrival[number] = arrival + self.model.call_s
            if arrival > now:
                self._push(arrival, number, job)
            else:
                self._arrive(job, number, now)

    def _arrive(self, job: Job, number: int, now: float) -> None:
        engine = self.engines[number]
        engine.queue.append(job)
        if len(engine.queue) == 1:
            engine.interrupt(now)
            self._plan(engine)

    def _step(self, engine: SimulatedEngine) -> None:
        now, timeline = engine.next_event, self.timelines[engine.number]
        timeline.append((now, len(engine.running), engine.locked_then, len(engine.queue)))
        for job in engine.advance():
            done = job.generated == job.length
            if done:
                self.finish[job.number] = now
                self.left[job.group] -= 1
                self.groups_finished += not self.left[job.group]
            self.scheduler.finished(job.request, job.generated - job.begun, done=done)
        engine.plan()
        timeline.append((engine.clock, len(engine.running), engine.locked, len(engine.queue)))
        if engine.running:
            self._plan(engine)

    def _plan(self, engine: SimulatedEngine) -> None:
        self.due[engine.number] = self.order
        self._push(engine.next_event, engine.number, None)

    def _push(self, at: float, number: int, job: Job | None) -> None:
        heapq.heappush(self.events, (at, self.order, number, job))
        self.order += 1

    def _stop(self, now: float) -> None:
        """What still runs is cut off at the end of its step."""
        for engine in self.engines:
            if engine.running:
                engine.interrupt(now)
                engine.advance()
                for job in engine.running.values():
                    job.generated = job.offset + engine.steps

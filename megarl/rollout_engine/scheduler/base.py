"""What a scheduler is told and what it decides, and the part that all policies share: which request runs where.

Pure: no clock and no I/O, and the same calls give the same decisions. The coordinator and the simulator drive the same
objects: `join` engines, `add` groups, carry out what `next` returns until it returns None, and report each chunk by
`finished`, or a lost engine by `lost`.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from megarl.rollout_engine.scheduler.lengths import Moments

TRIAL_TOKENS = (2, 64, 2048)
"""New tokens that a request generates on trial, after the first, second, or a later engine that it was with died."""


class Group:
    """The samples of one prompt. `estimate` is the length (tokens) that is expected of those that still run."""

    __slots__ = ("deadline", "estimate", "home", "known", "number", "prompt", "requests", "unfinished")

    def __init__(self, number: int, requests: Sequence[Request], *, estimate: int, deadline: int) -> None:
        self.number, self.requests, self.estimate, self.deadline = number, requests, estimate, deadline
        self.prompt = max(request.prompt for request in requests)
        self.unfinished = len(requests)  # 0 as well when it was withdrawn
        self.known: Moments | None = None  # of its finished members' lengths
        self.home: Engine | None = None  # which has the prompt in its cache


@dataclass(slots=True, eq=False)
class Request:
    """One response to be generated, chunk by chunk.

    All numbers are tokens; `limit` is the longest response, `length` what it will be, for those who know.
    """

    prompt: int
    limit: int
    length: int | None = None
    generated: int = 0
    group: Group = field(init=False, repr=False)
    engine: Engine | None = field(default=None, repr=False)  # where it runs, or ran last
    reserved: int = 0  # of the engine's cache besides the prompt, while it runs
    stamp: int = 0  # of its one valid entry in a queue
    probe: bool = False
    strikes: int = 0  # engines that died while it ran there
    suspect: bool = False
    """The last of them has just died: on its trial, no other suspect runs beside it."""

    @property
    def tokens(self) -> int:
        """What its next chunk has to have in the cache."""
        return self.prompt + self.generated


@dataclass(slots=True, eq=False)
class Engine:
    """What is known of an engine: room for `kv_tokens` in its cache and for `max_running` requests."""

    number: int
    kv_tokens: int
    max_running: int
    used: int = 0  # tokens that are reserved; a prompt counts once, however many of its samples run
    running: dict[int, Request] = field(default_factory=dict, repr=False)
    prompts: dict[Group, int] = field(default_factory=dict, repr=False)  # how many samples run of each
    suspects: int = 0
    alive_after: int = 0  # losses of engines after which it has shown that it lives
    listed: int = -1  # the load of its one valid entry in the heap of loads, which is never above its load

    def room(self, request: Request) -> int:
        """New tokens of the request that fit into its cache; less than 1: it cannot run here."""
        if len(self.running) >= self.max_running:
            return 0
        group = request.group
        prompt = 0 if group in self.prompts else group.prompt
        return self.kv_tokens - self.used - prompt - request.generated


@dataclass(frozen=True, slots=True)
class Assignment:
    """The engine is to generate up to `tokens` more tokens of the request."""

    request: Request
    engine: int
    tokens: int


class Scheduler(ABC):
    """Each unfinished request waits or runs on one engine; a policy says who is next, where, and for how long."""

    def __init__(self, *, patience: int = 1 << 62) -> None:
        """A group goes first when `patience` more groups have finished than were there before it."""
        self.engines: dict[int, Engine] = {}
        self.waiting = self.running = 0
        self._patience = patience
        self._groups_added = self._groups_done = 0
        self._unfinished: deque[Group] = deque()  # in the order of their arrival, the first unfinished one in front
        self._suspects: deque[Request] = deque()
        self._losses = 0
        self._by_load: list[tuple[int, int]] = []  # a heap of (load, engine), see `Engine.listed`

    def next(self) -> Assignment | None:
        """The next decision, after which the request counts as running; None: nothing can start now."""
        return (self._next_trial() if self._suspects else None) or self._next()

    @abstractmethod
    def _next(self) -> Assignment | None:
        """Of requests that are no suspects."""

    @abstractmethod
    def _enqueue(self, request: Request) -> None:
        """The request waits from now on."""

    @abstractmethod
    def _load(self, engine: Engine) -> int:
        """The engine with the least gets the next request that belongs nowhere else."""

    def join(self, number: int, *, kv_tokens: int, max_running: int) -> None:
        """An engine can be used from now on."""
        assert number not in self.engines, f"engine {number} is there already"
        self.engines[number] = Engine(number, kv_tokens, max_running, alive_after=self._losses)
        self._touched(self.engines[number])

    def lost(self, number: int, *, blame: bool = True) -> list[Request]:
        """An engine died or was given up: what ran there waits again, from its last finished chunk.

        Unless nobody is to `blame`, each of them is a suspect, and has to pass a trial, on an engine that is known to
        live (`alive`). Returns those that were on trial when the engine died: they are not tried again.
        """
        engine = self.engines.pop(number)
        self._losses += 1
        victims, engine.running, engine.prompts = list(engine.running.values()), {}, {}
        poisoned = [request for request in victims if request.suspect and blame]
        for request in victims:
            self.running -= 1
            request.engine = None
            request.strikes += blame
            if request.suspect and blame:
                self._end(request)
            elif request.group.unfinished:
                request.suspect |= blame
                self._wait(request)
        return poisoned

    def alive(self, number: int) -> None:
        """The engine has answered since the last loss of another."""
        self.engines[number].alive_after = self._losses

    def add(self, requests: Sequence[Request], *, expected: int | None = None) -> Group:
        """The samples of one prompt wait from now on. `expected` is their length, if earlier ones are known."""
        limit = max(request.limit for request in requests)
        deadline = self._groups_added + self._patience
        group = Group(self._groups_added, requests, estimate=min(expected or limit, limit), deadline=deadline)
        self._groups_added += 1
        self._unfinished.append(group)
        for request in requests:
            request.group = group
            request.probe = request is requests[0] and expected is None
            self._wait(request)
        return group

    def finished(self, request: Request, tokens: int, *, done: bool) -> None:
        """A chunk came back with so many new tokens, and with the response's end or without."""
        engine = request.engine
        assert engine is not None, "it does not run"
        group, prompts = request.group, engine.prompts
        del engine.running[id(request)]
        self.running -= 1
        engine.used -= request.reserved
        if prompts[group] == 1:
            del prompts[group]
            engine.used -= group.prompt
        else:
            prompts[group] -= 1
        request.generated += tokens
        if request.suspect:
            engine.suspects -= 1
            request.suspect = False
        engine.alive_after = self._losses
        self._touched(engine)
        if done:
            self._end(request)
        elif group.unfinished:
            self._wait(request)

    def withdraw(self, group: Group) -> None:
        """A group is not wanted any more: nothing of it starts, and what runs ends with its chunk."""
        for request in group.requests:
            if request.stamp:
                request.stamp = 0
                self.waiting -= 1
        self._groups_done += group.unfinished > 0
        group.unfinished = 0

    def _wait(self, request: Request) -> None:
        self.waiting += 1
        if request.suspect:
            request.stamp = -1
            self._suspects.append(request)
        else:
            self._enqueue(request)

    def _next_trial(self) -> Assignment | None:
        while self._suspects and not self._suspects[0].stamp:
            self._suspects.popleft()
        if not self._suspects:
            return None
        request = self._suspects[0]
        trial = TRIAL_TOKENS[min(request.strikes, len(TRIAL_TOKENS)) - 1]
        tokens = min(trial, request.limit - request.generated)
        able = [
            one
            for one in self.engines.values()
            if not one.suspects and one.alive_after == self._losses and self._admits(one, request, tokens)
        ]
        if not able:
            return None
        engine = min(able, key=self._load)
        self._suspects.popleft()
        engine.suspects += 1
        return self._start(request, engine, tokens)

    def _admits(self, engine: Engine, request: Request, tokens: int) -> bool:
        """Whether the engine may be given so many new tokens of the request."""
        return engine.room(request) >= tokens

    def _start(self, request: Request, engine: Engine, tokens: int) -> Assignment:
        group, prompts = request.group, engine.prompts
        request.stamp = 0
        request.engine = group.home = engine
        request.reserved = reserved = request.generated + tokens
        if group in prompts:
            prompts[group] += 1
        else:
            prompts[group] = 1
            reserved += group.prompt
        engine.used += reserved
        engine.running[id(request)] = request
        self.waiting -= 1
        self.running += 1
        return Assignment(request, engine.number, tokens)

    def _end(self, request: Request) -> None:
        group = request.group
        if group.unfinished:
            group.unfinished -= 1
            self._groups_done += not group.unfinished

    def _touched(self, engine: Engine) -> None:
        """The engine's load may be less than it was."""
        load = self._load(engine)
        if engine.listed < 0 or load < engine.listed:
            engine.listed = load
            heapq.heappush(self._by_load, (load, engine.number))

    def _least_loaded(self) -> Engine | None:
        heap, engines = self._by_load, self.engines
        while heap:
            listed, number = heap[0]
            engine = engines.get(number)
            if engine is None or engine.listed != listed:
                heapq.heappop(heap)
                continue
            load = self._load(engine)
            if load <= listed:
                return engine
            engine.listed = load
            heapq.heapreplace(heap, (load, number))
        return None

    def _starving(self) -> Request | None:
        """A waiting request of the oldest group, if that has been passed over for too long."""
        unfinished = self._unfinished
        while unfinished and not unfinished[0].unfinished:
            unfinished.popleft()
        if unfinished and unfinished[0].deadline < self._groups_done:
            return next((request for request in unfinished[0].requests if request.stamp > 0), None)
        return None

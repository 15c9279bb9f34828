"""One SGLang-like engine: its queue, its running batch, its cache; steps of equal batches are taken all at once.

Continuous batching, first come first served: a request is admitted when the cache has room for its context, for the
new tokens it may ask for (at most `CLIP_TOKENS`), for all that those prefilled with it may ask for, and for a share of
what running ones may. The share falls with every step of a busy engine, and is guessed anew after a preemption.
Prefill goes before decoding. What leaves the batch stays in the cache until room is needed, the least recently used
first to go; samples of one prompt share it. When the cache is full of running requests, those with the fewest new
tokens lose what they have, and queue again.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from megarl.rollout_engine.scheduler import Request
from megarl.simulator.speed import EngineModel

CLIP_TOKENS = 4096
LEAST_SHARE, SHARE_FALL, SPARE_STEPS = 0.098, 0.001, 20
"""SGLang's: SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION; 0.7 x 0.14, to which its share falls from 0.7 within 600 steps;
SGLANG_RETRACT_DECODE_STEPS."""


@dataclass(slots=True, eq=False)
class Job:
    """A request as engines see it; all numbers are tokens."""

    number: int
    group: int
    prompt: int
    length: int
    request: Request
    generated: int = 0
    """When it was last admitted or left; while it runs, `offset` and the engine's steps tell."""
    asked: int = 0
    """New tokens that the current call may generate."""
    begun: int = 0
    """`generated` when the call came."""
    offset: int = 0


@dataclass(slots=True)
class Counts:
    """What an engine did: seconds, and tokens or events."""

    decode_s: float = 0.0
    prefill_s: float = 0.0
    prefilled: int = 0
    preemptions: int = 0
    generated: int = 0


@dataclass(slots=True)
class SimulatedEngine:
    """Its state is that at `clock`, from when it takes `planned` decode steps."""

    number: int
    model: EngineModel
    clock: float = 0.0
    planned: int = 0
    steps: int = 0
    """Decode steps so far; running requests are counted by them."""
    queue: deque[Job] = field(default_factory=deque)
    running: dict[int, Job] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    context: int = 0
    """Tokens that a decode step reads."""
    locked: int = 0
    """Tokens of the cache that running requests hold; a prompt counts once."""
    _prompts: dict[int, int] = field(default_factory=dict)  # group: its running requests
    _cached: int = 0
    _cache: OrderedDict[int, int] = field(default_factory=OrderedDict)  # job, or ~group for a prompt: tokens
    _ends: list[tuple[int, int, int]] = field(default_factory=list)  # (step, admission, job)
    _admissions: dict[int, int] = field(default_factory=dict)
    _admitted: int = 0
    _asked: int = 0  # what running requests may still ask for, clipped; an upper bound after more steps than
    _asked_at: int = -1
    _share: float = 0.0  # at the step
    _share_at: int = 0

    def __post_init__(self) -> None:
        self._share = self.model.first_share

    @property
    def share(self) -> float:
        """Of what running requests may still ask for, so much is kept free when one is admitted."""
        return max(self._share - (self.steps - self._share_at) * SHARE_FALL, LEAST_SHARE)

    @property
    def next_event(self) -> float:
        """When the planned steps are done."""
        return self.clock + self.model.steps_s(self.planned, len(self.running), self.context)

    @property
    def locked_then(self) -> int:
        """What running requests hold at that time."""
        return self.locked + self.planned * len(self.running)

    def interrupt(self, now: float) -> None:
        """Plans no further than the step that is taken at `now`."""
        steps = self.model.steps_until(now - self.clock, len(self.running), self.context)
        self.planned = min(self.planned, steps)
        if not self.running:
            self.clock = max(self.clock, now)
            self._share, self._share_at = self.model.first_share, self.steps

    def advance(self) -> list[Job]:
        """Takes the planned steps; returns what they finished. `clock` is then when."""
        steps, batch = self.planned, len(self.running)
        seconds = self.model.steps_s(steps, batch, self.context)
        self.clock += seconds
        self.counts.decode_s += seconds
        self.counts.generated += steps * batch
        self.steps += steps
        self.context += steps * batch
        self.locked += steps * batch
        self.planned = 0
        self._evict()
        finished = []
        ends = self._ends
        while ends and ends[0][0] <= self.steps:
            _, admission, number = heapq.heappop(ends)
            if self._admissions.get(number) == admission:
                job = self.running[number]
                self._leave(job, keep=True)
                finished.append(job)
        return finished

    def forget(self, until: float) -> None:
        """Nothing is cached any more, what ran is the first to be prefilled again, and nothing happens `until` then."""
        for job in reversed(list(self.running.values())):
            self._leave(job, keep=False)
            self.queue.appendleft(job)
        self._cache.clear()
        self._cached, self._asked, self._asked_at = 0, 0, -1
        self.clock = until

    def plan(self) -> None:
        """Admits what fits, prefills it, preempts if the next step does not fit, and plans up to the next event."""
        self._admit()
        if not self.running:
            return
        while self.locked + len(self.running) > self.model.kv_tokens and len(self.running) > 1:
            self._preempt()
            self._guess_share()
        while self._admissions.get(self._ends[0][2]) != self._ends[0][1]:
            heapq.heappop(self._ends)
        room = (self.model.kv_tokens - self.locked) // len(self.running)
        self.planned = min(self._ends[0][0] - self.steps, max(room, 1))

    def _admit(self) -> None:
        tokens, pairs, fresh, before = 0, 0.0, 0, len(self.running)
        while self.queue and len(self.running) < self.model.max_running:
            job = self.queue[0]
            shared = job.group in self._prompts
            own = self._cache.get(job.number, 0)
            prompt = job.prompt if shared else self._cache.get(~job.group, 0)
            need = job.generated + (0 if shared else job.prompt)
            left = job.asked - (job.generated - job.begun)
            if self.running and not self._fits(need + min(left, CLIP_TOKENS), fresh):
                break
            self.queue.popleft()
            missing = max(job.prompt - prompt + job.generated - own, 1)
            held = job.prompt + job.generated - missing
            tokens += missing
            pairs += missing * (held + missing / 2)
            self._start(job, left)
            same_pass = tokens // self.model.pass_tokens == (tokens - missing) // self.model.pass_tokens
            fresh = (fresh if same_pass else 0) + min(left - 1, CLIP_TOKENS)
        if tokens:
            seconds = self.model.prefill_seconds(tokens, pairs, len(self.running) - before)
            self.clock += seconds
            self.counts.prefill_s += seconds
            self.counts.prefilled += tokens

    def _fits(self, need: int, fresh: int) -> bool:
        """`fresh`: what those that were admitted in the same pass may still ask for."""
        room, share = self.model.kv_tokens - self.locked - need - fresh, self.share
        if room >= share * (self._asked - fresh) or self._asked_at == self.steps:
            return room >= share * (self._asked - fresh)
        steps = self._asked_at = self.steps
        self._asked = sum(
            min(job.asked - (job.offset + steps - job.begun), CLIP_TOKENS) for job in self.running.values()
        )
        return room >= share * (self._asked - fresh)

    def _start(self, job: Job, left: int) -> None:
        """The request joins the batch; its prefill yields its first new token."""
        number, group = job.number, job.group
        self._cached -= self._cache.pop(number, 0)
        self.locked += job.generated + 1
        if group not in self._prompts:
            self._cached -= self._cache.pop(~group, 0)
            self.locked += job.prompt
        self._prompts[group] = self._prompts.get(group, 0) + 1
        self._asked += min(left - 1, CLIP_TOKENS)
        stop = min(job.begun + job.asked, job.length)
        job.generated += 1
        job.offset = job.generated - self.steps
        self.context += job.prompt + job.generated
        self.counts.generated += 1
        self._admitted += 1
        self._admissions[number] = self._admitted
        self.running[number] = job
        heapq.heappush(self._ends, (self.steps + stop - job.generated, self._admitted, number))
        self._evict()

    def _leave(self, job: Job, *, keep: bool) -> None:
        """The request leaves the batch, and the cache keeps what it has generated, or does not."""
        job.generated = job.offset + self.steps
        del self.running[job.number], self._admissions[job.number]
        self.context -= job.prompt + job.generated
        self.locked -= job.generated
        if keep:
            self._keep(job.number, job.generated)
        self._prompts[job.group] -= 1
        if not self._prompts[job.group]:
            del self._prompts[job.group]
            self.locked -= job.prompt
            self._keep(~job.group, job.prompt)

    def _keep(self, key: int, tokens: int) -> None:
        self._cached += tokens - self._cache.pop(key, 0)
        self._cache[key] = tokens

    def _evict(self) -> None:
        excess = self._cached + self.locked - self.model.kv_tokens
        while excess > 0 and self._cache:
            key, tokens = next(iter(self._cache.items()))
            gone = min(tokens, excess)
            if gone == tokens:
                del self._cache[key]
            else:
                self._cache[key] = tokens - gone
            self._cached -= gone
            excess -= gone

    def _preempt(self) -> None:
        admitted = self._admissions
        job = min(self.running.values(), key=lambda one: (one.offset - one.begun, -admitted[one.number]))
        self._leave(job, keep=False)
        self.counts.preemptions += 1
        self.queue.append(job)

    def _guess_share(self) -> None:
        made = sum(job.offset + self.steps - job.begun + SPARE_STEPS for job in self.running.values())
        asked = sum(job.asked for job in self.running.values())
        self._share, self._share_at = min(made / (asked + 1), 1.0), self.steps

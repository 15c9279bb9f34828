"""What a simulated rollout phase is judged by, and the bounds that no schedule can beat."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np

from megarl.simulator.cluster import Run
from megarl.simulator.speed import EngineModel
from megarl.simulator.workload import Workload

TAIL = 0.1
"""The share of requests that finish last, whose seconds are the tail."""


@dataclass(frozen=True)
class Bounds:
    """Seconds that no schedule can beat: all work shared evenly, and the longest response alone on an engine."""

    work: float
    longest: float

    @property
    def seconds(self) -> float:
        return max(self.work, self.longest)


@dataclass(frozen=True)
class Summary:
    """Seconds are simulated ones; tokens are new ones of finished and unfinished responses."""

    policy: str
    makespan: float
    throughput: float
    """Tokens a second."""
    tail: float
    """Seconds from the finish of 90 % of the requests to the end."""
    idle: float
    """Fraction of the engines' time in which they had nothing to do."""
    prefill: float
    """Fraction of the engines' time spent in prefill."""
    batch: float
    """Requests that ran in a decode step, on average over steps."""
    preemptions: int
    reprefilled: int
    """Tokens prefilled again: all that were, but each prompt once."""
    chunks: int
    migrations: int
    tokens: int
    groups: int
    leftover_requests: int
    leftover_tokens: int
    """What unfinished responses have so far."""
    bound: float
    """Seconds that no schedule can beat; 0 where the phase was cut off."""
    bound_work: float
    bound_longest: float
    wall_s: float


def summarize(policy: str, run: Run) -> Summary:
    finish = sorted(run.finish.values())
    requests = run.workload.requests
    generated = sum(engine.counts.generated for engine in run.engines)
    time_s = run.makespan * len(run.engines)
    decode_s = sum(engine.counts.decode_s for engine in run.engines)
    prefill_s = sum(engine.counts.prefill_s for engine in run.engines)
    prompts = {job.group: job.prompt for job in run.jobs if job.generated}
    leftovers = [job.generated for job in run.jobs if job.number not in run.finish]
    limits = bounds(run.workload, run.model, len(run.engines)) if not leftovers else Bounds(0.0, 0.0)
    kept = sum(job.generated for job in run.jobs)
    last = math.ceil((1 - TAIL) * len(finish))
    return Summary(
        policy=policy,
        makespan=run.makespan,
        throughput=kept / run.makespan,
        tail=run.makespan - finish[last - 1],
        idle=max(0.0, 1 - (decode_s + prefill_s) / time_s),
        prefill=prefill_s / time_s,
        batch=generated / max(sum(engine.steps for engine in run.engines), 1),
        preemptions=sum(engine.counts.preemptions for engine in run.engines),
        reprefilled=sum(engine.counts.prefilled for engine in run.engines) - sum(prompts.values()),
        chunks=run.chunks,
        migrations=run.migrations,
        tokens=kept,
        groups=run.groups_finished,
        leftover_requests=requests - len(finish),
        leftover_tokens=sum(leftovers),
        bound=limits.seconds,
        bound_work=limits.work,
        bound_longest=limits.longest,
        wall_s=run.wall_s,
    )


def as_json(summary: Summary) -> dict[str, object]:
    return asdict(summary)


def bounds(workload: Workload, model: EngineModel, engines: int) -> Bounds:
    """Lower bounds of the makespan of all responses.

    Work: a step holds at most `kv_tokens` tokens of contexts and `max_running` requests, so that there are at least n
    steps. With h, the lower convex hull of a step's seconds by batch size, N tokens in n steps take at least
    n h(N / n), which grows with n; the tokens that steps read and each prompt's prefill come on top.
    """
    lengths = np.array([length for group in workload.groups for length in group.lengths], dtype=float)
    prompts = np.array([group.prompt for group in workload.groups for _ in group.lengths], dtype=float)
    shares = np.array([group.prompt / len(group.lengths) for group in workload.groups for _ in group.lengths])
    decoded = lengths - 1  # the first token comes with the prefill
    grown = decoded * (decoded + 1) / 2
    tokens = decoded.sum()
    steps = max((decoded * shares + grown).sum() / model.kv_tokens, tokens / model.max_running)
    read = (decoded * prompts + grown).sum()
    each = model.prefill_s + model.pass_s / model.pass_tokens
    prefill = sum(group.prompt * each + group.prompt**2 / 2 * model.pair_s for group in workload.groups)
    prefill += workload.requests * model.admit_s
    work = steps * _hull(model, tokens / steps) if tokens else 0.0
    alone = max(
        model.prefill_seconds(group.prompt, group.prompt**2 / 2, 1)
        + (max(group.lengths) - 1) * min(model.decode_s[1:])
        + model.cached_s * _read_alone(group.prompt, max(group.lengths))
        for group in workload.groups
    )
    return Bounds((work + model.cached_s * read + prefill) / engines, alone + model.request_s)


def _read_alone(prompt: int, length: int) -> int:
    return (length - 1) * prompt + length * (length - 1) // 2


def _hull(model: EngineModel, batch: float) -> float:
    """The lower convex hull of a step's seconds over batch sizes, at a batch size that may lie between two."""
    batch = max(batch, 1.0)
    hull: list[tuple[int, float]] = []
    for size, seconds in enumerate(model.decode_s[1:], 1):
        while len(hull) >= 2 and _turns_up(hull[-2], hull[-1], (size, seconds)):
            hull.pop()
        hull.append((size, seconds))
    sizes, seconds_of = zip(*hull, strict=True)
    return float(np.interp(batch, sizes, seconds_of))


def _turns_up(first: tuple[int, float], middle: tuple[int, float], last: tuple[int, float]) -> bool:
    """Whether the middle lies on or above the line between the others."""
    slope = (last[1] - first[1]) / (last[0] - first[0])
    return middle[1] >= first[1] + slope * (middle[0] - first[0])

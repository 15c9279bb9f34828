"""Fits `megarl.layout.Shares` to published step times, within what is physically plausible.

A coordinate search: each share in turn is moved up or down as long as that lowers the mean error of log seconds, in
steps that shrink. Errors above a half count less, so that rows of unknown circumstances do not decide.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from megarl.layout import Shares, step_time
from tools.bench.published_layouts import Run, machine

Key = tuple[str, ...]

BOUNDS: dict[str, tuple[float, float]] = {
    "gemm": (0.5, 0.9),
    "low_precision": (0.4, 1.0),
    "attention": (0.25, 0.8),
    "depth": (0.0, 600.0),
    "scan": (0.02, 0.5),
    "memory": (0.6, 0.92),
    "link": (0.4, 0.9),
    "exchange": (0.3, 0.9),
    "network": (0.5, 0.95),
    "collective_s": (1e-5, 8e-5),
    "kernel_s": (2e-6, 1.2e-5),
    "layer_s": (1e-4, 1e-3),
    "expert_layer_s": (1e-3, 5e-3),
    "routing_s": (0.0, 3e-3),
    "overlap": (0.2, 0.95),
    "step_s": (0.0, 0.1),
}
FIXED = (("low_precision", "bf16"), ("low_precision", "fp32"))
DATA_PARALLEL_WEIGHT = 0.3
"""Of rows without model parallelism, beside 1."""
ADAPTER_WEIGHT = 0.3


_Weighed = tuple[Run, float, float]
"""A question, the measured seconds and the weight of its row."""


def fit(runs: Sequence[Run], start: Shares, rounds: int = 4) -> Shares:
    """Shares for the rows of quality A and B that give a time."""
    data = _weighted(runs)
    values = {key: value for key, value in _flat(start).items() if key not in FIXED}
    best, steps = _loss(_shares(start, values), data), dict.fromkeys(values, 0.2)
    for _ in range(rounds):
        for key in values:
            best = _descend(key, values, steps, best, start, data)
    return _shares(start, values)


def show(shares: Shares) -> str:
    """One share a line."""
    return "\n".join(f"  {'.'.join(key)} = {value:.3g}" for key, value in _flat(shares).items())


def _descend(
    key: Key, values: dict[Key, float], steps: dict[Key, float], best: float, start: Shares, data: list[_Weighed]
) -> float:
    """Move one share at most twice; the new loss."""
    low, high = BOUNDS[key[0]]
    for _ in range(2):
        old = values[key]
        for sign in (1, -1):
            values[key] = min(high, max(low, old * math.exp(sign * steps[key])))
            loss = _loss(_shares(start, values), data) if values[key] != old else best
            if loss < best - 1e-6:
                best = loss
                break
            values[key] = old
        else:
            steps[key] /= 2
            return best
    return best


def _weighted(runs: Sequence[Run]) -> list[_Weighed]:
    """Rows that ask the same are one, with the geometric mean of their seconds."""
    same: dict[object, list[Run]] = defaultdict(list)
    for run in runs:
        if run.seconds is not None and run.row["quality"] in ("A", "B"):
            same[(run.training, run.row["gpu"], run.row["framework"])].append(run)
    found = []
    for members in same.values():
        run = members[0]
        seconds = math.exp(sum(math.log(one.seconds or 1.0) for one in members) / len(members))
        weight = 1.0 if run.model_parallel else DATA_PARALLEL_WEIGHT
        weight *= ADAPTER_WEIGHT if run.training.adapters else 1.0
        found.append((run, seconds, weight * len(members)))
    return found


def _loss(shares: Shares, data: Sequence[_Weighed]) -> float:
    total = 0.0
    for run, seconds, weight in data:
        size = abs(math.log(step_time(run.training, machine(run.row, shares)).seconds / seconds))
        total += weight * (size if size < 0.5 else 0.5 + 0.2 * (size - 0.5))
    return total / sum(weight for *_, weight in data)


def _flat(shares: Shares) -> dict[Key, float]:
    found: dict[Key, float] = {}
    for name, value in vars(shares).items():
        if isinstance(value, dict):
            found |= {(name, kind): one for kind, one in value.items()}
        else:
            found[(name,)] = value
    return found


def _shares(start: Shares, values: dict[Key, float]) -> Shares:
    fields: dict[str, object] = {}
    for (name, *kind), value in values.items():
        if kind:
            fields.setdefault(name, dict(getattr(start, name)))[kind[0]] = value  # type: ignore[index]
        else:
            fields[name] = value
    return replace(start, **fields)  # type: ignore[arg-type]

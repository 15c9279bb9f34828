"""Fits `megarl.layout.Shares` to published step times, within what is physically plausible.

Each share has bounds, whose geometric middle is the neutral guess from which every fit starts: what a fit finds is
told by its rows alone. It minimises the mean error of log seconds (beyond a half it counts less, so that rows of
unknown circumstances do not decide) plus a small penalty for leaving the guess, which decides what the rows do not.
Steps are Gauss-Newton's in the logarithms of the shares, with rows weighted anew for absolute errors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megarl.layout import GENERATIONS, Machine, Mixture, Precision, Scan, Shares, Training, step_time
from tools.bench.published_layouts import Run, machine

Key = tuple[str, ...]

BOUNDS: dict[str, tuple[float, float]] = {
    "gemm": (0.55, 0.92),
    "low_precision": (0.5, 1.0),
    "attention": (0.2, 0.8),
    "older_kernel": (0.3, 1.0),
    "depth": (30.0, 300.0),
    "tail": (2e5, 4e6),
    "scan": (0.005, 0.2),
    "memory": (0.6, 0.95),
    "link": (0.4, 0.9),
    "exchange": (0.3, 0.9),
    "network": (0.5, 0.95),
    "collective_s": (1e-5, 1e-4),
    "kernel_s": (2e-6, 1.2e-5),
    "layer_s": (1e-4, 1e-3),
    "expert_layer_s": (3e-4, 4e-3),
    "routing_s": (1e-4, 3e-3),
    "overlap": (0.4, 0.95),
    "waiting": (1.0, 2.5),
    "step_s": (0.005, 0.2),
}
GIVEN = {("low_precision", "bf16"): 1.0, ("low_precision", "fp32"): 0.07}
"""Shares that no published row tells."""
DATA_PARALLEL_WEIGHT = 0.3
"""Of rows without model parallelism, beside 1."""
ADAPTER_WEIGHT = 0.3
PENALTY = 2e-4
"""Of the mean error, for a share that is a quarter of its range, in logarithms, from the guess."""
LARGE = 0.5
"""Errors beyond it count a fifth of what they exceed it by."""
SMALL = 0.02
"""Errors within it are weighted as squares, so that steps are finite."""


def neutral() -> Shares:
    """The geometric middle of all bounds."""
    kinds: dict[str, Iterable[str]] = {
        "gemm": sorted(set(GENERATIONS.values())),
        "link": sorted(set(GENERATIONS.values())),
        "low_precision": Precision.__args__,  # type: ignore[attr-defined]
        "attention": Shares().attention,
    }
    values = {}
    for name, bounds in BOUNDS.items():
        for kind in kinds.get(name, ("",)):
            key = (name, kind) if kind else (name,)
            values[key] = GIVEN.get(key, math.sqrt(math.prod(bounds)))
    return _shares(values)


def fit(runs: Sequence[Run], rounds: int = 12) -> Shares:
    """Shares for the rows of quality A and B that give a time."""
    data, values = _weighted(runs), _flat(neutral())
    keys = [key for key in values if key not in GIVEN]
    bounds = np.log([BOUNDS[key[0]] for key in keys])
    guess, width = bounds.mean(1), (bounds[:, 1] - bounds[:, 0]) / 4
    weights = np.array([one.weight for one in data])
    weights /= weights.sum()

    def residuals(where: np.ndarray) -> np.ndarray:
        shares = _shares(values | dict(zip(keys, np.exp(where), strict=True)))
        return np.array([one.residual(shares) for one in data])

    def loss(found: np.ndarray, where: np.ndarray) -> float:
        sizes = np.abs(found)
        huge = np.minimum(sizes, LARGE) + 0.2 * np.maximum(sizes - LARGE, 0.0)
        return float(weights @ huge + PENALTY * (((where - guess) / width) ** 2).sum())

    here = guess.copy()
    off = residuals(here)
    best = loss(off, here)
    for _ in range(rounds):
        slopes = _slopes(data, keys, values | dict(zip(keys, np.exp(here), strict=True)), off)
        sizes = np.abs(off)
        weighed = weights * np.where(sizes > LARGE, 0.2, 1.0) / np.maximum(sizes, SMALL)
        left = slopes.T * weighed @ slopes + np.diag(2 * PENALTY / width**2)
        step = np.linalg.solve(left, -(slopes.T @ (weighed * off)) - 2 * PENALTY * (here - guess) / width**2)
        for part in (1.0, 0.5, 0.25, 0.1):
            there = np.clip(here + part * step, bounds[:, 0], bounds[:, 1])
            new = residuals(there)
            if loss(new, there) < best:
                break
        else:
            break
        gain, here, off, best = best - loss(new, there), there, new, loss(new, there)
        if gain < 1e-5:
            break
    return _shares(values | dict(zip(keys, np.exp(here), strict=True)))


def show(shares: Shares) -> str:
    """One share a line, with those that lie on a bound named."""
    lines = []
    for key, value in _flat(shares).items():
        low, high = BOUNDS[key[0]]
        bound = key not in GIVEN and min(value / low, high / value) < 1.001
        lines.append(f"  {'.'.join(key)} = {value:.3g}{'  on its bound' if bound else ''}")
    return "\n".join(lines)


@dataclass(frozen=True)
class _Weighed:
    """A question, its machine, the measured seconds and the weight of its rows."""

    training: Training
    place: Machine
    seconds: float
    weight: float

    def residual(self, shares: Shares) -> float:
        return math.log(step_time(self.training, replace(self.place, shares=shares)).seconds / self.seconds)

    def depends(self, key: Key) -> bool:
        """Whether a share can matter to it."""
        kinds = self.training.decoder.kinds
        match key:
            case ("gemm" | "link", kind):
                return self.place.generation == kind
            case ("low_precision", kind):
                return self.training.precision == kind
            case ("attention", kind):
                kernel = self.training.software.kernel
                return kernel == kind or (kind, kernel) == ("unfused", "fused_softmax")
            case ("older_kernel",):
                return self.place.generation != "A100" and self.training.software.kernel != "cudnn"
            case ("scan",):
                return any(isinstance(one.mixer, Scan) for one in kinds)
            case ("exchange" | "expert_layer_s" | "routing_s",):
                return any(isinstance(one.mlp, Mixture) for one in kinds)
        return True


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
        found.append(_Weighed(run.training, machine(run.row, Shares()), seconds, weight * len(members)))
    return found


def _slopes(data: Sequence[_Weighed], keys: Sequence[Key], values: Mapping[Key, float], off: np.ndarray) -> np.ndarray:
    """Derivatives of each row's residual by the logarithm of each share, by differences."""
    found = np.zeros((len(data), len(keys)))
    for column, key in enumerate(keys):
        moved = _shares({**values, key: values[key] * 1.01})
        for row, one in enumerate(data):
            if one.depends(key):
                found[row, column] = (one.residual(moved) - off[row]) / math.log(1.01)
    return found


def _flat(shares: Shares) -> dict[Key, float]:
    found: dict[Key, float] = {}
    for name, value in vars(shares).items():
        if isinstance(value, Mapping):
            found |= {(name, kind): one for kind, one in value.items()}
        else:
            found[(name,)] = value
    return found


def _shares(values: Mapping[Key, float]) -> Shares:
    fields: dict[str, object] = {}
    for (name, *kind), value in values.items():
        if kind:
            fields.setdefault(name, {})[kind[0]] = float(value)  # type: ignore[index]
        else:
            fields[name] = float(value)
    return Shares(**fields)  # type: ignore[arg-type]

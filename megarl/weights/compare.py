"""Two checkpoints of any kind, compared name by name as Hugging Face tensors, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.sharedctypes import RawArray

import torch
from torch import Tensor

from megarl.weights.convert import Progress, nbytes, plan_units
from megarl.weights.parameter import Parameter
from megarl.weights.sources import Source
from megarl.weights.workers import each_unit

_PIECE = 1 << 24  # elements that are float64 at once


def compare(
    first: Source,
    second: Source,
    *,
    workers: int,
    worker_start: Callable[[], None] = lambda: None,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> list[str]:
    """A line for each tensor that is not the same in both; none if they are equal in names, dtypes and every bit."""
    others = {parameter.hf: parameter for parameter in second.parameters}
    ours = {parameter.hf for parameter in first.parameters}
    lines = [f"{name}: only in {first.directory}" for names in sorted(ours - others.keys()) for name in names]
    lines += [f"{name}: only in {second.directory}" for names in sorted(others.keys() - ours) for name in names]
    units = [[p for p in unit if p.hf in others] for unit in plan_units(first)]
    total = sum(nbytes(first, parameter) for unit in units for parameter in unit)
    done = RawArray("q", len(units))  # without a lock, which a killed worker could hold for ever

    def work(unit: int) -> list[str]:
        found = []
        for parameter in units[unit]:
            found += _differences(first, parameter, second, others[parameter.hf])
            done[unit] += nbytes(first, parameter)
        return found

    for results in each_unit(work, range(len(units)), workers, worker_start):
        lines += [line for result in results.values() for line in result]
        progress(Progress(sum(done), total, 0))
    return lines


def _differences(first: Source, ours: Parameter, second: Source, theirs: Parameter) -> list[str]:
    if ours.hf_shapes != theirs.hf_shapes:
        return [f"{ours.hf[0]}: shapes {ours.hf_shapes} and {theirs.hf_shapes}"]
    found = []
    for name, a, b in zip(ours.hf, first.tensors(ours), second.tensors(theirs), strict=True):
        if a.dtype is not b.dtype:
            kinds = [str(x.dtype).removeprefix("torch.") for x in (a, b)]
            found.append(f"{name}: {kinds[0]} and {kinds[1]}, max difference {_max_difference(a, b):.3g}")
        elif not torch.equal(_bits(a), _bits(b)):
            found.append(f"{name}: max difference {_max_difference(a, b):.3g}")
    return found


def _bits(tensor: Tensor) -> Tensor:
    """So that a NaN equals itself, and 0 is not -0."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _max_difference(a: Tensor, b: Tensor) -> float:
    pieces = zip(a.reshape(-1).split(_PIECE), b.reshape(-1).split(_PIECE), strict=True)
    return max(float((x.double() - y.double()).abs().max()) for x, y in pieces) if a.numel() else 0.0

"""Converting a checkpoint into the other kind: units of parameters, each read, rearranged and written by one process.

The parent plans, starts the workers, and publishes the result when all units are done. A worker holds one parameter at
a time, so memory does not grow with the model.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from megarl.config import RecipeError
from megarl.weights.dcp import write_checkpoint, write_chunks
from megarl.weights.dcp_metadata import Chunk
from megarl.weights.hf_writer import FILE_BYTES, HfWriter, copy_config, hf_specs
from megarl.weights.keys import checkpoint_place
from megarl.weights.parameter import Parameter
from megarl.weights.safetensors_file import TensorSpec
from megarl.weights.sources import Source, stored_head
from megarl.weights.staging import Staging
from megarl.weights.workers import each_unit

UNIT_BYTES = 128 << 20  # what a kill costs at most for each worker, and about the size of a .distcp file

Units = list[list[Parameter]]


@dataclass(frozen=True)
class Progress:
    """Bytes of tensors that are done, of all, and of those the ones that an earlier attempt had done."""

    done: int
    total: int
    before: int


class Sink(Protocol):
    """A checkpoint to write, in a directory that `Staging` holds."""

    def begin(self) -> None:
        """Called once, before any unit."""

    def has(self, unit: int, result: Any) -> bool:
        """Whether the files in which `unit` was written, with this `result`, are still there."""

    def write(self, unit: int, parameters: list[Parameter], advance: Callable[[int], None]) -> Any:
        """Write these parameters and return, when they are on disk, what `finish` needs to know of them."""

    def finish(self, results: dict[int, Any]) -> None:
        """Called once, after all units."""


class HfSink:
    def __init__(self, source: Source, directory: Path, units: Units, file_bytes: int = FILE_BYTES) -> None:
        self._source, self._directory, self._units = source, directory, units
        self._writer = HfWriter(directory, hf_specs(source.parameters, source.dtype), file_bytes)

    def begin(self) -> None:
        self._writer.create()

    def has(self, unit: int, result: None) -> bool:
        return self._writer.has(name for parameter in self._units[unit] for name in parameter.hf)

    def write(self, unit: int, parameters: list[Parameter], advance: Callable[[int], None]) -> None:
        for parameter in parameters:
            for name, tensor in zip(parameter.hf, self._source.tensors(parameter), strict=True):
                self._writer.write(name, tensor)
            advance(nbytes(self._source, parameter))
        self._writer.sync(name for parameter in parameters for name in parameter.hf)

    def finish(self, results: dict[int, Any]) -> None:
        self._writer.finish()
        _copy_config(self._source, self._directory, dtype=self._source.dtype(self._source.parameters[0]))


class MegatronSink:
    def __init__(self, source: Source, directory: Path, units: Units) -> None:
        self._source, self._directory, self._units = source, directory, units
        self._check_dtypes()

    def begin(self) -> None: ...

    def has(self, unit: int, result: list[tuple[int, int]]) -> bool:
        path = self._directory / _file(unit)
        return path.is_file() and path.stat().st_size == sum(result[-1])

    def write(self, unit: int, parameters: list[Parameter], advance: Callable[[int], None]) -> list[tuple[int, int]]:
        return write_chunks(self._directory / _file(unit), self._chunks(parameters, advance))

    def finish(self, results: dict[int, Any]) -> None:
        write_checkpoint(self._directory, self._described(results))
        _copy_config(self._source, self._directory, dtype=None)

    def _check_dtypes(self) -> None:
        """A stacked tensor has one dtype."""
        dtypes: dict[str, torch.dtype] = {}
        for parameter in self._source.parameters:
            key, _ = checkpoint_place(self._source.shape, parameter)
            dtype = self._source.dtype(parameter)
            if dtypes.setdefault(key, dtype) is not dtype:
                raise RecipeError(
                    f"{self._source.directory}: {parameter.hf[0]} is {dtype}, but other experts of its layer are"
                    f" {dtypes[key]}; expected the same dtype"
                )

    def _chunks(self, parameters: list[Parameter], advance: Callable[[int], None]) -> Iterator[torch.Tensor]:
        for parameter in parameters:
            whole = parameter.layout.to_megatron(self._source.tensors(parameter))
            yield whole if parameter.expert is None else whole[None]
            advance(nbytes(self._source, parameter))

    def _described(self, results: dict[int, list[tuple[int, int]]]) -> Iterator[tuple[str, TensorSpec, Chunk]]:
        for unit, parameters in enumerate(self._units):
            for parameter, (start, length) in zip(parameters, results[unit], strict=True):
                key, index = checkpoint_place(self._source.shape, parameter)
                whole = parameter.layout.whole_shape(parameter.hf_shapes)
                experts = self._source.shape.experts.count if index and self._source.shape.experts else 0
                shape = (experts, *whole) if index else whole
                offsets = (*index, *[0] * len(whole))
                chunk = Chunk(offsets, (1, *whole) if index else whole, _file(unit), start, length)
                yield key, TensorSpec(self._source.dtype(parameter), shape), chunk


def convert(
    source: Source,
    target: Path,
    *,
    to: Literal["hf", "megatron"],
    workers: int,
    overwrite: bool = False,
    file_bytes: int = FILE_BYTES,
    unit_bytes: int = UNIT_BYTES,
    worker_start: Callable[[], None] = lambda: None,
    progress: Callable[[Progress], None] = lambda progress: None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Write the model of `source` to the directory `target`, as "hf" or as "megatron".

    `worker_start` is called in each of the `workers` processes, of which a single one is this process. Raises
    RecipeError: the target is not to be written, or cannot be. What is finished then is kept for the next attempt.
    """
    if source.directory.resolve().is_relative_to(target.parent.resolve() / target.name):
        raise RecipeError(f"{target} has {source.directory}, which is read, in it; give another directory")
    units = plan_units(source, unit_bytes)
    options: dict[str, Any] = {"to": to, "file_bytes": file_bytes, "unit_bytes": unit_bytes}
    job = _job(source, **options)
    staging = Staging(target, job, overwrite=overwrite)
    if staging.restarted:
        say(f"{staging.path} is of another source or with other options: starting over")
    directory = staging.path
    sink: Sink = HfSink(source, directory, units, file_bytes) if to == "hf" else MegatronSink(source, directory, units)
    results = {unit: result for unit, result in staging.finished().items() if sink.has(unit, result)}
    sizes = [sum(nbytes(source, parameter) for parameter in unit) for unit in units]
    before = sum(sizes[unit] for unit in results)
    _check_space(staging.path, sum(sizes) - before)
    done = RawArray("q", len(units))  # without a lock, which a killed worker could hold for ever

    def advance(unit: int, count: int) -> None:
        done[unit] += count

    def work(unit: int) -> Any:
        result = sink.write(unit, units[unit], partial(advance, unit))
        staging.note(unit, result)
        return result

    with _plain_errors(target):
        sink.begin()
        progress(Progress(before, sum(sizes), before))  # also where nothing is left to do
        for finished in each_unit(work, [u for u in range(len(units)) if u not in results], workers, worker_start):
            results |= finished
            progress(Progress(before + sum(done), sum(sizes), before))
        sink.finish(results)
        if job != _job(source, **options):
            raise RecipeError(f"{source.directory} was changed meanwhile; run the same command again")
        staging.publish()


def plan_units(source: Source, unit_bytes: int = UNIT_BYTES) -> Units:
    """The parameters in order, at most `unit_bytes` together, or a single larger one."""
    units: Units = [[]]
    size = 0
    for parameter in source.parameters:
        if units[-1] and size + nbytes(source, parameter) > unit_bytes:
            units.append([])
            size = 0
        units[-1].append(parameter)
        size += nbytes(source, parameter)
    return units


def nbytes(source: Source, parameter: Parameter) -> int:
    return sum(prod(shape) for shape in parameter.hf_shapes) * source.dtype(parameter).itemsize


def _copy_config(source: Source, directory: Path, *, dtype: torch.dtype | None) -> None:
    """A run's critic or reward model has another head than the model that it started from."""
    another = stored_head(source.config) != source.shape.head.name
    copy_config(source.config, directory, head_of=source.shape if another else None, dtype=dtype)


def _file(unit: int) -> str:
    return f"__{unit}_0.distcp"


def _job(source: Source, **options: Any) -> dict[str, Any]:
    """What decides which bytes are written."""
    return options | {"files": [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in source.files()]}


def _check_space(directory: Path, needed: int) -> None:
    written = sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise RecipeError(
            f"{directory}: {needed / 1e9:,.1f} GB are still to be written, but only {free / 1e9:,.1f} GB are free; make"
            f" room, or give another directory ({written / 1e9:,.1f} GB that are finished are kept)"
        )


@contextmanager
def _plain_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecipeError(
            f"{error.filename or target}: cannot write: {error.strerror}; make room or give another directory, and run"
            " the same command again: what is finished is kept"
        ) from None

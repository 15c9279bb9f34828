"""Megatron's distributed checkpoints (torch_dist): tensors read whatever layout they were saved with, and written.

A file holds blobs of `torch.save`, each one box of a tensor. Blobs are read as tensors only, never as objects.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from megarl.config import RecipeError
from megarl.weights.dcp_metadata import METADATA, Chunk, StoredTensor, read_metadata, write_metadata
from megarl.weights.safetensors_file import TensorSpec, read_tensor, write_bytes

BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_COMMON = {"common_backend": "torch", "common_backend_version": 1}
CONFIG = "metadata.json"


Box = tuple[Sequence[int], Sequence[int]]
"""Where a part begins and ends, in each dimension."""


class DcpReader:
    """The tensors of a checkpoint by key; `tensors` says what there is."""

    def __init__(self, directory: Path) -> None:
        """Check what needs no tensor to be read. Raises RecipeError: something is missing or damaged."""
        self._directory = directory
        _check_backend(directory / CONFIG)
        self.tensors = read_metadata(directory)
        self._rows: dict[str, dict[int, list[Chunk]]] = {}
        ends: dict[str, int] = {}
        for stored in self.tensors.values():
            for chunk in stored.chunks:
                ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.start + chunk.length)
        for name, end in sorted(ends.items()):
            path = directory / name
            if not path.is_file():
                raise RecipeError(f"{path}: missing, but {METADATA} names it; copy the checkpoint again")
            if not os.access(path, os.R_OK):
                raise RecipeError(f"{path}: cannot read: Permission denied; ask its owner for a copy")
            if path.stat().st_size < end:
                raise RecipeError(
                    f"{path}: has {path.stat().st_size} bytes, but {METADATA} says at least {end}; copy it again"
                )

    def read(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """The tensor under `key`, or the part of it that `index` selects in its first dimensions.

        Only the boxes that overlap it are read. Raises RecipeError: a damaged file, or boxes that leave something out.
        """
        stored = self.tensors[key]
        shape = stored.spec.shape[len(index) :]
        start = (*index, *[0] * len(shape))
        end = (*(i + 1 for i in index), *shape)
        if 0 in shape:
            return torch.empty(shape, dtype=stored.spec.dtype)
        result, boxes = None, []
        for chunk in self._candidates(key, index):
            low = [max(a, b) for a, b in zip(start, chunk.offsets, strict=True)]
            high = [min(a, b + size) for a, b, size in zip(end, chunk.offsets, chunk.sizes, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            part = self._part(chunk, stored.spec.dtype, [i - o for i, o in zip(index, chunk.offsets, strict=False)])
            box = [slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offsets, strict=True)]
            part = part[tuple(box[len(index) :])]
            if part.shape == shape:
                return part
            boxes.append((low, high))
            if result is None:
                result = torch.empty(shape, dtype=stored.spec.dtype)
            there = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
            result[there[len(index) :]] = part
        covered = sum(prod(b - a for a, b in zip(low, high, strict=True)) for low, high in boxes)
        if result is None or covered != result.numel() or any(_overlap(*pair) for pair in combinations(boxes, 2)):
            raise RecipeError(
                f"{self._directory}: {key} {shape} is not whole: its parts have {covered} elements, and leave some out"
                " or overlap; copy the checkpoint again"
            )
        return result

    def _candidates(self, key: str, index: tuple[int, ...]) -> Sequence[Chunk]:
        """The boxes that may overlap `index`, without a look at each of the thousands that stacked experts have."""
        if not index:
            return self.tensors[key].chunks
        if key not in self._rows:
            rows: dict[int, list[Chunk]] = {}
            for chunk in self.tensors[key].chunks:
                for row in range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]):
                    rows.setdefault(row, []).append(chunk)
            self._rows[key] = rows
        return self._rows[key].get(index[0], [])

    def _part(self, chunk: Chunk, dtype: torch.dtype, index: list[int]) -> Tensor:
        """What `index` selects in the first dimensions of a box; nothing else of it is read."""
        path = self._directory / chunk.file
        try:
            with path.open("rb") as file:
                part: Any = _Part(file, chunk.start, chunk.length)
                # a tensor without elements, which knows where in the file they are
                blob = torch.load(part, map_location="meta", weights_only=True)
        except Exception as error:  # noqa: BLE001  damaged bytes raise whatever they happen to mean
            what = str(error).splitlines()[0][:120] if str(error) else repr(error)
            raise RecipeError(f"{path}: damaged at byte {chunk.start} ({what}); copy the checkpoint again") from None
        if not isinstance(blob, Tensor) or (blob.dtype, tuple(blob.shape)) != (dtype, chunk.sizes):
            raise RecipeError(f"{path}: byte {chunk.start} is not a {dtype} tensor {chunk.sizes}, as {METADATA} says")
        elements, depth = blob.untyped_storage()._checkpoint_offset, len(index)
        if elements is None:
            raise RecipeError(f"{path}: byte {chunk.start} is of a torch before 1.6; save it with a newer one")
        # in plain numbers: the first operation on a meta tensor loads modules for a second
        shape, strides = blob.shape[depth:], blob.stride()[depth:]
        skipped = int(blob.storage_offset()) + sum(i * stride for i, stride in zip(index, blob.stride(), strict=False))
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        start = chunk.start + elements + skipped * dtype.itemsize
        return read_tensor(path, start, TensorSpec(dtype, (extent,))).as_strided(shape, strides)


def _overlap(first: Box, second: Box) -> bool:
    ranges = zip(*first, *second, strict=True)
    return all(max(low, other_low) < min(high, other_high) for low, high, other_low, other_high in ranges)


def write_chunks(path: Path, tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Write tensors into one file, and return where each starts and how long it is, once all is on disk."""
    places = []
    # the checksums of the blobs would cost as much as the writing, and torch.load does not look at them
    with _without_checksums(), path.open("wb", buffering=0) as file:
        target: Any = _Target(file)
        for tensor in tensors:
            start = file.tell()
            try:
                torch.save(tensor.contiguous(), target)
            except RuntimeError as error:  # torch complains of its own state after the file's error
                raise _cause(error) from None
            places.append((start, file.tell() - start))
        os.fsync(file.fileno())
    return places


@contextmanager
def _without_checksums() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _cause(error: BaseException) -> BaseException:
    """The file's error or the interruption behind one of torch's, or that one itself."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, OSError | KeyboardInterrupt):
        behind = behind.__context__
    return behind or error


def write_checkpoint(directory: Path, chunks: Iterable[tuple[str, TensorSpec, Chunk]]) -> None:
    """Make a checkpoint of the chunk files in `directory`: each chunk with its key and what the whole tensor is."""
    specs: dict[str, TensorSpec] = {}
    boxes: dict[str, list[Chunk]] = {}
    for key, spec, chunk in chunks:
        specs[key] = spec
        boxes.setdefault(key, []).append(chunk)
    write_metadata(directory, {key: StoredTensor(spec, tuple(boxes[key])) for key, spec in specs.items()})
    common = io.BytesIO()  # torch's own writing to a file makes of a full disk an error that does not say so
    torch.save({}, common)
    (directory / "common.pt").write_bytes(common.getvalue())
    (directory / CONFIG).write_text(json.dumps(BACKEND | _COMMON))


def _check_backend(path: Path) -> None:
    try:
        found: Any = json.loads(path.read_text())
        found = {name: found.get(name) for name in BACKEND}
    except OSError as error:
        raise RecipeError(f"{path}: cannot read: {error.strerror}; is it a whole Megatron checkpoint?") from None
    except (ValueError, AttributeError, RecursionError):
        raise RecipeError(f"{path}: not JSON; copy the checkpoint again") from None
    if found != BACKEND:
        raise RecipeError(f"{path}: the checkpoint is of {found}; only {BACKEND} is supported")


class _Target:
    """What torch.save needs of a file."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        write_bytes(self._file, view)
        return len(view)

    def flush(self) -> None: ...


class _Part(io.RawIOBase):
    """Bytes `start` to `start + length` of a file, as a file of their own."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length = file, start, length
        self._file.seek(start)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell() - self._start

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self._length}[whence]
        return self._file.seek(self._start + base + offset) - self._start

    def readinto(self, buffer: Any) -> int:
        room = max(0, self._length - self.tell())
        return self._file.readinto(memoryview(buffer)[:room])  # type: ignore[attr-defined]

"""Safetensors files: what one holds, checked against its size, and single tensors read without mapping the file.

A mapped file counts as this process's memory for as long as it is open, which would hide how little a conversion needs.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.config import RecipeError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LARGE_BYTES = 4 << 20
_PIECE_BYTES = 16 << 20  # enough for a disk to be busy with
_LIBC, _SYNC_FILE_RANGE_WRITE = ctypes.CDLL(None), 2
_HEADER_BYTES_MAX = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor without its elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """One file; `specs` says what it holds."""

    def __init__(self, path: Path) -> None:
        """Read and check the header. Raises RecipeError: no such file, another kind of file, or of another size."""
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or not 2 <= length <= min(size - 8, _HEADER_BYTES_MAX):
                    raise RecipeError(
                        f"{path}: cannot read the header: {size} bytes in all, and the first 8 say {length} bytes of"
                        f" header; {_AGAIN}"
                    )
                header = json.loads(file.read(length), object_pairs_hook=without_repeats)
        except OSError as error:
            raise RecipeError(f"{path}: cannot read the weights: {error.strerror}; {_AGAIN}") from None
        except (ValueError, RecursionError) as error:
            if isinstance(error, RecipeError):
                raise
            raise RecipeError(f"{path}: the header is not JSON ({error}); {_AGAIN}") from None
        self._data = 8 + length
        self.specs, self._starts, end = _parse(path, header)
        if self._data + end != size:
            raise RecipeError(f"{path}: has {size} bytes, but its header says {self._data + end}; {_AGAIN}")

    def read(self, name: str, index: int | None = None) -> Tensor:
        """The tensor, or slice `index` of its first dimension, which alone is read."""
        spec, start = self.specs[name], self._data + self._starts[name]
        if index is not None:
            spec = TensorSpec(spec.dtype, spec.shape[1:])
            start += index * spec.nbytes
        return read_tensor(self.path, start, spec)


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for `object_pairs_hook`. Raises ValueError: it has a name twice, of which one would win."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r:.120} comes twice")
        found[name] = value
    return found


def read_tensor(path: Path, start: int, spec: TensorSpec) -> Tensor:
    """`spec.nbytes` bytes of a file as a tensor. Raises RecipeError: it cannot be read, or ends before."""
    flat = _empty(spec.nbytes)
    view, filled = memoryview(_array(flat)), 0
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while filled < len(view):
                count = file.readinto(view[filled:])
                if not count:
                    raise RecipeError(f"{path}: ends at byte {start + filled}, but was longer before; {_AGAIN}")
                filled += count
    except OSError as error:
        raise RecipeError(f"{path}: cannot read: {error.strerror}; {_AGAIN}") from None
    return flat.view(spec.dtype).view(spec.shape)


def write_bytes(file: FileIO, data: memoryview) -> None:
    """Write all of `data` where the file stands, and have it go to disk meanwhile, so that an fsync waits less."""
    while data:
        start, count = file.tell(), file.write(data[:_PIECE_BYTES])
        _LIBC.sync_file_range(file.fileno(), ctypes.c_int64(start), ctypes.c_int64(count), _SYNC_FILE_RANGE_WRITE)
        data = data[count:]


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The elements of a tensor on the host, in order; copied only if they do not lie so."""
    return memoryview(_array(tensor.detach().contiguous().reshape(-1).view(torch.uint8)))


def build_header(specs: Mapping[str, TensorSpec]) -> tuple[bytes, dict[str, int]]:
    """The beginning of a file with these tensors one after the other, and the byte at which each starts."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    for name, spec in specs.items():
        starts[name] = end
        end += spec.nbytes
        header[name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    beginning = len(text).to_bytes(8, "little") + text
    return beginning, {name: len(beginning) + start for name, start in starts.items()}


_AGAIN = "copy or download the file again"


def _empty(nbytes: int) -> Tensor:
    """Bytes, in large pages where many: getting as many small ones takes as long as reading a file into them."""
    if nbytes < _LARGE_BYTES:
        return torch.empty(nbytes, dtype=torch.uint8)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)


def _array(tensor: Tensor) -> Any:
    return tensor.numpy()


def _parse(path: Path, header: Any) -> tuple[dict[str, TensorSpec], dict[str, int], int]:
    """Specs and starts of all tensors, and where the last one ends."""
    specs: dict[str, TensorSpec] = {}
    starts: dict[str, int] = {}
    entries: Any = header.items() if isinstance(header, dict) else [("header", None)]
    for name, entry in entries:
        if name == "__metadata__":
            continue
        try:
            spec = TensorSpec(DTYPES[entry["dtype"]], tuple(entry["shape"]))
            starts[name], end = entry["data_offsets"]
            numbers = [*spec.shape, starts[name], end]
            if any(type(n) is not int or n < 0 for n in numbers) or end - starts[name] != spec.nbytes:
                raise ValueError
        except (KeyError, TypeError, ValueError):
            expected = f"a dtype of {', '.join(DTYPES)}, a shape, and offsets that fit them"
            raise RecipeError(f"{path}: header entry {name} is {entry!r:.120}; expected {expected}") from None
        specs[name] = spec
    end = 0
    for name in sorted(specs, key=lambda name: (starts[name], specs[name].nbytes)):
        if starts[name] != end:
            raise RecipeError(f"{path}: tensor {name} starts at byte {starts[name]}, but the one before ends at {end}")
        end += specs[name].nbytes
    return specs, starts, end

"""Writing Hugging Face directories: all files are planned from shapes, then tensors are written in place, in any order.

So memory holds no more than the tensor at hand, slices of a stacked tensor go where they belong as they come, and
several processes can write different tensors of one directory.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

from megarl.config import ModelShape, head_config
from megarl.weights.hf import INDEX, SINGLE, split_index
from megarl.weights.parameter import Parameter
from megarl.weights.safetensors_file import TensorSpec, build_header, tensor_bytes, write_bytes

FILE_BYTES = 4 << 30  # small enough to be read in parallel, large enough to be few
_COPIED = (".json", ".txt", ".model", ".jinja")
_NOT_COPIED = {INDEX, "metadata.json", "run_state.json"}  # the last two describe a Megatron checkpoint


class HfWriter:
    """The weight files of a directory that is being written.

    Every process that writes makes one from the same `specs`. One calls `create` before any `write`, and `finish` after
    all of them.
    """

    def __init__(self, directory: Path, specs: Mapping[str, TensorSpec], file_bytes: int = FILE_BYTES) -> None:
        """Plan files of at most `file_bytes` of tensors each, or a single larger one."""
        self._directory, self._specs = directory, specs
        parts = _divide(specs, file_bytes)
        names = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
        self._headers: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        self._places: dict[str, tuple[str, int]] = {}
        for name, part in zip(names if len(parts) > 1 else [SINGLE], parts, strict=True):
            self._headers[name], starts = build_header(part)
            self._sizes[name] = len(self._headers[name]) + sum(spec.nbytes for spec in part.values())
            self._places |= {tensor: (name, start) for tensor, start in starts.items()}

    def create(self) -> None:
        """Make the files, of their final sizes; what was written to them before stays."""
        for name, header in self._headers.items():
            with _open(self._directory / name) as file:
                file.write(header)
                file.truncate(self._sizes[name])

    def has(self, names: Iterable[str]) -> bool:
        """Whether the files for the tensors `names` are there, of their final sizes."""
        files = {self._places[split_index(name)[0]][0] for name in names}
        paths = {self._directory / file: self._sizes[file] for file in files}
        return all(path.is_file() and path.stat().st_size == size for path, size in paths.items())

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the tensor `name`, or with an index one slice of it, into its place."""
        whole, index = split_index(name)
        spec, (file_name, start) = self._specs[whole], self._places[whole]
        shape = spec.shape if index is None else spec.shape[1:]
        assert (tensor.dtype, tuple(tensor.shape)) == (spec.dtype, shape), f"{name} is {tensor.dtype} {tensor.shape}"
        data = tensor_bytes(tensor.cpu())
        with _open(self._directory / file_name) as file:
            file.seek(start + (index or 0) * len(data))
            write_bytes(file, data)

    def sync(self, names: Iterable[str]) -> None:
        """Return when what was written of the tensors `names` is on disk."""
        for file_name in sorted({self._places[split_index(name)[0]][0] for name in names}):
            with _open(self._directory / file_name) as file:
                os.fsync(file.fileno())

    def finish(self) -> None:
        """Write the index, where there are several files."""
        if len(self._headers) > 1:
            total = sum(spec.nbytes for spec in self._specs.values())
            weight_map = {tensor: file for tensor, (file, _) in sorted(self._places.items())}
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (self._directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def hf_specs(parameters: Iterable[Parameter], dtype: Callable[[Parameter], torch.dtype]) -> dict[str, TensorSpec]:
    """The tensors of a directory with these parameters; slices are the whole tensors of which they are part."""
    specs: dict[str, TensorSpec] = {}
    for parameter in parameters:
        for name, shape in zip(parameter.hf, parameter.hf_shapes, strict=True):
            whole, index = split_index(name)
            # slices come in order, so the last one's index says how many there are
            specs[whole] = TensorSpec(dtype(parameter), shape if index is None else (index + 1, *shape))
    return specs


def copy_config(source: Path, target: Path, *, head_of: ModelShape | None = None, dtype: torch.dtype | None) -> None:
    """Copy configuration, tokenizer and templates, and make the configuration that of the weights beside it.

    `head_of` is the model whose head the weights have, where `source` may have another. The weights are not quantized,
    whatever those of `source` are; None for their `dtype` leaves the one that is named.
    """
    for file in sorted(source.iterdir()):
        # a link to nothing must not cost the trained weights
        if file.suffix in _COPIED and file.name not in _NOT_COPIED and file.is_file():
            shutil.copyfile(file, target / file.name)
    path = target / "config.json"
    config = json.loads(path.read_text())
    if head_of is not None:
        config = head_config(config, head_of.head)
    config.pop("quantization_config", None)
    if dtype is not None:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _divide(specs: Mapping[str, TensorSpec], file_bytes: int) -> list[dict[str, TensorSpec]]:
    """The tensors of each file: in order, but wide types first, so that each starts at a multiple of its size."""
    parts: list[dict[str, TensorSpec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if parts[-1] and size + spec.nbytes > file_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = spec
        size += spec.nbytes
    return [dict(sorted(part.items(), key=lambda pair: -pair[1].dtype.itemsize)) for part in parts]


def _open(path: Path) -> FileIO:
    """A file to write into, without emptying it."""
    return open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)

"""Reading Hugging Face directories: single tensors by name, FP8 ones as bfloat16.

A name may end in an index, `experts.down_proj[3]`: one slice of a tensor in which all experts are stacked.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.config import RecipeError
from megarl.weights.safetensors_file import SafetensorsFile, TensorSpec, without_repeats

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SCALE = "_scale_inv"
"""What the name of an FP8 tensor's scales ends in: float32, one a block, to multiply with."""


class HfReader:
    """Tensors of a Hugging Face directory, read from disk one at a time.

    `specs` says what there is. An FP8 tensor with scales counts as the bfloat16 tensor that they make, and is named in
    `quantized`.
    """

    def __init__(self, directory: Path) -> None:
        """Check every file. Raises RecipeError: no weights there, or a file that is missing or damaged."""
        self._directory = directory
        files, self._file_of = _open(directory)
        self.files = tuple(files)
        stored = {name: file.specs[name] for name, file in self._file_of.items()}
        scales = {f"{name}{SCALE}" for name, spec in stored.items() if spec.dtype is torch.float8_e4m3fn}
        self.quantized = {name.removesuffix(SCALE) for name in scales & stored.keys()}
        self._block = _block_size(directory) if self.quantized else (0, 0)
        self.specs = {name: spec for name, spec in stored.items() if name not in scales}
        for name in self.quantized:
            self._check_scales(name)
            self.specs[name] = TensorSpec(torch.bfloat16, self.specs[name].shape)

    def spec(self, name: str, expected: tuple[int, ...]) -> TensorSpec:
        """What is known of the tensor `name`, or of one slice of a stacked one.

        Raises RecipeError: no such tensor, its shape is not `expected` (what config.json says), or it is quantized.
        """
        whole, index = split_index(name)
        if whole not in self.specs:
            raise RecipeError(f"{self._directory}: tensor {whole} is missing; does config.json describe these weights?")
        path, found = self._file_of[whole].path, self.specs[whole]
        shape = found.shape if index is None else found.shape[1:]
        if shape != expected or (index is not None and index >= found.shape[0]):
            wanted = str(expected) if index is None else f"slices of {expected}, more than {index}"
            raise RecipeError(f"{path}: {whole} has shape {found.shape}, but config.json says {wanted}")
        if not found.dtype.is_floating_point or found.dtype.itemsize == 1:
            kind = str(found.dtype).removeprefix("torch.")
            what = f"and there is no {whole}{SCALE}" if kind.startswith("float8") else "which no weight has"
            raise RecipeError(f"{path}: {whole} is {kind}, {what}; take the original weights, or add what is missing")
        return TensorSpec(found.dtype, shape)

    def tensor(self, name: str, expected: tuple[int, ...]) -> Tensor:
        """The tensor `name`, or one slice of a stacked one, which alone is read. Raises RecipeError as `spec` does."""
        self.spec(name, expected)
        whole, index = split_index(name)
        file = self._file_of[whole]
        if whole not in self.quantized:
            return file.read(whole, index)
        scales = self._file_of[whole + SCALE].read(whole + SCALE)
        return dequantize(file.read(whole), scales, self._block)

    def _check_scales(self, name: str) -> None:
        file, shape = self._file_of[name + SCALE], self.specs[name].shape
        found = file.specs[name + SCALE]
        blocks = tuple(-(-size // block) for size, block in zip(shape, self._block, strict=False))
        if found != TensorSpec(torch.float32, blocks) or len(shape) != 2:
            raise RecipeError(
                f"{file.path}: {name}{SCALE} is {found.dtype} {found.shape}; expected torch.float32 {blocks}, one for"
                f" each block of {self._block} of {name} {shape}"
            )


def dequantize(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """The bfloat16 matrix that FP8 elements and the scales of their blocks make, multiplied in float32."""
    rows, columns = weight.shape
    result = torch.empty(rows, columns, dtype=torch.bfloat16)
    for number, row in enumerate(scales.unbind()):  # one row of blocks at a time, so that float32 costs little
        band = slice(number * block[0], min((number + 1) * block[0], rows))
        result[band] = weight[band].float() * row.repeat_interleave(block[1])[:columns]
    return result


def split_index(name: str) -> tuple[str, int | None]:
    """The tensor's name in the file, and which slice of it is meant."""
    match = re.fullmatch(r"(.+)\[(\d+)\]", name)
    return (match[1], int(match[2])) if match else (name, None)


def _open(directory: Path) -> tuple[list[SafetensorsFile], dict[str, SafetensorsFile]]:
    """All weight files, and which of them has each tensor."""
    index = directory / INDEX
    if not index.exists():
        if not (directory / SINGLE).exists():
            raise RecipeError(f"{directory}: no weights; expected {SINGLE} or {INDEX}")
        single = SafetensorsFile(directory / SINGLE)
        return [single], dict.fromkeys(single.specs, single)
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(), object_pairs_hook=without_repeats)["weight_map"]
        names = sorted(set(weight_map.values()))
        if any(Path(name).name != name for name in names):
            raise ValueError("a file name with a folder")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RecipeError(f"{index}: cannot read the index: {error!r:.120}; copy or download it again") from None
    if missing := [name for name in names if not (directory / name).exists()]:
        raise RecipeError(f"{directory}: {len(missing)} of {len(names)} weight files are missing: {shorten(missing)}")
    files = {name: SafetensorsFile(directory / name) for name in names}
    for tensor, name in weight_map.items():
        if tensor not in files[name].specs:
            raise RecipeError(f"{index}: says that {tensor} is in {name}, which does not have it")
    stored = Counter(name for file in files.values() for name in file.specs)
    if twice := sorted(name for name, count in stored.items() if count > 1):
        raise RecipeError(f"{directory}: several files have {shorten(twice)}; remove what is not the model's")
    if unlisted := sorted(stored.keys() - weight_map.keys()):
        raise RecipeError(f"{index}: does not list {shorten(unlisted)}, which the files have")
    return list(files.values()), {tensor: files[name] for tensor, name in weight_map.items()}


def _block_size(directory: Path) -> tuple[int, int]:
    path = directory / "config.json"
    try:
        settings: Any = json.loads(path.read_text())["quantization_config"]
        rows, columns = settings["weight_block_size"]
        if settings["quant_method"] == "fp8" and min(rows, columns) > 0:
            return int(rows), int(columns)
    except (OSError, ValueError, KeyError, TypeError):
        settings = None
    raise RecipeError(
        f"{path}: the weights are FP8 with scales, but quantization_config is {settings!r:.120}; expected quant_method"
        " 'fp8' and weight_block_size, two numbers"
    )


def shorten(names: list[str], most: int = 3) -> str:
    """The first few of many names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

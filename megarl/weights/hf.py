"""Hugging Face directories: reading single tensors from safetensors files, and writing a whole directory.

A name may end in an index, `experts.down_proj[3]`: one slice of a tensor in which all experts are stacked.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megarl.config import HeadName, ModelShape, RecipeError, head_config, read_model_shape

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F32", "BF16", "F16", "F64")
_FILE_BYTES = 4 << 30  # small enough to be read in parallel, large enough to be few


class HfReader:
    """Tensors of a Hugging Face directory by name, read from disk one at a time."""

    def __init__(self, directory: Path) -> None:
        """Raises RecipeError: no weights there, or a file that is damaged."""
        self._directory = directory
        try:
            if (directory / INDEX).exists():
                self._file_of: dict[str, str] = dict(json.loads((directory / INDEX).read_text())["weight_map"])
            else:
                with safe_open(directory / SINGLE, "pt") as file:
                    self._file_of = dict.fromkeys(file.keys(), SINGLE)
        except FileNotFoundError:
            raise RecipeError(f"{directory}: no weights; expected {SINGLE} or {INDEX}") from None
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise RecipeError(f"{directory}: cannot read the weights: {error}") from error
        self.names = self._file_of.keys()

    def tensor(self, name: str, expected: tuple[int, ...]) -> Tensor:
        """The tensor `name`, or one slice of a stacked one, which alone is read.

        Raises RecipeError: no such tensor, its shape is not `expected` (what config.json says), or it is quantized.
        """
        whole, index = split_index(name)
        if whole not in self._file_of:
            raise RecipeError(f"{self._directory}: tensor {whole} is missing; does config.json describe these weights?")
        path = self._directory / str(self._file_of[whole])
        try:
            with safe_open(path, "pt") as file:
                stored = file.get_slice(whole)
                shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
                if dtype not in FLOATS:
                    raise RecipeError(
                        f"{path}: {whole} is of type {dtype}, expected one of {', '.join(FLOATS)}: quantized weights"
                        " are not supported; take the original"
                    )
                found = shape if index is None else shape[1:]
                if found == expected and (index is None or index < shape[0]):
                    return file.get_tensor(whole) if index is None else stored[index]
        except (OSError, SafetensorError) as error:
            raise RecipeError(f"{path}: cannot read tensor {name}: {error}") from error
        wanted = str(expected) if index is None else f"slices of {expected}, more than {index}"
        raise RecipeError(f"{path}: {whole} has shape {shape}, but config.json says {wanted}")


def write_hf(
    buckets: Iterable[list[tuple[str, Tensor]]],
    source: Path,
    target: Path,
    *,
    head: HeadName = "policy",
    file_bytes: int = _FILE_BYTES,
) -> None:
    """Write the tensors of `buckets` with the configuration and tokenizer of `source` to the directory `target`.

    `head` is the tensors', which `source` need not have.
    Each weight file has at most `file_bytes` of tensors, or a single larger one. Slices are stacked again when all
    experts' have come, in whatever order; the configuration says how many there are.

    It is written aside and renamed, so `target` exists whole or not at all; an older `target` is replaced.
    """
    shape, aside = read_model_shape(source, head), target.with_name(target.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        # a link to nothing must not cost the trained weights
        if file.suffix in (".json", ".txt", ".model", ".jinja") and file.name != INDEX and file.is_file():
            shutil.copyfile(file, aside / file.name)
    dtype = _write_weights(_stacked(buckets, shape), aside, file_bytes)
    _write_config(aside / "config.json", shape, dtype)
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)


def _stacked(buckets: Iterable[list[tuple[str, Tensor]]], shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `buckets` one by one, with slices as the whole tensors of which they are part."""
    waiting: dict[str, dict[int, Tensor]] = {}
    slices = shape.experts.count if shape.experts else 0
    for name, tensor in (pair for bucket in buckets for pair in bucket):
        whole, index = split_index(name)
        if index is None:
            yield name, tensor
            continue
        assert index < slices, f"{name}, but the model has {slices} experts"
        parts = waiting.setdefault(whole, {})
        parts[index] = tensor.detach().cpu().clone()
        if len(parts) == slices:
            yield whole, torch.stack([part for _, part in sorted(waiting.pop(whole).items())])
    assert not waiting, f"slices never came of {sorted(waiting)}"


def split_index(name: str) -> tuple[str, int | None]:
    """The tensor's name in the file, and which slice of it is meant."""
    match = re.fullmatch(r"(.+)\[(\d+)\]", name)
    return (match[1], int(match[2])) if match else (name, None)


def _write_weights(tensors: Iterable[tuple[str, Tensor]], directory: Path, file_bytes: int) -> str:
    """Returns the tensors' type."""
    parts: list[Path] = []
    file_of: dict[str, int] = {}
    pending: dict[str, Tensor] = {}
    total, dtype = 0, ""

    def flush() -> None:
        parts.append(directory / f"part-{len(parts)}.safetensors")
        save_file(pending, parts[-1], metadata={"format": "pt"})
        parts[-1].chmod(0o644)  # safetensors writes for the owner alone, and the other files are as the umask says
        pending.clear()

    for name, tensor in tensors:
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > file_bytes:
            flush()
        pending[name] = tensor.detach().cpu().contiguous().clone()
        file_of[name] = len(parts)
        total += tensor.nbytes
        # the first, an embedding, has the model's type; a router's bias may be float32 among bfloat16
        dtype = dtype or str(tensor.dtype).removeprefix("torch.")
    flush()
    if len(parts) == 1:
        parts[0].rename(directory / SINGLE)
    else:
        names = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
        for part, name in zip(parts, names, strict=True):
            part.rename(directory / name)
        index = {"metadata": {"total_size": total}, "weight_map": {key: names[i] for key, i in file_of.items()}}
        (directory / INDEX).write_text(json.dumps(index, indent=2))
    return dtype


def _write_config(file: Path, shape: ModelShape, dtype: str) -> None:
    """Make the copied configuration that of the weights beside it."""
    config = head_config(json.loads(file.read_text()), shape.head)
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    file.write_text(json.dumps(config, indent=2) + "\n")

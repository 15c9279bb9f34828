"""Hugging Face directories: reading single tensors from safetensors files, and writing a whole directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megarl.config import RecipeError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
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

    def tensor(self, name: str, expected: tuple[int, ...]) -> Tensor:
        """Raises RecipeError: no such tensor, or its shape is not `expected` (what config.json says)."""
        if name not in self._file_of:
            raise RecipeError(f"{self._directory}: tensor {name} is missing; does config.json describe these weights?")
        path = self._directory / self._file_of[name]
        try:
            with safe_open(path, "pt") as file:
                tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise RecipeError(f"{path}: cannot read tensor {name}: {error}") from error
        if tuple(tensor.shape) != expected:
            raise RecipeError(f"{path}: {name} has shape {tuple(tensor.shape)}, but config.json says {expected}")
        return tensor


def write_hf(
    buckets: Iterable[list[tuple[str, Tensor]]], source: Path, target: Path, *, file_bytes: int = _FILE_BYTES
) -> None:
    """Write the tensors of `buckets` with the configuration and tokenizer of `source` to the directory `target`.

    Each weight file has at most `file_bytes` of tensors, or a single larger one.

    It is written aside and renamed, so `target` exists whole or not at all; an older `target` is replaced.
    """
    aside = target.with_name(target.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        if file.suffix in (".json", ".txt", ".model", ".jinja") and file.name != INDEX:
            shutil.copyfile(file, aside / file.name)
    _write_weights(buckets, aside, file_bytes)
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)


def _write_weights(buckets: Iterable[list[tuple[str, Tensor]]], directory: Path, file_bytes: int) -> None:
    parts: list[Path] = []
    file_of: dict[str, int] = {}
    pending: dict[str, Tensor] = {}
    total, dtype = 0, ""

    def flush() -> None:
        parts.append(directory / f"part-{len(parts)}.safetensors")
        save_file(pending, parts[-1], metadata={"format": "pt"})
        parts[-1].chmod(0o644)  # safetensors writes for the owner alone, and the other files are as the umask says
        pending.clear()

    for bucket in buckets:
        for name, tensor in bucket:
            if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > file_bytes:
                flush()
            pending[name] = tensor.detach().cpu().contiguous().clone()
            file_of[name] = len(parts)
            total += tensor.nbytes
            dtype = str(tensor.dtype).removeprefix("torch.")
    flush()
    if len(parts) == 1:
        parts[0].rename(directory / SINGLE)
    else:
        names = [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
        for part, name in zip(parts, names, strict=True):
            part.rename(directory / name)
        index = {"metadata": {"total_size": total}, "weight_map": {key: names[i] for key, i in file_of.items()}}
        (directory / INDEX).write_text(json.dumps(index, indent=2))
    config = json.loads((directory / "config.json").read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")

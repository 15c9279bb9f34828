"""The `.metadata` of a torch distributed checkpoint: which file has which part of which tensor.

It is a pickle, which could run any code, so that nothing but the few classes that belong there is loaded from it.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from enum import EnumType
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megarl.config import RecipeError
from megarl.weights.safetensors_file import TensorSpec

METADATA = ".metadata"

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
    "builtins": {"set", "frozenset"},
}


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, `offsets` and `sizes` in each dimension, stored as bytes `start` to `start + length`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int

    @property
    def elements(self) -> int:
        return prod(self.sizes)


@dataclass(frozen=True)
class StoredTensor:
    spec: TensorSpec
    chunks: tuple[Chunk, ...]

    def has(self, chunk: Chunk) -> bool:
        """Whether `chunk` is a box within the tensor, at a place that can be."""
        numbers = (*self.spec.shape, *chunk.offsets, *chunk.sizes, chunk.start, chunk.length)
        return (
            all(type(n) is int and n >= 0 for n in numbers)
            and len(self.spec.shape) == len(chunk.offsets) == len(chunk.sizes)
            and all(o + n <= whole for o, n, whole in zip(chunk.offsets, chunk.sizes, self.spec.shape, strict=True))
        )


def read_metadata(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by key. Raises RecipeError: no `.metadata`, or one that is damaged or not torch's."""
    path = directory / METADATA
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        storage = metadata.storage_data
        return {
            key: _stored(key, entry, storage)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot read: {error.strerror}; is it a whole torch_dist checkpoint?") from None
    except Exception as error:  # noqa: BLE001  a damaged pickle raises whatever its bytes happen to mean
        raise RecipeError(f"{path}: damaged ({error!r:.120}); copy the checkpoint again") from None


def write_metadata(directory: Path, tensors: dict[str, StoredTensor]) -> None:
    """Write the `.metadata` by which torch and Megatron load these tensors."""
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage = {}
    for key, stored in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in stored.chunks]
        properties = TensorProperties(dtype=stored.spec.dtype)
        entries[key] = TensorStorageMetadata(properties, torch.Size(stored.spec.shape), chunks)
        for chunk in stored.chunks:
            storage[MetadataIndex(key, chunk.offsets)] = _StorageInfo(chunk.file, chunk.start, chunk.length)
    with (directory / METADATA).open("wb") as file:
        pickle.dump(Metadata(entries, storage_data=storage, storage_meta=StorageMeta()), file)


def _stored(key: str, entry: TensorStorageMetadata, storage: dict[MetadataIndex, _StorageInfo]) -> StoredTensor:
    chunks = []
    for box in entry.chunks:
        info = storage[MetadataIndex(key, box.offsets)]
        if Path(info.relative_path).name != info.relative_path:
            raise RecipeError(f"names the file {info.relative_path!r:.80}, which is not in the directory")
        chunks.append(Chunk(tuple(box.offsets), tuple(box.sizes), info.relative_path, info.offset, info.length))
    stored = StoredTensor(TensorSpec(entry.properties.dtype, tuple(entry.size)), tuple(chunks))
    if not isinstance(key, str) or not isinstance(stored.spec.dtype, torch.dtype) or not all(map(stored.has, chunks)):
        raise RecipeError(f"damaged: {key!r:.80} is not a tensor with its parts; copy the checkpoint again")
    return stored


def _member(kind: Any, name: Any) -> Any:
    """What Python before 3.11.4 pickles an enumeration's member with, is getattr, which could reach anything else."""
    if not isinstance(kind, EnumType) or name not in kind.__members__:
        raise RecipeError(f"asks for {name!r:.40} of {kind!r:.60}, which has no place there; not loaded")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        known = name in _CLASSES.get(module, ())
        if module == "torch":
            known = name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)
        if not known:
            raise RecipeError(f"asks for {module}.{name}, which has no place there and could run any code; not loaded")
        return super().find_class(module, name)

"""Publishing: new weights from the trainer's shards into every engine, as whole Hugging Face tensors in buckets.

Every rank takes part in gathering a bucket; a rank that owns an engine sends it on. After the last bucket the engines'
checksums must be those of what was sent, and then the version counts as published. Any failure raises, which ends the
job: no engine goes on with a mixture.
"""

from __future__ import annotations

import base64
import hashlib
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megarl.types import WeightVersion

# Sent as base64 within one JSON body, so a bucket takes a few times this much memory for a moment.
BUCKET_BYTES = 256 << 20


class WeightSource(Protocol):
    """The trainer's side: parameters of the weight table with their whole Hugging Face tensors."""

    def hf_buckets(self, limit_bytes: int) -> Iterator[list[tuple[Any, list[Tensor]]]]: ...


class EngineTarget(Protocol):
    """The engine's side, on the rank that owns it."""

    def begin_update(self) -> None: ...
    def load_bucket(self, payloads: list[str], version: int) -> None: ...
    def end_update(self) -> None: ...
    def checksums(self) -> list[dict[str, str]]: ...


class PublishError(RuntimeError):
    """An engine holds other weights than those that were sent."""


def publish(source: WeightSource, engine: EngineTarget | None, *, version: WeightVersion, engine_ranks: int) -> None:
    """Give this rank's engine, if it owns one, the weights of `version`; a collective of all ranks.

    Raises PublishError: a checksum differs.
    """
    expected: list[dict[str, str]] = [{} for _ in range(engine_ranks)]
    if engine is not None:
        engine.begin_update()
    for bucket in source.hf_buckets(BUCKET_BYTES):
        if engine is None:
            continue
        named = [pair for parameter, parts in bucket for pair in zip(parameter.hf, parts, strict=True)]
        engine.load_bucket([_serialise(named)] * engine_ranks, version)
        for parameter, parts in bucket:
            for rank, sums in enumerate(expected):
                sums[parameter.engine] = checksum(parameter.layout.engine_shard(parts, rank, engine_ranks))
    if engine is not None:
        engine.end_update()
        _compare(expected, engine.checksums(), version)


def checksum(tensor: Tensor) -> str:
    """SGLang's hash of a CPU tensor: the first 8 bytes of SHA-256 over its bytes, in hexadecimal."""
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(raw.data).digest()[:8].hex()


def _serialise(named: Sequence[tuple[str, Tensor]]) -> str:
    """SGLang unpickles (name, tensor) pairs; a clone, because a view would carry its whole storage along."""
    pairs = [(name, tensor.detach().cpu().clone()) for name, tensor in named]
    return base64.b64encode(pickle.dumps(pairs, protocol=pickle.HIGHEST_PROTOCOL)).decode()


def _compare(expected: list[dict[str, str]], found: list[dict[str, str]], version: WeightVersion) -> None:
    if len(found) != len(expected):
        raise PublishError(f"version {version}: the engine has {len(found)} ranks, expected {len(expected)}")
    for rank, (want, have) in enumerate(zip(expected, found, strict=True)):
        wrong = sorted(name for name in want if have.get(name) != want[name])
        if wrong:
            raise PublishError(
                f"version {version}: rank {rank} of the engine holds other weights than were sent in"
                f" {len(wrong)} of {len(want)} parameters, first {wrong[0]}"
            )
        unknown = sorted(have.keys() - want.keys())
        if unknown:
            raise PublishError(f"version {version}: rank {rank} of the engine has parameters never sent: {unknown[:3]}")

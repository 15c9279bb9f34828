"""Publishing: new weights from the trainer's shards into every engine, as whole Hugging Face tensors in buckets.

Every rank takes part in gathering a bucket; a rank that owns an engine sends it on. After the last bucket the engine's
checksums must be those of what was sent, and then the version counts as published. (An engine on a GPU hashes by a
kernel of its own, and some models' parameters have no known place in the engine; there the engines are only compared
with one another.) Any failure raises, which ends the job: no engine goes on with a mixture.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megarl.types import WeightVersion

# Sent within one JSON body, so a bucket takes a few times this much memory for a moment.
BUCKET_BYTES = 256 << 20
_SCORE_BIAS = "score.bias"


class WeightSource(Protocol):
    """The trainer's side: parameters of the weight table with their whole Hugging Face tensors."""

    def hf_buckets(self, limit_bytes: int) -> Iterator[list[tuple[Any, list[Tensor]]]]: ...


class EngineTarget(Protocol):
    """The engine's side, on the rank that owns it."""

    def begin_update(self) -> None: ...
    def load_bucket(self, payloads: list[bytes], version: int) -> None: ...
    def end_update(self) -> None: ...
    def checksums(self) -> list[dict[str, str]]: ...


class PublishError(RuntimeError):
    """An engine holds other weights than those that were sent."""


def publish(
    source: WeightSource, engine: EngineTarget | None, *, version: WeightVersion, engine_ranks: int, device: str
) -> str:
    """Give this rank's engine, if it owns one, the weights of `version`; a collective of all ranks.

    Returns a digest of the engine's checksums, empty without an engine: `check_agreement` wants those of all ranks.
    Raises PublishError: a checksum differs from what was sent.
    """
    expected: list[dict[str, str]] = [{} for _ in range(engine_ranks)]
    all_known = True
    if engine is not None:
        engine.begin_update()
    for bucket in source.hf_buckets(BUCKET_BYTES):
        if engine is None:
            continue
        named = [pair for parameter, parts in bucket for pair in zip(parameter.hf, parts, strict=True)]
        engine.load_bucket([_serialise(named)] * engine_ranks, version)
        for parameter, parts in bucket if device == "cpu" else []:
            if parameter.engine is None:
                all_known = False
                continue
            for rank, sums in enumerate(expected):
                sums[parameter.engine] = checksum(parameter.layout.engine_shard(parts, rank, engine_ranks))
    if engine is None:
        return ""
    engine.end_update()
    found = engine.checksums()
    if device == "cpu":
        _compare(expected, found, version, all_known)
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def check_agreement(digests: Sequence[str], version: WeightVersion) -> None:
    """Raise PublishError unless all engines (the ranks whose digest is not empty) hold the same weights."""
    if len({digest for digest in digests if digest}) > 1:
        raise PublishError(f"version {version}: the engines of ranks {_by_digest(digests)} hold different weights")


def clear_score_bias(engine: EngineTarget, dtype: torch.dtype, device: str) -> None:
    """Of a reward model, set the bias of the score to 0.

    SGLang 0.5.23 gives the models of some families one (Qwen2, Qwen3), which transformers' models and so checkpoints
    do not have, and leaves it at random numbers.

    Raises PublishError: it is not 0 afterwards.
    """
    ranks = engine.checksums()
    if not all(_SCORE_BIAS in sums for sums in ranks):
        return
    zero = torch.zeros(1, dtype=dtype)
    engine.begin_update()
    engine.load_bucket([_serialise([(_SCORE_BIAS, zero)])] * len(ranks), 0)
    engine.end_update()
    if device == "cpu" and any(sums[_SCORE_BIAS] != checksum(zero) for sums in engine.checksums()):
        raise PublishError("the bias of a reward model's score is not 0 in its engine, as was sent")


def _by_digest(digests: Sequence[str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, digest in enumerate(digests):
        if digest:
            groups.setdefault(digest, []).append(rank)
    return " and ".join(map(str, groups.values()))


def checksum(tensor: Tensor) -> str:
    """SGLang's hash of a CPU tensor: the first 8 bytes of SHA-256 over its bytes, in hexadecimal."""
    raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(raw.data).digest()[:8].hex()


def _serialise(named: Sequence[tuple[str, Tensor]]) -> bytes:
    """SGLang unpickles (name, tensor) pairs; a clone, because a view would carry its whole storage along."""
    pairs = [(name, tensor.detach().cpu().clone()) for name, tensor in named]
    return pickle.dumps(pairs, protocol=pickle.HIGHEST_PROTOCOL)


def _compare(
    expected: list[dict[str, str]], found: list[dict[str, str]], version: WeightVersion, all_known: bool
) -> None:
    """`all_known`: the weight table knows every parameter of the engine, so that there must be no others."""
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
        if unknown and all_known:
            raise PublishError(f"version {version}: rank {rank} of the engine has parameters never sent: {unknown[:3]}")

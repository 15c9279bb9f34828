"""What payload_partition.py is told and what it reports."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec

from megarl.config import ConstantDivisor, SequenceMean, TokenMean
from tests.distributed.json_file import JsonFile
from tests.families import VOCAB

NORMALIZERS = {"token": TokenMean(), "sequence": SequenceMean(), "constant": ConstantDivisor(tokens=64)}
# sequence length and prompt length; two have nothing to predict
ROWS = [(64, 3), (2, 1), (37, 30), (9, 9), (5, 1), (48, 2), (14, 14), (21, 20)]
MAX_TOKENS = [400, 100, 63, 1]  # everything together, ..., each sequence alone


class Plan(JsonFile):
    model: Path
    layouts: dict[str, dict[str, int | str | bool]]
    out: Path


class Seen(msgspec.Struct):
    """Loss and gradient norm of the batch, cut into `microbatches` on each data-parallel rank."""

    normalizer: str
    microbatches: int
    loss: float
    grad_norm: float


def write(file: Path, found: dict[str, list[Seen]]) -> None:
    file.write_bytes(msgspec.json.encode(found))


def read(file: Path) -> dict[str, list[Seen]]:
    return msgspec.json.decode(file.read_bytes(), type=dict[str, list[Seen]])


def rows() -> list[tuple[list[int], int]]:
    source = random.Random(7)
    return [([source.randrange(1, VOCAB) for _ in range(length)], prompt) for length, prompt in ROWS]

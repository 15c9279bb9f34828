"""What test_layout_memory.py asks of payload_memory.py, and what that reports."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from tests.distributed.json_file import JsonFile


class Case(msgspec.Struct, frozen=True):
    """A step of `micro_batches` on each data-parallel rank, each of sequences of `lengths` tokens."""

    family: str
    layout: dict[str, int | str | bool] = {}
    dtype: Literal["float32", "bfloat16"] = "float32"
    lengths: tuple[int, ...] = (128, 128)
    micro_batches: int = 4
    head: Literal["policy", "critic"] = "policy"


class Plan(JsonFile):
    """Cases by name, all on the same number of ranks; the directory of each family's model."""

    models: dict[str, Path]
    cases: dict[str, Case]
    out: Path


class Bytes(msgspec.Struct):
    """Measured on one rank. `everything` are all tensors that the process has between steps."""

    stage: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    everything: int


class Report(JsonFile):
    """By case, of each rank."""

    found: dict[str, list[Bytes]]

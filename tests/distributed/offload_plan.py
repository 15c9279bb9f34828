"""What test_offload.py asks of payload_offload.py, and what that reports."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from tests.distributed.json_file import JsonFile

UPDATES = 2


class Case(msgspec.Struct):
    model: Path
    dtype: Literal["float32", "bfloat16"]
    layout: dict[str, int | str | bool]
    checkpoint: bool  # takes seconds


class Plan(JsonFile):
    """Cases by name, all on the same number of ranks; each has a folder of its name in `out`."""

    cases: dict[str, Case]
    out: Path


class Trained(msgspec.Struct):
    """Everything that a run of one engine gives: of the global batch, or hashed."""

    losses: list[float] = msgspec.field(default_factory=list)
    grad_norms: list[float] = msgspec.field(default_factory=list)
    logprobs: list[str] = msgspec.field(default_factory=list)
    weights: list[str] = msgspec.field(default_factory=list)


class Held(msgspec.Struct):
    """`megarl.model_engine.Held`, without importing Megatron."""

    device: dict[str, int]
    host: int

    @property
    def device_total(self) -> int:
        return sum(self.device.values())


class Memory(msgspec.Struct):
    """After some cycles: storages of all tensors in the process, and its resident set."""

    tensor_bytes: int
    resident_bytes: int


class Report(msgspec.Struct):
    """What rank 0 has seen. `again` are the bytes moved by offloading, or onloading, what is there already."""

    plain: Trained
    cycled: Trained
    there: Held
    away: Held
    back: Held
    again: list[int]
    refusals: dict[str, str]
    warm: Memory
    end: Memory
    frozen: list[str]
    frozen_there: Held
    frozen_away: Held

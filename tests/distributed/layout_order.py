"""What `tools/bench/layout_order.py` and its ranks (payload_layout_order.py) tell each other."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tests.distributed.json_file import JsonFile


class Case(msgspec.Struct):
    """A layout on so many ranks, with micro-batches of so many sequences."""

    ranks: int
    layout: dict[str, int | str | bool]
    micro_batch: int = 1


class Plan(JsonFile):
    """Steps of `sequences` sequences of `tokens` tokens each, `steps` of them at each layout, on a machine whose
    operations are each measured for `interval_s`."""

    model: Path
    cases: dict[str, Case]
    sequences: int
    tokens: int
    steps: int
    interval_s: float
    out: Path


class Measured(JsonFile):
    """Seconds of each step, by layout; `others` is the share of the cores that other programs had meanwhile."""

    seconds: dict[str, list[float]]
    others: float

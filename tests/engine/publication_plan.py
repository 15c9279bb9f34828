"""What payload_publication.py is to do, and what it saw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.rollout_engine import EngineAddress
from tests.distributed.json_file import JsonFile

KEY = "key of the test"


class Plan(JsonFile):
    """Train `model` in `layout`, and publish after each of `updates`, to as many of the engines as each of `counts`.

    Engine n is on the GPUs of `ranks[n]`.
    """

    model: Path
    layout: dict[str, Any]
    engines: list[EngineAddress]
    ranks: list[list[int]]
    publish: dict[str, Any]
    counts: list[int]
    updates: int
    out: Path


class Seen(JsonFile):
    """`errors[version][engine]`: the largest difference of a log-probability to the trainer's.

    `versions` are those that the engines said they answered with. `corrupted` is what a publication said into which a
    wrong bit had come; the last version is the one after it.
    """

    errors: list[list[float]]
    versions: list[list[str]]
    nbytes: list[int]
    corrupted: dict[int, str]

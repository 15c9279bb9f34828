"""What payload_sft.py is told to do and what it reports; apart from it, so that a test need not import Megatron."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tests.distributed import hf_loop
from tests.distributed.json_file import JsonFile

TINY_BYTES = 30_000  # less than an embedding, more than the smaller matrices of a layer


class Plan(JsonFile):
    """`models` and `batches` by family. Checkpoints are written after `checkpoint_after` updates, if `save`.

    `load` is the directory of another run whose checkpoints are to be continued.
    """

    models: dict[str, Path]
    batches: dict[str, list[list[hf_loop.Row]]]
    max_tokens_per_rank: int
    temperature: float
    layout: dict[str, int | str | bool]
    out: Path
    checkpoint_after: int
    save: bool
    load: Path | None
    linger: bool


class Seen(msgspec.Struct):
    """What a run of one family saw; the same on all ranks unless it says otherwise."""

    logprobs: list[float]
    tempered: list[float]
    losses: list[float]
    grad_norms: list[float]
    rates: list[float]
    wrong_tensors: list[str]
    tensors: int
    largest_shared_bucket: int
    digests: list[tuple[str, str]] = []
    resumed_losses: list[float] = []
    resumed_grad_norms: list[float] = []


class Report(JsonFile):
    families: dict[str, Seen]
    bfloat16_losses: dict[str, list[float]]
    pids: list[int]
    vocabulary_error: float
    device_context: str

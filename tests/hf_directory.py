"""A whole Hugging Face directory, written in one go."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from megarl.config import HeadName, read_model_shape
from megarl.weights import HfWriter, copy_config, hf_specs, model_parameters, publish
from megarl.weights.hf_writer import FILE_BYTES


def write_hf(
    buckets: Iterable[list[tuple[str, Tensor]]],
    source: Path,
    target: Path,
    *,
    head: HeadName = "policy",
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the tensors of `buckets` with the configuration and tokenizer of `source` to the directory `target`.

    They come in any order and have the dtype of the first, but for what the weight table keeps in float32, which does
    not come first. `head` is the tensors', which `source` need not have.

    It is written aside and renamed, so `target` exists whole or not at all; an older `target` is replaced.
    """
    shape, aside = read_model_shape(source, head), target.with_name(target.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    pairs = (pair for bucket in buckets for pair in bucket)
    first = next(pairs)
    table = model_parameters(shape, 1)
    dtype = first[1].dtype
    specs = hf_specs(table, lambda parameter: torch.float32 if parameter.float32 else dtype)
    writer = HfWriter(aside, specs, file_bytes)
    writer.create()
    missing = {name for parameter in table for name in parameter.hf}
    for name, tensor in chain([first], pairs):
        writer.write(name, tensor)
        missing.remove(name)
    assert not missing, f"these never came: {sorted(missing)}"
    writer.finish()
    copy_config(source, aside, head_of=shape, dtype=dtype)
    publish(aside, target)

"""Hugging Face directories that are written while training goes on: the ranks stop only while weights are copied."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config import ModelShape
from megarl.model_engine.weights import ModelWeights
from megarl.weights import HfWriter, copy_config, hf_specs, publish

_BUCKET_BYTES = 1 << 30
_POLL_S = 0.2


class HfExport:
    """A directory on its way. Each rank has copied a share of the tensors to host memory, and writes it in a thread."""

    def __init__(self, weights: ModelWeights, shape: ModelShape, source: Path, target: Path) -> None:
        """Copy the weights; a collective of all ranks. Configuration and tokenizer are those of `source`."""
        self._shape, self._source, self._target, self._dtype = shape, source, target, weights.dtype
        self._aside = target.with_name(target.name + ".partial")
        specs = hf_specs(weights.parameters, lambda p: torch.float32 if p.float32 else weights.dtype)
        self._writer, self._rank, self._ranks = HfWriter(self._aside, specs), dist.get_rank(), dist.get_world_size()
        if self._rank == 0:
            shutil.rmtree(self._aside, ignore_errors=True)
            self._aside.mkdir(parents=True)
            self._writer.create()
        dist.barrier()
        self._mine: list[tuple[str, Tensor]] = []
        number = 0
        for bucket in weights.hf_buckets(_BUCKET_BYTES):
            for parameter, tensors in bucket:
                if number % self._ranks == self._rank:
                    self._mine += [(n, t.cpu().clone()) for n, t in zip(parameter.hf, tensors, strict=True)]
                number += 1
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"export of {target.name}", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when the directory is there; a collective of all ranks. Raises what went wrong while writing."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        dist.barrier()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # noqa: BLE001 (it is raised where the export is waited for)
            self._error = error

    def _write(self) -> None:
        names = [name for name, _ in self._mine]
        while self._mine:
            self._writer.write(*self._mine.pop())
        self._writer.sync(names)  # here: on a shared file system rank 0 cannot do it for other nodes
        if self._rank:
            (self._aside / f".{self._rank}").touch()
            return
        marks = [self._aside / f".{rank}" for rank in range(1, self._ranks)]
        while not all(mark.exists() for mark in marks):  # a rank that fails ends the job, and this thread with it
            time.sleep(_POLL_S)
        for mark in marks:
            mark.unlink()
        self._writer.finish()
        copy_config(self._source, self._aside, head_of=self._shape, dtype=self._dtype)
        publish(self._aside, self._target)

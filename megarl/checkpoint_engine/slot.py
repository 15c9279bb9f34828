"""Memory that a rank fills with new weights and a process of its engine reads: the contract between the two.

A slot is two files without names, which end with the rank: a head that says what lies where, and the payload. On a GPU
the payload is memory of the GPU instead, which the engine opens by its handle. The engine answers in the head.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from multiprocessing.reduction import ForkingPickler

import msgspec
import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes; where pieces begin in the payload."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A block of the engine's tensor `name` (slice `slot` of a stack), seen as a matrix, and where its bytes are."""

    name: str
    slot: int | None
    row: int
    column: int
    rows: int
    columns: int
    dtype: str
    offset: int


def dtype_of(part: Piece | Sum) -> torch.dtype:
    """Of its elements."""
    dtype: torch.dtype = getattr(torch, part.dtype)
    return dtype


class Sum(msgspec.Struct, frozen=True, array_like=True):
    """What the fingerprints of a tensor's slices must add up to, its elements being of `dtype`."""

    dtype: str
    value: int


class Head(msgspec.Struct, forbid_unknown_fields=True):
    """What the engine is to do: copy the pieces, then compare the sums of all its tensors, if there are any."""

    pieces: list[Piece] = []
    sums: dict[str, Sum] = {}


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """What went wrong in the engine; empty if nothing."""

    error: str


class Slot:
    """A rank's end. `payload` is (bytes,) of uint8."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._head, head = _unnamed_file()
        self._file: int | None = None
        body = ""
        if device.type == "cpu":
            self._file, body = _unnamed_file()
            os.ftruncate(self._file, max(1, nbytes))
            self.payload = _mapped(self._file)
            shared = torch.zeros(0)
        else:
            self.payload = shared = torch.empty(max(1, nbytes), dtype=torch.uint8, device=device)
        stream = io.BytesIO()
        (ForkingPickler if shared.is_cuda else pickle.Pickler)(stream).dump([(f"{head}\n{body}", shared)])
        self.handle = stream.getvalue()
        """By which the engine's process finds it, on the same node; sent to it over HTTP."""

    def write(self, head: Head) -> None:
        """Say what the payload, which is there by now, is."""
        if self.payload.is_cuda:
            torch.cuda.current_stream(self.payload.device).synchronize()
        _write(self._head, msgspec.json.encode(head))

    def answer(self) -> str:
        """What the engine said is wrong, also that it said nothing."""
        try:
            return msgspec.json.decode(_read(self._head), type=Answer).error
        except msgspec.DecodeError:
            return "its process did not look at what it was sent"

    def close(self) -> None:
        """Give the memory back."""
        del self.payload
        for file in (self._head, self._file):
            if file is not None:
                os.close(file)


class OpenSlot:
    """The engine's end."""

    def __init__(self, name: str, shared: Tensor) -> None:
        """From the handle, unpickled."""
        head, body = name.split("\n")
        self._head = os.open(head, os.O_RDWR)
        if body:
            file = os.open(body, os.O_RDWR)
            self.payload = _mapped(file)
            os.close(file)
        else:
            self.payload = shared

    def read(self) -> Head:
        """What the rank wants."""
        return msgspec.json.decode(_read(self._head), type=Head)

    def close(self, answer: Answer) -> None:
        """Answer and leave."""
        _write(self._head, msgspec.json.encode(answer))
        os.close(self._head)


def _unnamed_file() -> tuple[int, str]:
    """A file in memory, and the path by which processes of this user reach it while it lives."""
    file = os.memfd_create("megarl")
    return file, f"/proc/{os.getpid()}/fd/{file}"


def _mapped(file: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)


def _write(file: int, content: bytes) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, content, 0)


def _read(file: int) -> bytes:
    return os.pread(file, os.fstat(file).st_size, 0)

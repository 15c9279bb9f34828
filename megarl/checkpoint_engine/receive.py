"""The engine's end of a publication; runs in SGLang's processes, which call it as a custom weight loader."""

from __future__ import annotations

import traceback
from typing import Any

import torch
from torch import Tensor, nn

from megarl.checkpoint_engine.slot import ALIGNMENT, Answer, Head, OpenSlot, Piece, dtype_of
from megarl.weights import combined, fingerprint

_NAMED = 5


def receive(model: nn.Module, handle: list[tuple[str, Tensor]]) -> None:
    """Do what the slot says, and say there what went wrong: an exception would end the engine before it is heard."""
    (slot,) = (OpenSlot(*part) for part in handle)  # unless it cannot even be opened
    try:
        error = _load(model, slot.read(), slot.payload)
    except Exception:  # noqa: BLE001 (the rank gets it)
        error = traceback.format_exc()
    slot.close(Answer(error))


@torch.no_grad()
def _load(model: Any, head: Head, payload: Tensor) -> str:
    tensors = dict(model.named_parameters())
    for piece in head.pieces:
        block = _matrix(tensors[piece.name], piece.slot)
        block = block[piece.row : piece.row + piece.rows, piece.column : piece.column + piece.columns]
        block.copy_(piece_of(payload, piece))
    if not head.sums:
        return ""
    wrong = [
        f"{name} {list(tensor.shape)}"
        for name, tensor in sorted(tensors.items())
        if name in head.sums and _differs(tensor, head, name)
    ]
    answers = {
        "has other weights than the trainer in": wrong,
        "has, but was never sent,": sorted(tensors.keys() - head.sums.keys()),
        "does not have": sorted(head.sums.keys() - tensors.keys()),
    }
    found = [f"{what} {_some(names)}" for what, names in answers.items() if names]
    if not found and hasattr(model, "post_load_weights"):
        model.post_load_weights()  # what some models derive from their weights; SGLang leaves it to loaders
    return "; ".join(found)


def piece_of(payload: Tensor, piece: Piece) -> Tensor:
    """A piece's (rows, columns) elements in a payload, of its dtype."""
    dtype = dtype_of(piece)
    assert piece.offset % ALIGNMENT == 0
    end = piece.offset + piece.rows * piece.columns * dtype.itemsize
    return payload[piece.offset : end].view(dtype).view(piece.rows, piece.columns)


def _differs(tensor: Tensor, head: Head, name: str) -> bool:
    want, total = head.sums[name], 0
    tensor = tensor.to(dtype_of(want))
    for slot in range(len(tensor)) if tensor.ndim == 3 else [None]:
        total = combined(total, fingerprint(_matrix(tensor, slot), slot=slot or 0))
    return total != want.value


def _matrix(tensor: Tensor, slot: int | None) -> Tensor:
    one = tensor if slot is None else tensor[slot]
    return one.view(one.shape[0], -1)


def _some(names: list[str]) -> str:
    return f"{len(names)} tensors, first {', '.join(names[:_NAMED])}"

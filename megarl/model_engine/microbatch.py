"""Dividing sequences among data-parallel ranks and into micro-batches: a pure decision, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class TokenSequence:
    """A prompt and its response. `columns` hold one value for each response token, such as its advantage."""

    input_ids: list[int]
    prompt_length: int
    columns: dict[str, Tensor] = field(default_factory=dict)

    @property
    def response_length(self) -> int:
        return len(self.input_ids) - self.prompt_length


@dataclass(frozen=True)
class MicroBatch:
    """Right-padded sequences; position t predicts token t + 1, so T is one less than the longest sequence.

    `mask` is 1 where a response token is predicted, and `columns` are aligned with it (0 elsewhere).
    `indices` says which of the batch's sequences these are.
    """

    input_ids: Int[Tensor, "B T"]
    targets: Int[Tensor, "B T"]
    mask: Float[Tensor, "B T"]
    columns: dict[str, Float[Tensor, "B T"]]
    indices: list[int]


def partition(lengths: list[int], *, data_rank: int, data_size: int, most: int) -> list[list[int]]:
    """Indices of the sequences of each of this data rank's micro-batches, of at most `most` sequences.

    Sequences of like length share a micro-batch, and data ranks take turns in order of length, so that both padding
    and the difference of work between ranks stay small. The ranks' results are disjoint and cover all indices.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    mine = order[data_rank::data_size]
    return [mine[start : start + most] for start in range(0, len(mine), most)]


def collate(sequences: list[TokenSequence], indices: list[int], device: torch.device) -> MicroBatch:
    """Pad the chosen sequences into one micro-batch."""
    chosen = [sequences[i] for i in indices]
    width = max(len(s.input_ids) for s in chosen)
    tokens = torch.zeros(len(chosen), width, dtype=torch.long)
    mask = torch.zeros(len(chosen), width - 1)
    columns = {name: torch.zeros(len(chosen), width - 1) for name in chosen[0].columns}
    for row, sequence in enumerate(chosen):
        tokens[row, : len(sequence.input_ids)] = torch.tensor(sequence.input_ids)
        predicted = slice(sequence.prompt_length - 1, len(sequence.input_ids) - 1)
        mask[row, predicted] = 1
        for name, values in sequence.columns.items():
            columns[name][row, predicted] = values
    return MicroBatch(
        input_ids=tokens[:, :-1].contiguous().to(device),
        targets=tokens[:, 1:].contiguous().to(device),
        mask=mask.to(device),
        columns={name: values.to(device) for name, values in columns.items()},
        indices=indices,
    )


def idle_microbatch(device: torch.device) -> MicroBatch:
    """What a data rank without sequences computes, so that it takes part in the collectives of the others."""
    pair = TokenSequence(input_ids=[0, 0], prompt_length=2)
    return collate([pair], [0], device)

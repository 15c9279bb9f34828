"""From sequences to packed micro-batches: one row of tokens, cut for this context-parallel rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from megatron.core import parallel_state
from torch import Tensor

from megarl.model_engine.attention import Packing, pack
from megarl.model_engine.routing import RoutedTokens

_COLUMN = "column "  # before the names of columns, where they lie beside the micro-batch's own tensors


class Source(Protocol):
    """Where tokens and columns of sequences lie until a rank reads them."""

    def load(self, wanted: Mapping[str, Sequence[int]]) -> Mapping[str, Sequence[Any]]:
        """Vectors, as numpy arrays or tensors: of each field those of the sequences with these numbers."""


@dataclass(frozen=True)
class RemoteTokens:
    """Tokens that lie elsewhere until this rank reads them: the first `length` of `input_ids` of the `source`'s
    sequence `number`, with `then` behind them.

    `ending` is the last token of the whole sequence, and how often it stands at the end.
    """

    source: Source
    number: int
    length: int
    ending: tuple[int, int]
    then: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.length + len(self.then)


@dataclass(frozen=True)
class TokenSequence:
    """A prompt and its response. `columns` hold one value for each response token, such as its advantage.

    `fetched` are names of further columns, which come from the source of `input_ids` together with these. `experts` are
    those that each input token is to go to, in each layer that has any; a negative number, or a row that is missing at
    the end, leaves the choice to the model's router.
    """

    input_ids: list[int] | Int[Tensor, " tokens"] | RemoteTokens
    prompt_length: int
    columns: dict[str, Tensor] = field(default_factory=dict)
    experts: Int[Tensor, "inputs layers active"] | None = None
    fetched: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_length <= len(self.input_ids):
            raise ValueError(
                f"prompt_length is {self.prompt_length}, expected 1 to {len(self.input_ids)}, the sequence's tokens:"
                " a response is predicted from a prompt"
            )

    @property
    def response_length(self) -> int:
        return len(self.input_ids) - self.prompt_length

    @property
    def tokens(self) -> Int[Tensor, " tokens"]:
        """Its tokens, which must have been loaded."""
        assert not isinstance(self.input_ids, RemoteTokens), "asked for tokens that are not this rank's to read"
        return torch.as_tensor(self.input_ids)


@dataclass(frozen=True)
class MicroBatch:
    """This rank's T tokens of several packed sequences; each predicts the next token of its sequence.

    `mask` is 1 where a response token is predicted, and `columns` are aligned with it (0 elsewhere). `response_index`
    says which of the batch's response tokens it is, counted through all sequences in their order (0 elsewhere).
    `sequence` numbers the micro-batch's sequences, of which there are `sequences`; padding may be one of them.
    """

    input_ids: Int[Tensor, " T"]
    targets: Int[Tensor, " T"]
    mask: Float[Tensor, " T"]
    columns: dict[str, Float[Tensor, " T"]]
    response_index: Int[Tensor, " T"]
    sequence: Int[Tensor, " T"]
    sequences: int
    packing: Packing

    @staticmethod
    def total(values: Tensor) -> Tensor:
        """The sum over the context-parallel ranks, which hold other tokens of the same sequences; no gradient."""
        if parallel_state.get_context_parallel_world_size() > 1:
            dist.all_reduce(values, group=parallel_state.get_context_parallel_group())
        return values


@dataclass(frozen=True)
class Alignment:
    """How token counts must divide: `context` ranks share each sequence, `tensor` ranks their rank's tokens."""

    context: int
    context_rank: int
    tensor: int

    @property
    def unit(self) -> int:
        """The tokens of a micro-batch are a multiple of this."""
        return self.context * self.tensor * (2 if self.context > 1 else 1)

    def padded(self, length: int) -> int:
        """Tokens that a sequence with `length` inputs occupies, on all context ranks together."""
        unit = 2 * self.context if self.context > 1 else 1
        return max(-(-length // unit), 1) * unit


def inputs(sequence: TokenSequence) -> int:
    """Tokens that are fed to the model: the last one only is a target."""
    return len(sequence.input_ids) - 1


def check_sequences(sequences: Sequence[TokenSequence], positions: int) -> None:
    """Raise ValueError for what would be computed wrong without a word, or end in an error that names no sequence."""
    columns = [*sequences[0].columns, *sequences[0].fetched] if sequences else []
    for index, sequence in enumerate(sequences):
        if inputs(sequence) > positions:
            raise ValueError(
                f"sequence {index} has {inputs(sequence)} tokens to read, more than the model's {positions} positions;"
                " shorten it"
            )
        given = {name: len(values) for name, values in sequence.columns.items()}
        given |= dict.fromkeys(sequence.fetched, sequence.response_length)
        if given != dict.fromkeys(columns, sequence.response_length):
            raise ValueError(
                f"sequence {index} has columns of {given} values, expected {sequence.response_length} (one for each"
                f" response token) of each of {columns}, as the first sequence has"
            )


def load(sequences: Sequence[TokenSequence], plan: Sequence[Sequence[int]], vocab: int) -> list[TokenSequence]:
    """The sequences; those that `plan` names have their tokens and columns here.

    Raises ValueError: a token that `plan` names is not in the vocabulary.
    """
    there, mine = list(sequences), [index for indices in plan for index in indices]
    remote = {i: tokens for i in mine if isinstance(tokens := sequences[i].input_ids, RemoteTokens)}
    for source in {id(tokens.source): tokens.source for tokens in remote.values()}.values():
        own = {i: tokens for i, tokens in remote.items() if tokens.source is source}
        names = ("input_ids", *sequences[next(iter(own))].fetched)
        found = source.load({name: [tokens.number for tokens in own.values()] for name in names})
        for place, (i, tokens) in enumerate(own.items()):
            ids, *columns = (torch.as_tensor(found[name][place]) for name in names)
            whole = ids[: tokens.length]
            there[i] = replace(
                sequences[i],
                input_ids=torch.cat([whole, torch.tensor(tokens.then, dtype=ids.dtype)]) if tokens.then else whole,
                columns=sequences[i].columns | dict(zip(names[1:], columns, strict=True)),
                fetched=(),
            )
    for index in mine:
        least, most = torch.aminmax(there[index].tokens)
        for token in (int(least), int(most)):
            if not 0 <= token < vocab:
                raise ValueError(
                    f"sequence {index} has token {token}, expected 0 to {vocab - 1}: tokenizer and weights must be of"
                    " one model"
                )
    return there


def collate(
    sequences: Sequence[TokenSequence],
    plan: Sequence[Sequence[int]],
    alignment: Alignment,
    device: torch.device,
    *,
    equal: bool,
) -> list[MicroBatch]:
    """Pack the sequences that `plan` gives to each micro-batch.

    What is missing to the alignment, or to the longest micro-batch if all must be `equal`, are tokens without a loss;
    a micro-batch without sequences has nothing else, and lets a rank keep step with the others.
    """
    starts = [0]
    for sequence in sequences:
        starts.append(starts[-1] + sequence.response_length)
    totals = [sum(alignment.padded(inputs(sequences[i])) for i in indices) for indices in plan]
    totals = [max(-(-total // alignment.unit), 1) * alignment.unit for total in totals]
    totals = [max(totals)] * len(totals) if equal else totals
    whole = _Whole.of(sequences)
    return [
        _collate([(sequences[i], starts[i]) for i in indices], whole, total, alignment, device)
        for indices, total in zip(plan, totals, strict=True)
    ]


@dataclass(frozen=True)
class _Whole:
    """What each micro-batch must know of the whole batch. `choices` are the layers and experts of a token's choice."""

    columns: tuple[str, ...]
    choices: tuple[int, int] | None
    sequences: int
    tokens: int

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence]) -> _Whole:
        given = [sequence.experts for sequence in sequences if sequence.experts is not None]
        return cls(
            columns=(*sequences[0].columns, *sequences[0].fetched) if sequences else (),
            choices=(given[0].shape[1], given[0].shape[2]) if given else None,
            sequences=len(sequences),
            tokens=sum(inputs(sequence) for sequence in sequences),
        )


def _collate(
    chosen: list[tuple[TokenSequence, int]],
    batch: _Whole,
    total: int,
    alignment: Alignment,
    device: torch.device,
) -> MicroBatch:
    lengths = [alignment.padded(inputs(sequence)) for sequence, _ in chosen]
    if missing := total - sum(lengths):
        nothing = {name: torch.empty(0) for name in batch.columns}
        chosen, lengths = [*chosen, (TokenSequence([0], 1, nothing), 0)], [*lengths, missing]
    packing = pack(lengths, rank=alignment.context_rank, size=alignment.context)
    rows = [
        _row(sequence, start, length) | _routed(sequence, number, length, batch.choices)
        for number, ((sequence, start), length) in enumerate(zip(chosen, lengths, strict=True))
    ]
    mine = _mine(lengths, packing.positions, alignment.context)
    whole = {name: torch.cat([row[name] for row in rows])[mine].to(device) for name in rows[0]}
    packing.routing = RoutedTokens(
        experts=whole.pop("experts", None),
        sequence=whole["sequence"],
        length=whole.pop("length"),
        sequences=len(chosen),
        batch_sequences=batch.sequences,
        batch_tokens=batch.tokens,
    )
    return MicroBatch(
        input_ids=whole.pop("input_ids"),
        targets=whole.pop("targets"),
        mask=whole.pop("mask"),
        response_index=whole.pop("response_index"),
        columns={name: whole[_COLUMN + name] for name in batch.columns},
        sequence=whole.pop("sequence"),
        sequences=len(chosen),
        packing=packing.to(device),
    )


def _row(sequence: TokenSequence, start: int, length: int) -> dict[str, Tensor]:
    """Everything of one sequence, padded to `length`; its response tokens are counted from `start`."""
    count, predicted = inputs(sequence), slice(sequence.prompt_length - 1, inputs(sequence))
    row = {"input_ids": torch.zeros(length, dtype=torch.long), "targets": torch.zeros(length, dtype=torch.long)}
    row["input_ids"][:count] = sequence.tokens[:-1]
    row["targets"][:count] = sequence.tokens[1:]
    row["mask"], row["response_index"] = torch.zeros(length), torch.zeros(length, dtype=torch.long)
    row["mask"][predicted] = 1
    row["response_index"][predicted] = torch.arange(start, start + sequence.response_length)
    for name, values in sequence.columns.items():
        row[_COLUMN + name] = torch.zeros(length, dtype=values.dtype)
        row[_COLUMN + name][predicted] = values
    return row


def _routed(sequence: TokenSequence, number: int, length: int, choices: tuple[int, int] | None) -> dict[str, Tensor]:
    """What routers must know of one sequence, which is the micro-batch's `number`, padded to `length`."""
    count = inputs(sequence)
    row = {"sequence": torch.full((length,), number), "length": torch.zeros(length, dtype=torch.long)}
    row["length"][:count] = count
    if choices is not None:
        row["experts"] = torch.full((length, *choices), -1, dtype=torch.int32)
        if sequence.experts is not None:
            row["experts"][: len(sequence.experts)] = sequence.experts
    return row


def _mine(lengths: Sequence[int], positions: Tensor, size: int) -> Tensor:
    """Which of all tokens of the packed sequences are this rank's, which has `positions` of each."""
    starts = torch.tensor([sum(lengths[:i]) for i in range(len(lengths))])
    return positions + starts.repeat_interleave(torch.tensor(lengths) // size)

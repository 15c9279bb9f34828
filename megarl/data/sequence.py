"""Conversations as token sequences for supervised fine-tuning."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

import msgspec

from megarl.data.chat import encode
from megarl.data.errors import DataError
from megarl.data.jsonl import ASSISTANT, Conversation
from megarl.data.turns import Piece, pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ENCODED_AT_ONCE = 1000
# conversations; the tokenizer keeps a hundred bytes of each token until all are done


class Sequence(msgspec.Struct, frozen=True):
    """A conversation in one row of tokens. `learned` are ranges of them, each as first and end, in order."""

    input_ids: list[int]
    learned: list[tuple[int, int]]

    @property
    def prompt_length(self) -> int:
        """Tokens before the first that is learned."""
        return self.learned[0][0]

    @property
    def learned_length(self) -> int:
        """Tokens that are learned."""
        return sum(end - first for first, end in self.learned)


def encode_conversations(
    tokenizer: PreTrainedTokenizerFast,
    conversations: Items[Conversation],
    max_positions: int,
    roles: Collection[str] = (ASSISTANT,),
) -> list[Sequence]:
    """Each conversation, up to its last message of one of the `roles`, which are learned, in order.

    Raises DataError with the line of one that is longer than `max_positions` tokens or cannot be learned.
    """
    sequences = []
    for start in range(0, len(conversations), ENCODED_AT_ONCE):
        some = conversations[start : start + ENCODED_AT_ONCE]
        written = [_written(tokenizer, conversation, roles) for conversation in some]
        encodings = iter(encode(tokenizer, [piece.text for parts in written for piece in parts]))
        for conversation, parts in zip(some, written, strict=True):
            sequence = _joined([(piece, next(encodings)) for piece in parts])
            _check(sequence, conversation, max_positions)
            sequences.append(sequence)
    return sequences


def _written(tokenizer: PreTrainedTokenizerFast, conversation: Conversation, roles: Collection[str]) -> list[Piece]:
    try:
        return pieces(tokenizer, conversation.messages, roles)
    except DataError as error:
        raise DataError(f"line {conversation.line}: {error}") from None


def _joined(parts: list[tuple[Piece, Any]]) -> Sequence:
    """A token is learned if it begins in a part that is."""
    ids: list[int] = []
    learned: list[tuple[int, int]] = []
    for piece, encoding in parts:
        begins = [begin for begin, _ in encoding.offsets] if piece.learned else []
        for first, end in piece.learned:
            # all tokens to the end: the last may be said to begin there if it is white space
            stop = len(ids) + (len(begins) if end == len(piece.text) else bisect_left(begins, end))
            learned.append((len(ids) + bisect_left(begins, first), stop))
        ids += encoding.ids
    return Sequence(ids, _merged(learned))


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Without those that are empty or go on where another ends."""
    merged: list[tuple[int, int]] = []
    for first, end in ranges:
        if merged and merged[-1][1] == first:
            merged[-1] = merged[-1][0], end
        elif first < end:
            merged.append((first, end))
    return merged


def _check(sequence: Sequence, conversation: Conversation, max_positions: int) -> None:
    if len(sequence.input_ids) > max_positions:
        raise DataError(
            f"line {conversation.line}: {len(sequence.input_ids)} tokens, more than the model's {max_positions}"
            " positions; shorten it or remove it"
        )
    if not sequence.learned:
        raise DataError(f"line {conversation.line}: nothing to learn: no token begins in a message that is learned")
    if sequence.prompt_length == 0:
        raise DataError(
            f"line {conversation.line}: message 1 ({conversation.messages[0].role}) is learned, and its first token has"
            " none before it from which it is predicted; begin with a message that is not learned"
        )

"""A conversation as text: what the chat template writes, and which of it is learned.

Nothing is rendered but what the model is asked, before each answer, and the messages of other roles that are learned.
So an answer follows the very text that a rollout would give the model, and a template may do with the last answer of a
rendering what it likes. But it must leave earlier messages as they were: what was asked and answered has to be how the
next question begins.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from megarl.data.chat import chat_text
from megarl.data.errors import DataError
from megarl.data.jsonl import ASSISTANT, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Piece(NamedTuple):
    """Text that is encoded by itself, and the parts of it that are learned, each as first character and end."""

    text: str
    learned: list[tuple[int, int]]


def pieces(tokenizer: PreTrainedTokenizerFast, messages: list[Message], roles: Collection[str]) -> list[Piece]:
    """The conversation up to the last message of one of the `roles`: these are learned.

    Of an answer that is its content, a piece of its own since the model begins it anew, and what ends the turn. That is
    the eos token, or, if the template ends turns otherwise, what it writes; the last answer always ends with eos. Of
    other messages it is all that the template writes for them.

    Raises DataError: nothing to learn, an empty answer, messages that the template refuses or rewrites.
    """
    learned = [number for number, message in enumerate(messages) if message.role in roles]
    if not learned:
        found = ", ".join(dict.fromkeys(message.role for message in messages))
        raise DataError(f"nothing to learn: expected a message of role {' or '.join(roles)}, found {found}")
    before = [_text(tokenizer, messages[:number], ask=messages[number].role == ASSISTANT) for number in learned]
    done: list[Piece] = []
    text, start = "", 0  # so far, and where the piece begins that is not done
    spans: list[tuple[int, int]] = []
    for number, asked, later in zip_longest(learned, before, before[1:]):
        message = messages[number]
        if not message.content.strip():
            raise DataError(f"message {number + 1}: 'content' is empty, and the role {message.role} is learned")
        text = _continued(text, asked, number)
        if message.role == ASSISTANT:
            done.append(Piece(text[start:], spans))
            if later is None:
                answer, end = message.content, tokenizer.eos_token
            else:
                answer, end = _answer(tokenizer, messages[: number + 1], text, later)
            done.append(Piece(answer, [(0, len(answer))]))
            start, spans = len(text) + len(answer), [(0, len(end))]
            text += answer + end
        else:
            after = _continued(text, _text(tokenizer, messages[: number + 1], ask=False), number)
            if after == text:
                raise DataError(f"message {number + 1}: the chat template writes nothing of it, and it is learned")
            spans.append((len(text) - start, len(after) - start))
            text = after
    return [*done, Piece(text[start:], spans)]


def _answer(tokenizer: PreTrainedTokenizerFast, messages: list[Message], text: str, later: str) -> tuple[str, str]:
    """The last message, an answer, as it stands after `text` in a `later` text, and what ends its turn there."""
    _continued(text, later, len(messages))
    content = messages[-1].content
    begin = len(text)
    if not later.startswith(content, begin):  # many templates strip it
        content = content.strip()
        begin = len(later) - len(later[begin:].lstrip())
        if not later.startswith(content, begin):
            raise _rewritten(text + messages[-1].content, later, len(messages))
    answer, eos = later[len(text) : begin + len(content)], tokenizer.eos_token
    end = later[begin + len(content) :]
    if not end.lstrip().startswith(eos):  # is there any in this turn?
        turn = _continued(text + answer, _text(tokenizer, messages, ask=False), len(messages))
        _continued(turn, later, len(messages))
        end = turn[len(text + answer) :]
    return answer, end[: end.index(eos) + len(eos)] if eos in end else end


def _text(tokenizer: PreTrainedTokenizerFast, messages: list[Message], *, ask: bool) -> str:
    try:
        return chat_text(tokenizer, messages, ask=ask)
    except Exception as error:  # noqa: BLE001 (a template is a program, and may raise anything)
        roles = ", ".join(message.role for message in messages)
        raise DataError(f"the chat template refuses messages of the roles {roles:.100}: {error}") from None


def _continued(text: str, later: str, number: int) -> str:
    """`later`, which is written when there are `number` messages, if it goes on from `text`."""
    if not later.startswith(text):
        raise _rewritten(text, later, number)
    return later


def _rewritten(text: str, later: str, number: int) -> DataError:
    at = next((i for i, (one, other) in enumerate(zip(text, later, strict=False)) if one != other), len(later))
    return DataError(
        f"the chat template does not keep what precedes message {number + 1} as it was: it writes"
        f" {later[at : at + 40]!r}, expected {text[at : at + 40]!r}, after {text[max(at - 40, 0) : at]!r};"
        " end the conversation before, or use a template that only adds"
    )

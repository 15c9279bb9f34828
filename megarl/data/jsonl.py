"""Problems and demonstrations from JSON lines, checked row by row before a GPU is used.

Row i of the result is line i + 1 of the file: blank lines are errors (except at the end), so that every later complaint
about a row can name its line. Keys other than those expected are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from megarl.data.errors import DataError

UTF8_MARK = b"\xef\xbb\xbf"
ASSISTANT = "assistant"  # the role whose messages the model writes


class Demonstration(msgspec.Struct, frozen=True):
    """What the user says and what the model should answer."""

    prompt: str
    response: str


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a conversation. Keys that the chat template would not be given, such as tool calls, are refused."""

    role: str
    content: str


class Conversation(msgspec.Struct, frozen=True):
    """Messages in their order, and the line of the file where they stand."""

    messages: list[Message]
    line: int


class Problem(msgspec.Struct, frozen=True):
    """What the user asks, the answer that rules compare with, and what the recipe routes the row by."""

    prompt: str
    answer: str = ""
    dataset: str = ""


class Preference(msgspec.Struct, frozen=True):
    """What the user asks and two answers; the chosen one should score at least `margin` more."""

    prompt: str
    chosen: str
    rejected: str
    margin: float = 0.0


class _Either(msgspec.Struct, frozen=True):
    """A row with messages or with prompt and response."""

    messages: list[Message] | None = None
    prompt: str | None = None
    response: str | None = None


Row = TypeVar("Row")


def read_demonstrations(path: Path | str) -> list[Demonstration]:
    """All rows of `path`, JSON lines with prompt and response. Raises DataError with file and line."""
    return _read(Path(path), Demonstration)


def read_conversations(path: Path | str) -> list[Conversation]:
    """All rows of `path`, JSON lines with messages, or with prompt and response, which are two messages.

    Raises DataError with file and line.
    """
    rows = _rows(Path(path), _messages, _EITHER)
    return [Conversation(messages, line) for line, messages in enumerate(rows, start=1)]


def read_problems(path: Path | str) -> list[Problem]:
    """All rows of `path`, JSON lines with prompt, maybe answer and dataset. Raises DataError with file and line."""
    return _read(Path(path), Problem)


def read_preferences(path: Path | str) -> list[Preference]:
    """All rows of `path`, JSON lines with prompt, chosen, rejected and maybe a margin. Raises DataError."""
    return _read(Path(path), Preference)


def whole_pairs(rows: list[Preference]) -> list[Conversation]:
    """Both answers of each row, one after the other; `rows` are a whole file."""
    return [
        Conversation(_turn(row.prompt, answer), line)
        for line, row in enumerate(rows, start=1)
        for answer in (row.chosen, row.rejected)
    ]


def _texts(kind: type[Any]) -> tuple[str, ...]:
    """The fields that must be there: those without a default, all text."""
    return kind.__struct_fields__[: len(kind.__struct_fields__) - len(kind.__struct_defaults__)]


def _read(path: Path, kind: type[Row]) -> list[Row]:
    return _rows(path, _row_of(kind), " and ".join(_texts(kind)))


def _rows(path: Path, row: Callable[[bytes], Row], expected: str) -> list[Row]:
    """What `row` makes of each line; its complaints get file and line."""
    rows = []
    for number, line in _lines(path):
        try:
            rows.append(row(line))
        except DataError as error:
            raise DataError(f"{path}: line {number}: {error}") from None
    if not rows:
        raise DataError(f"{path}: no rows; expected JSON lines with {expected}")
    return rows


def _row_of(kind: type[Row]) -> Callable[[bytes], Row]:
    decode, texts = msgspec.json.Decoder(kind).decode, _texts(kind)

    def row(line: bytes) -> Row:
        try:
            found = decode(line)
        except _UNREADABLE:
            raise DataError(_complaint(line, kind)) from None
        empty = next((name for name in texts if not getattr(found, name).strip()), None)
        if empty is not None:
            raise DataError(f"{empty!r} is empty")
        return found

    return row


_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_EITHER = "messages, or with prompt and response"
_either = msgspec.json.Decoder(_Either).decode
_demonstration = _row_of(Demonstration)


def _messages(line: bytes) -> list[Message]:
    """The messages of a row, which is of one form or the other."""
    try:
        row = _either(line)
    except _UNREADABLE:
        raise DataError(_complaint_of_either(_parsed(line), line)) from None
    if row.messages is None:
        if row.prompt is None and row.response is None:
            raise DataError(f"expected the key messages, or prompt and response, found {_names(_parsed(line))}")
        pair = _demonstration(line)
        return _turn(pair.prompt, pair.response)
    if row.prompt is not None or row.response is not None:
        raise DataError("has 'messages' and a prompt or response; expected one or the other")
    if not row.messages:
        raise DataError("'messages' is empty; expected at least one message")
    for number, message in enumerate(row.messages, start=1):
        if not message.role.strip():
            raise DataError(f"message {number}: 'role' is empty")
    return row.messages


def _turn(prompt: str, response: str) -> list[Message]:
    return [Message("user", prompt), Message(ASSISTANT, response)]


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Line numbers from 1 and lines that are not blank; blank ones may only end the file."""
    blank = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(UTF8_MARK)
                if line.isspace() or not line:
                    blank = blank or number
                    continue
                if blank:
                    raise DataError(f"{path}: line {blank}: blank; remove it, each line is one row")
                yield number, line
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise DataError(f"{path}: is a directory; expected a file of JSON lines") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _parsed(line: bytes) -> Any:
    """What the line says, if it is JSON."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"not UTF-8: byte 0x{line[error.start]:02x} at position {error.start}") from None
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise DataError(f"not JSON: {error}; the line begins {text[:60].strip()!r}") from None


def _complaint(line: bytes, kind: type[Any]) -> str:
    """Why `line` is no row; slow and only for the one row that ends the reading."""
    expected, found = _texts(kind), _parsed(line)
    if not isinstance(found, dict):
        return f"expected an object with {' and '.join(expected)}, found {_json_name(found)}"
    missing = [name for name in expected if name not in found]
    if missing:
        return f"no {' and no '.join(missing)}: expected the keys {', '.join(expected)}, found {_names(found)}"
    name, wanted = next(
        (field.name, _WORDS[field.type])
        for field in msgspec.structs.fields(kind)
        if field.name in found and _json_name(found[field.name]) != _WORDS[field.type]
    )
    return f"{name!r} is {_json_name(found[name])}, expected {wanted}"


def _complaint_of_either(found: Any, line: bytes) -> str:
    """Why `line`, which says `found`, is a row of neither form."""
    if not isinstance(found, dict):
        return f"expected an object with {_EITHER}, found {_json_name(found)}"
    if found.get("messages") is None:
        return _complaint(line, Demonstration)
    expected = Message.__struct_fields__
    if not isinstance(found["messages"], list):
        return f"'messages' is {_json_name(found['messages'])}, expected a list"
    for number, message in enumerate(found["messages"], start=1):
        if not isinstance(message, dict):
            return f"message {number} is {_json_name(message)}, expected an object with {' and '.join(expected)}"
        if set(message) != set(expected):
            return f"message {number}: expected just the keys {', '.join(expected)}, found {_names(message)}"
        wrong = next((name for name in expected if not isinstance(message[name], str)), None)
        if wrong is not None:
            return f"message {number}: {wrong!r} is {_json_name(message[wrong])}, expected a string"
    return "has 'messages' and a prompt or response; expected one or the other"


def _names(found: dict[str, Any]) -> str:
    return (", ".join(found) or "none")[:200]


_WORDS: dict[Any, str] = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
}


def _json_name(value: Any) -> str:
    return _WORDS.get(type(value), "null")

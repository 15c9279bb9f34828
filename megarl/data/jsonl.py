"""Problems and demonstrations from JSON lines, checked row by row before a GPU is used.

Row i of the result is line i + 1 of the file: blank lines are errors (except at the end), so that every later complaint
about a row can name its line. Keys other than those expected are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from megarl.data.errors import DataError

UTF8_MARK = b"\xef\xbb\xbf"


class Demonstration(msgspec.Struct, frozen=True):
    """What the user says and what the model should answer."""

    prompt: str
    response: str


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


Row = TypeVar("Row", Demonstration, Problem, Preference)


def read_demonstrations(path: Path | str) -> list[Demonstration]:
    """All rows of `path`, JSON lines with prompt and response. Raises DataError with file and line."""
    return _read(Path(path), Demonstration)


def read_problems(path: Path | str) -> list[Problem]:
    """All rows of `path`, JSON lines with prompt, maybe answer and dataset. Raises DataError with file and line."""
    return _read(Path(path), Problem)


def read_preferences(path: Path | str) -> list[Preference]:
    """All rows of `path`, JSON lines with prompt, chosen, rejected and maybe a margin. Raises DataError."""
    return _read(Path(path), Preference)


def whole_pairs(rows: list[Preference]) -> list[Demonstration]:
    """Both answers of each row, one after the other."""
    return [Demonstration(row.prompt, answer) for row in rows for answer in (row.chosen, row.rejected)]


def _texts(kind: type[Any]) -> tuple[str, ...]:
    """The fields that must be there: those without a default, all text."""
    return kind.__struct_fields__[: len(kind.__struct_fields__) - len(kind.__struct_defaults__)]


def _read(path: Path, kind: type[Row]) -> list[Row]:
    decode = msgspec.json.Decoder(kind).decode
    rows = []
    for number, line in _lines(path):
        try:
            row = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise DataError(f"{path}: line {number}: {_complaint(line, kind)}") from None
        empty = next((name for name in _texts(kind) if not getattr(row, name).strip()), None)
        if empty is not None:
            raise DataError(f"{path}: line {number}: {empty!r} is empty")
        rows.append(row)
    if not rows:
        raise DataError(f"{path}: no rows; expected JSON lines with {' and '.join(_texts(kind))}")
    return rows


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


def _complaint(line: bytes, kind: type[Row]) -> str:
    """Why `line` is no row; slow and only for the one row that ends the reading."""
    expected = _texts(kind)
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8: byte 0x{line[error.start]:02x} at position {error.start}"
    try:
        found: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        return f"not JSON: {error}; the line begins {text[:60].strip()!r}"
    if not isinstance(found, dict):
        return f"expected an object with {' and '.join(expected)}, found {_json_name(found)}"
    missing = [name for name in expected if name not in found]
    if missing:
        names = ", ".join(found) or "none"
        return f"no {' and no '.join(missing)}: expected the keys {', '.join(expected)}, found {names}"
    wrong = next((name for name in expected if not isinstance(found[name], str)), None)
    if wrong is None:
        name = next(name for name in kind.__struct_fields__ if name not in expected)
        return f"{name!r} is {_json_name(found.get(name))}, expected a number"
    return f"{wrong!r} is {_json_name(found[wrong])}, expected a string"


def _json_name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")

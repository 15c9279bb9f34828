"""Data directories that appear whole: written aside, renamed when finished, with a note of what they were made from.

Used by the scripts that prepare example tasks. A killed run leaves only `<name>.partial`, which the next run clears.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from megarl.data.errors import DataError
from megarl.data.jsonl import Demonstration, Preference, Problem

NOTE_FILE = "prepared.json"


def write_rows(path: Path, rows: Iterable[Demonstration | Preference | Problem]) -> None:
    """Write `rows` as JSON lines."""
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:
        file.writelines(encode(row) + b"\n" for row in rows)


def already_prepared(directory: Path, made_from: Mapping[str, Any], *, force: bool) -> bool:
    """Whether `directory` is finished and made from just that, so that nothing need be done.

    With `force` a prepared directory counts as not there. Raises DataError where something else would be overwritten.
    """
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return False
    note = directory / NOTE_FILE
    if not note.is_file():
        raise DataError(
            f"{directory}: exists and was not made by this script (no {NOTE_FILE}); choose another directory"
        )
    found = json.loads(note.read_text())
    if force:
        return False
    if found != dict(made_from):
        raise DataError(
            f"{directory}: was made from {json.dumps(found)}, but this would make {json.dumps(dict(made_from))};"
            " choose another directory, or replace this one with --force"
        )
    return True


@contextlib.contextmanager
def whole_directory(directory: Path, made_from: Mapping[str, Any]) -> Iterator[Path]:
    """A directory to write into that becomes `directory`, replacing it, if the block ends well, and vanishes if not."""
    partial = directory.with_name(f"{directory.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        (partial / NOTE_FILE).write_text(json.dumps(dict(made_from), indent=2) + "\n")
        if directory.exists():
            old = directory.with_name(f"{directory.name}.replaced")
            directory.rename(old)
            partial.rename(directory)
            shutil.rmtree(old)
        else:
            partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)

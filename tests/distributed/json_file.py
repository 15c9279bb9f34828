"""What a test and the ranks that it starts tell each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import msgspec


class JsonFile(msgspec.Struct):
    """A struct that is kept as JSON; the file appears whole."""

    def write(self, file: Path) -> None:
        aside = file.with_suffix(".partial")
        aside.write_bytes(msgspec.json.encode(self, enc_hook=str))
        aside.rename(file)

    @classmethod
    def read(cls, file: Path) -> Self:
        return msgspec.json.decode(file.read_bytes(), type=cls, dec_hook=_path)


def _path(kind: type, value: Any) -> Any:
    return kind(value)

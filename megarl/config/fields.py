"""The types of a recipe's fields, and the section that all parts of a recipe are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


def _location(value: Any) -> Any:
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise ValueError("must be a path")
    if value.startswith("~") or "$" in value:
        raise ValueError("must be written out: ~ and $VARIABLES are not replaced here")
    return Path(value)


def _pattern(value: str) -> str:
    try:
        groups = re.compile(value).groups
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"must be a regular expression ({error})") from None
    if groups != 1:
        raise ValueError(f"must have exactly one (group), around the answer, and has {groups}")
    return value


def _json(value: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
        msgspec.msgpack.encode(value)
    except ValueError:
        raise ValueError("must have finite numbers only") from None
    except OverflowError:
        raise ValueError("must have whole numbers of 64 bits only") from None
    return value


INT_MAX = 2**31 - 1  # what seeds and counts may be in every library below
SECONDS_MAX = 1e8  # three years; the clocks of some libraries overflow soon after
FLOAT_MAX = 3e38  # what torch's optimizer can make a float32 of

PositiveInt = Annotated[int, Field(gt=0, le=INT_MAX)]
NonNegativeInt = Annotated[int, Field(ge=0, le=INT_MAX)]
PositiveFloat = Annotated[float, Field(gt=0, le=FLOAT_MAX)]
AnyFloat = Annotated[float, Field(ge=-FLOAT_MAX, le=FLOAT_MAX)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=FLOAT_MAX)]
Seconds = Annotated[float, Field(gt=0, le=SECONDS_MAX)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Location = Annotated[Path, BeforeValidator(_location)]
JsonObject = Annotated[dict[str, Any], AfterValidator(_json)]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
Roles = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, min_length=1)]
AnswerPattern = Annotated[str, AfterValidator(_pattern)]


class Section(BaseModel):
    """Strict: `true` is no number, "10" is no integer, 2.0 is none either."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

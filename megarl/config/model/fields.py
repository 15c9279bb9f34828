"""Single fields of a config.json. A field that is null counts as left out, as in transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megarl.config.errors import RecipeError

Fields = dict[str, Any]


def count(config: Fields, name: str, default: int | None = None, *, least: int = 1, most: int = 2**62) -> int:
    """A whole number from `least` to `most`. Raises RecipeError: another value, or missing without a default."""
    expected = "a positive whole number" if least == 1 else f"a whole number of at least {least}"
    value = default if config.get(name) is None else config[name]
    if value is None:
        raise RecipeError(f"field {name!r} is missing; expected {expected}")
    if type(value) is not int or value < least:
        raise RecipeError(f"{name} is {value!r:.60}; expected {expected}")
    if value > most:
        raise RecipeError(f"{name} is {value!s:.60}; expected at most {most}")
    return value


def layer_count(config: Fields) -> int:
    """How many layers there are: few enough to be listed."""
    return count(config, "num_hidden_layers", most=100_000)


def number(config: Fields, name: str, default: float | None = None) -> float:
    """A positive number. Raises RecipeError: another value, or missing without a default."""
    value = default if config.get(name) is None else config[name]
    if value is None:
        raise RecipeError(f"field {name!r} is missing; expected a positive number")
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise RecipeError(f"{name} is {value!r:.60}; expected a positive number")
    return float(value)


def flag(config: Fields, name: str, default: bool = False) -> bool:
    """Raises RecipeError: neither true nor false."""
    value = default if config.get(name) is None else config[name]
    if not isinstance(value, bool):
        raise RecipeError(f"{name} is {value!r:.60}; expected true or false")
    return value


def section(config: Fields, name: str) -> Fields:
    """An object, empty if left out. Raises RecipeError: something else."""
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise RecipeError(f"{name} is {value!r:.60}; expected an object")
    return value


def layer_list(config: Fields, name: str, layers: int) -> list[int]:
    """Precision of layers, none if left out. Raises RecipeError: not a list of them."""
    value = config.get(name) or []
    if not isinstance(value, list) or not all(type(layer) is int and 0 <= layer < layers for layer in value):
        raise RecipeError(f"{name} is {value!r:.60}; expected a list of layers from 0 to {layers - 1}")
    return value


def windowed_layers(config: Fields, layers: int, default: Sequence[int]) -> tuple[int, ...]:
    """The layers that `layer_types` gives a sliding window. Raises RecipeError: not a list of one type a layer."""
    types = config.get("layer_types")
    if types is None:
        return tuple(default)
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or not all(kind in known for kind in types):
        raise RecipeError(f"layer_types is {types!r:.60}; expected a list of {layers}, each {' or '.join(known)}")
    return tuple(layer for layer, kind in enumerate(types) if kind == "sliding_attention")


def require(config: Fields, name: str, supported: Any) -> None:
    """Raise RecipeError if the file gives `name` a value that is not the one that is `supported`."""
    value = config.get(name)
    if value is None or value == supported:
        return
    shown = repr(value) if isinstance(value, str) else json.dumps(value)
    only = repr(supported) if isinstance(supported, str) else json.dumps(supported)
    raise RecipeError(f"{name} is {shown:.60}, which is not supported; only {only} is")

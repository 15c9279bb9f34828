"""What is wrong with a recipe, in its own words: pydantic's complaints as one line each.

Called by `load.py` with a complaint and the tree that was read.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from megarl.config.recipe import Recipe

_SECTION_EXPECTED = {"model_type", "model_attributes_type"}
_PLAIN_WORDS = {
    "a valid integer": "an integer",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "text (in quotes, if it looks like something else)",
    "a valid tuple": "a list",
    "a valid list": "a list",
    "a valid dictionary": "keys with values",
}
_SHORT_CHARACTERS = 60


def explain(problem: Any, tree: dict[str, Any]) -> tuple[tuple[Any, ...], str]:
    """The keys of one pydantic error, and a line: where it is, what is wrong, what was given."""
    keys, parent, annotation = _locate(problem["loc"])
    where, given = ".".join(map(str, keys)), _short(problem["input"])
    sections = _sections(annotation)
    match problem["type"]:
        case "extra_forbidden":
            return keys, f"{where}: unknown key{_suggest(keys, parent, tree)}"
        case "invalid_key":
            return keys, f"{where}: keys must be names, and this one is not text"
        case "missing":
            meaning = parent.model_fields[str(keys[-1])].description if parent else None
            return keys, f"{where}: this key is needed and missing" + (f" ({meaning.rstrip('.')})" if meaning else "")
        case "union_tag_not_found":
            tagged = f"{where}.type".lstrip(".")
            return keys, f"{tagged}: this key is needed and missing; one of {', '.join(sections)}"
        case "union_tag_invalid":
            given = _short(problem["input"]["type"])
            return keys, f"{where}.type: must be one of {', '.join(sections)}, got {given}".lstrip(".")
        case kind if kind in _SECTION_EXPECTED:
            names = dict.fromkeys(name for section in sections.values() for name in section.model_fields)
            types = f" and type one of {', '.join(sections)}" if len(sections) > 1 else ""
            return keys, f"{where}: must be a section with keys ({', '.join(names)}){types}, got {given}"
        case "value_error":
            return keys, f"{where}: {problem['ctx']['error']}, got {given}"
        case _:
            message = re.sub(r"^\w+ should ", "must ", problem["msg"].split(" after validation")[0])
            for stiff, plain in _PLAIN_WORDS.items():
                message = message.replace(stiff, plain)
            return keys, f"{where}: {message[0].lower()}{message[1:]}, got {given}"


def _locate(loc: tuple[Any, ...]) -> tuple[tuple[Any, ...], type[BaseModel] | None, Any]:
    """The user's keys without the tags that pydantic adds at a union, the last key's section and its annotation."""
    keys: list[Any] = []
    parent: type[BaseModel] | None = None
    annotation: Any = Recipe
    for part in loc:
        sections = _sections(annotation)
        if len(sections) > 1 and part in sections:
            annotation = sections[part]
            continue
        if part == "[key]":  # pydantic's mark for a key that is itself wrong
            continue
        keys.append(part)
        if typing.get_origin(annotation) is dict:
            annotation = typing.get_args(annotation)[1]
            continue
        parent = next(iter(sections.values()), None)
        field = parent.model_fields.get(str(part)) if parent else None
        annotation = field.annotation if field else None
    return tuple(keys), parent, annotation


def _sections(annotation: Any) -> dict[str, type[BaseModel]]:
    """The section classes that an annotation allows, by the value of their `type`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        tag = annotation.model_fields.get("type")
        return {typing.get_args(tag.annotation)[0] if tag else "": annotation}
    found: dict[str, type[BaseModel]] = {}
    for part in typing.get_args(annotation):
        found |= _sections(part)
    return found


def _suggest(keys: tuple[Any, ...], parent: type[BaseModel] | None, tree: dict[str, Any]) -> str:
    """What has that very key, or where it belongs, else the nearest one of its section, else all of them."""
    *above, unknown = map(str, keys)
    known = list(parent.model_fields) if parent else []
    stages = {tag: list(_paths(stage)) for tag, stage in _sections(Recipe).items()}
    mine = str(tree.get("type"))
    if owners := [tag for tag, paths in stages.items() if ".".join((*above, unknown)) in paths]:
        owner = f"another type of {'.'.join(above)}" if mine in owners else f"a recipe of type {owners[0]}"
        return f"; {owner} has it"
    near = [path for path in stages.get(mine, []) if path.endswith(f".{unknown}")]
    near = [path for path in near if path.count(".") == min(p.count(".") for p in near)]
    near = near or [".".join((*above, k)) for k in difflib.get_close_matches(unknown, known, n=1, cutoff=0.6)]
    return f"; did you mean {' or '.join(near)}?" if near else f"; known here are {', '.join(known)}"


def _paths(section: type[BaseModel]) -> Iterator[str]:
    """The dotted names of all keys below a section."""
    for name, field in section.model_fields.items():
        yield name
        prefix = f"{name}.NAME" if typing.get_origin(field.annotation) is dict else name
        for below in _sections(field.annotation).values():
            yield from (f"{prefix}.{path}" for path in _paths(below) if path != "type")


def _short(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= _SHORT_CHARACTERS else f"{text[: _SHORT_CHARACTERS - 3]}..."

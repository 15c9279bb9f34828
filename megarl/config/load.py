"""From a YAML file and `key.path=value` overrides to a validated recipe, and back to YAML.

Called by the entry points. All problems of a recipe are reported together, each on a line that starts with where it is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from megarl.config.errors import RecipeError
from megarl.config.explain import explain
from megarl.config.recipe import AnyRecipe, Recipe
from megarl.config.yaml12 import YamlError, read_yaml, write_yaml

_ADAPTER: TypeAdapter[AnyRecipe] = TypeAdapter(Recipe)
_PROBLEMS_SHOWN = 10


def load_recipe(path: Path, overrides: list[str]) -> AnyRecipe:
    """The recipe of file `path` with `overrides` such as "batch.prompts=16" applied in order.

    Raises RecipeError with every problem found: file, YAML, override syntax, unknown keys, wrong types and values.
    """
    tree = _read_tree(path)
    tree.setdefault("name", re.sub(r"[^A-Za-z0-9_.-]+", "_", path.stem).lstrip(".")[:200] or "run")
    return make_recipe(tree, overrides, named=str(path))


def make_recipe(tree: dict[str, Any], overrides: list[str], *, named: str) -> AnyRecipe:
    """The recipe of a tree of plain values, which is changed; `named` is what errors call it. Raises RecipeError."""
    sources = {}
    for override in overrides:
        sources[_apply(tree, override)] = f"override {override!r:.100}"
    for stage in get_args(get_args(Recipe)[0]):
        if get_args(stage.model_fields["type"].annotation)[0] == tree.get("type"):
            _default_types(tree, stage)
    try:
        return _ADAPTER.validate_python(tree)
    except ValidationError as error:
        found = error.errors()
    # a list is also called too short if what is in it is wrong
    inner = {problem["loc"][:-1] for problem in found}
    problems = [explain(one, tree) for one in found if one["type"] != "too_short" or one["loc"] not in inner]
    lines = [f"{_source(keys, sources) or named}: {line}" for keys, line in problems]
    if len(lines) > _PROBLEMS_SHOWN:
        lines[_PROBLEMS_SHOWN:] = [f"and {len(lines) - _PROBLEMS_SHOWN} more problems"]
    raise RecipeError("\n".join(lines))


def _default_types(tree: dict[str, Any], section: type[BaseModel]) -> None:
    """Where a choice has keys but no type, it is the default's."""
    for name, field in section.model_fields.items():
        below, kind = tree.get(name), field.annotation
        if not isinstance(below, dict):
            continue
        if isinstance(field.default, BaseModel):
            kind = type(field.default)
            if "type" in kind.model_fields:
                below.setdefault("type", kind.model_fields["type"].default)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            _default_types(below, kind)


def dump_recipe(recipe: AnyRecipe) -> str:
    """The fully resolved recipe as YAML; loading it gives the same recipe."""
    return write_yaml(recipe.model_dump(mode="json"))


def _read_tree(path: Path) -> dict[str, Any]:
    try:
        tree = read_yaml(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise RecipeError(f"{path}: cannot read the recipe: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: the recipe is not UTF-8 text (byte {error.start + 1}); save it as UTF-8") from None
    except YamlError as error:
        raise RecipeError(f"{path}: not YAML: {error}") from None
    if tree is None:
        raise RecipeError(f"{path}: the recipe is empty; expected keys and values, such as type: sft")
    if not isinstance(tree, dict):
        kind = "a list" if isinstance(tree, list) else f"the value {tree!r:.60}"
        raise RecipeError(f"{path}: expected keys and values, such as type: sft, and found {kind}")
    return tree


def _apply(tree: dict[str, Any], override: str) -> tuple[str, ...]:
    """Put the override's value into the tree; sections that are missing are made. Returns its keys."""
    key, equals, text = override.partition("=")
    keys = tuple(key.split("."))
    if not equals or not all(part.strip() for part in keys):
        raise RecipeError(f"override {override!r:.100}: expected key.path=value, such as batch.prompts=16")
    section: Any = tree
    for depth, part in enumerate(keys[:-1], start=1):
        if section.get(part) is None:  # missing, or a section with nothing in it
            section[part] = {}
        section = section[part]
        if not isinstance(section, dict):
            name = ".".join(keys[:depth])
            raise RecipeError(
                f"override {override!r:.100}: {name} is {section!r:.60} and has no keys; set it as a whole"
            )
    try:
        section[keys[-1]] = read_yaml(text)
    except YamlError as error:
        raise RecipeError(f"override {override!r:.100}: the value is not YAML: {error}; try quotes around it") from None
    return keys


def _source(keys: tuple[Any, ...], sources: dict[tuple[str, ...], str]) -> str | None:
    """The last override that set a value at `keys`, above or below, if one did."""
    touching = [text for given, text in sources.items() if given == keys[: len(given)] or keys == given[: len(keys)]]
    return touching[-1] if touching else None

"""From a YAML file and `key.path=value` overrides to a validated recipe, and back to YAML.

Called by the entry points. All problems of a recipe are reported together, each on a line that starts with its key.
"""

from __future__ import annotations

import difflib
import re
import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from megarl.config.errors import RecipeError
from megarl.config.recipe import Recipe, RlRecipe, SftRecipe

_ADAPTER: TypeAdapter[SftRecipe | RlRecipe] = TypeAdapter(Recipe)
_STAGES = {"sft": SftRecipe, "rl": RlRecipe}


class _Loader(yaml.SafeLoader):
    """YAML 1.2's floats: PyYAML reads 1e-4 as text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def load_recipe(path: Path, overrides: list[str]) -> SftRecipe | RlRecipe:
    """The recipe of file `path` with `overrides` such as "batch.prompts=16" applied in order.

    Raises RecipeError with every problem found: file, YAML, override syntax, unknown keys, wrong types and values.
    """
    tree = _read_yaml(path)
    for override in overrides:
        _apply(tree, override)
    tree.setdefault("name", path.stem)
    try:
        return _ADAPTER.validate_python(tree)
    except ValidationError as error:
        lines = [_explain(problem, tree) for problem in error.errors()]
        raise RecipeError("\n".join(f"{path}: {line}" for line in lines)) from None


def dump_recipe(recipe: SftRecipe | RlRecipe) -> str:
    """The fully resolved recipe as YAML; loading it gives the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(), _Loader)
    except OSError as error:
        raise RecipeError(f"{path}: cannot read the recipe: {error.strerror}") from None
    except UnicodeDecodeError:
        raise RecipeError(f"{path}: the recipe is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        raise RecipeError(f"{path}:{where} not YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(tree, dict):
        raise RecipeError(f"{path}: a recipe is a mapping of keys to values, got {type(tree).__name__}")
    return tree


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"override {override!r}: expected key.path=value, such as batch.prompts=16")
    *parents, last = key.split(".")
    for parent in parents:
        child = tree.setdefault(parent, {})
        if not isinstance(child, dict):
            raise RecipeError(f"override {override!r}: {parent} is a value, it has no keys below it")
        tree = child
    try:
        tree[last] = yaml.load(text, _Loader)
    except yaml.YAMLError:
        raise RecipeError(f"override {override!r}: the value is not YAML") from None


def _explain(problem: Any, tree: dict[str, Any]) -> str:
    """One line for one pydantic error: the key, what is wrong, what was given."""
    # pydantic puts the chosen tag of each union into the location; the user's keys are what exists in the file
    keys, node = [], tree
    union_tags = {"sft", "rl", "constant", "cosine", "exact_match", "math_verify"}
    for part in problem["loc"]:
        if part in union_tags and not (isinstance(node, dict) and part in node):
            continue
        keys.append(part)
        node = node.get(part) if isinstance(node, dict) else None
    where = ".".join(map(str, keys)) or "type"
    match problem["type"]:
        case "extra_forbidden":
            return f"{where}: unknown key{_suggest(keys, tree)}"
        case "missing":
            return f"{where}: this key is needed and missing"
        case "union_tag_not_found":
            return f"{_join(where, 'type')}: this key is needed and missing; one of {problem['ctx']['discriminator']}"
        case "union_tag_invalid":
            given, known = problem["ctx"]["tag"], problem["ctx"]["expected_tags"]
            return f"{_join(where, 'type')}: unknown value {given!r}; one of {known}"
        case _:
            message = problem["msg"][0].lower() + problem["msg"][1:]
            return f"{where}: {message}, got {problem['input']!r}"


def _join(where: str, key: str) -> str:
    return where if where.split(".")[-1] == key else f"{where}.{key}"


def _suggest(keys: list[Any], tree: dict[str, Any]) -> str:
    """The nearest known key of the section that holds the unknown one, and the section's keys if none is near."""
    section: Any = _STAGES.get(tree.get("type", ""), SftRecipe)
    node: Any = tree
    for key in keys[:-1]:
        node = node[key]
        section = _section(section.model_fields[key].annotation, node)
    known = list(section.model_fields)
    near = difflib.get_close_matches(str(keys[-1]), known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known here are {', '.join(known)}"


def _section(annotation: Any, node: Any) -> type[BaseModel]:
    """The section class of a field: itself, or the member of its union that the given `type` selects."""
    members = [a for a in (typing.get_args(annotation) or (annotation,)) if a is not type(None)]
    tag = node.get("type") if isinstance(node, dict) else None
    for member in members:
        field = member.model_fields.get("type")
        if field is not None and tag in typing.get_args(field.annotation):
            return member
    return members[0]

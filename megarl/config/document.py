"""The page of all recipe keys, made from the fields themselves: python -m megarl.config.document > docs/recipes.md."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from megarl.config.recipe import RewardModelRecipe, RlRecipe, SftRecipe

_HEAD = """# Recipes

A recipe is a YAML file; `key.path=value` on the command line replaces or adds a value, in order, and the value is YAML
too: `steps=10`, `optimizer.schedule.type=cosine`, `'optimizer.betas=[0.9, 0.98]'`. Examples are in `launch/recipes/`.

`bash launch/local.sh -n RANKS RECIPE --dry-run` checks a recipe, the model's directory and the data, and prints the
recipe with every default filled in and what each rank would do. The same checks run before every job: unknown keys
(with the nearest known one), types and ranges, what the layout must divide (ranks, heads, key-value heads, MLP width,
layers), batches, free positions for the responses, each row of the data. The resolved recipe is kept as
`recipe.yaml` in the run directory.

The three kinds of recipe follow; `python -m megarl.config.document > docs/recipes.md` makes this page from the code.
"""


def document() -> str:
    """The whole page."""
    parts = [_HEAD]
    titles = [
        (SftRecipe, "Supervised fine-tuning"),
        (RewardModelRecipe, "Reward model"),
        (RlRecipe, "Reinforcement learning"),
    ]
    for recipe, title in titles:
        parts.append(
            f"## {title}\n\n| key | default | meaning |\n|---|---|---|\n" + "\n".join(_rows(recipe, "")) + "\n"
        )
    return "\n".join(parts)


def _rows(section: Any, prefix: str) -> Iterator[str]:
    for name, field in sorted(section.model_fields.items(), key=lambda item: item[0] != "type"):
        key, annotation = f"{prefix}{name}", field.annotation
        named = typing.get_origin(annotation) is dict and typing.get_args(annotation)[1] is not Any
        members = _members(typing.get_args(annotation)[1] if named else annotation)
        sections = [a for a in members if isinstance(a, type) and issubclass(a, BaseModel)]
        default = "needed" if field.is_required() else _text(field.get_default(call_default_factory=True))
        yield f"| `{key}` | {'' if sections else default} | {_meaning(field)} |"
        for member in sections:
            yield from _rows(member, f"{key}.NAME." if named else f"{key}.")


def _meaning(field: Any) -> str:
    choice = [f"`{value}`" for value in typing.get_args(field.annotation) if isinstance(value, str)]
    return " or ".join(choice) + (": " if choice else "") + (field.description or "").replace("|", "\\|")


def _members(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return typing.get_args(annotation)
    return (annotation,)


def _text(value: Any) -> str:
    if value is None or value is PydanticUndefined:
        return "none"
    text = (
        str(value) if isinstance(value, str | Path) else repr(value).lower() if isinstance(value, bool) else repr(value)
    )
    return f"`{text}`".replace("|", "\\|")


if __name__ == "__main__":
    print(document(), end="")

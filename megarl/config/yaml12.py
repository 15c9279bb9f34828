"""YAML 1.2's core schema through PyYAML, which by itself reads 1.1.

There `1e-4` is text, `no` is false, `12:30` is 750, `010` is 8, and of two equal keys the first is lost in silence.
Used by `load.py` alone.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import yaml

_SCALARS = [
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    (
        "float",
        r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
]
_PREFIX = "tag:yaml.org,2002:"
_KINDS = ("null", "bool", "int", "float", "str")


class YamlError(ValueError):
    """One line: where the text stops being YAML, and why."""


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    yaml_constructors = {tag: yaml.SafeLoader.yaml_constructors[tag] for tag in (*(_PREFIX + k for k in _KINDS), None)}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # a list or a mapping as a key is refused below
            line = key.start_mark.line + 1
            if key.value in seen:
                problem = f"the key {key.value!r} stands here and in line {seen[key.value]}; keep one of them"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen[key.value] = line
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what either version would not read as text; never writes anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # only double quotes keep line breaks and control characters as they are
    return dumper.represent_scalar(_PREFIX + "str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _write_text)
# at once, where PyYAML would first make an empty list: so that nothing can contain itself
_Loader.add_constructor(_PREFIX + "seq", partial(_Loader.construct_sequence, deep=True))
_Loader.add_constructor(_PREFIX + "map", partial(_Loader.construct_mapping, deep=True))
for _kind, _form, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_PREFIX + _kind, re.compile(f"^(?:{_form})$"), list(_first))


def read_yaml(text: str) -> Any:
    """The value of a text of one document. Raises YamlError."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        problem = error.problem or error.context or "cannot be read"
        if "'\\t'" in problem:
            problem += " (indent with spaces, not tabs)"
        mark = error.problem_mark
        raise YamlError(f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else problem) from None
    except yaml.reader.ReaderError as error:
        raise YamlError(f"character {error.position + 1}: {error.reason}") from None
    except RecursionError:
        raise YamlError("too deeply nested") from None
    except (ValueError, KeyError):
        raise YamlError("a number that is too long, or a value that is not what its !!tag says") from None


def write_yaml(value: Any) -> str:
    """The text of one document, keys in their order; `read_yaml` gives `value` back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)

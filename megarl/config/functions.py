"""Functions of the user's own that a recipe names."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any


def load_function(name: str, arguments: int, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The function at `module:function`, which will be called with so many `arguments`, and `options` by name.

    Raises ValueError saying what is wrong with it.
    """
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:  # a module is a program, and may raise anything
        raise ValueError(
            f"{name!r} cannot be loaded: {type(error).__name__}: {error}; is its directory on PYTHONPATH?"
        ) from error
    if not callable(found):
        raise ValueError(f"{name!r} is not a function")
    try:
        inspect.signature(found).bind(*[None] * arguments, **options)
    except TypeError as error:
        given = "".join(f", {option}" for option in options)
        raise ValueError(
            f"{name!r} cannot be called as it will be: {error}; expected a function of {arguments} argument"
            f"{'s' * (arguments > 1)}{given and f' and by name{given[1:]}'}"
        ) from error
    except ValueError:  # some functions that are not written in Python do not tell
        pass
    return found

"""Algorithms by name. A recipe's `module:function` names one of the user's own, which takes the same arguments."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from megarl.algorithms import advantages, losses

ADVANTAGES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        advantages.grpo,
        advantages.dr_grpo,
        advantages.rloo,
        advantages.opo,
        advantages.remax,
        advantages.pass_at_k,
        advantages.reinforce_plus_plus,
        advantages.gae,
    )
}
LOSSES: dict[str, Callable[..., losses.Loss]] = {
    function.__name__: function
    for function in (losses.ppo, losses.gspo, losses.gmpo, losses.cispo, losses.sapo, losses.policy_gradient)
}


def find(name: str, known: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """A known function, or the one at `module:function`. Raises ValueError saying what is wrong with `name`."""
    if name in known:
        return known[name]
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(f"{name!r} is not known; known are {', '.join(known)}, or your own as module:function")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r} cannot be loaded: {error}; is its directory on PYTHONPATH?") from error
    if not callable(found):
        raise ValueError(f"{name!r} is not a function")
    return found

"""Algorithms by name."""

from __future__ import annotations

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

"""Rotary positions in a config.json.

transformers 5 keeps all settings in rope_parameters; older files have rope_theta, rope_scaling, partial_rotary_factor.
"""

from __future__ import annotations

import math
from typing import Any

from megarl.config.errors import RecipeError
from megarl.config.model.fields import Fields, count, flag, number, section
from megarl.config.model.types import LinearScaling, Llama3Scaling, Rope, RopeScaling, YarnScaling

DEFAULT_THETA = 10_000.0  # what transformers takes for most families when a file names none
KINDS = ("default", "linear", "llama3", "yarn")
MEGATRON_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_rope(config: Fields, *, theta: float = DEFAULT_THETA, fraction: float = 1.0) -> Rope:
    """The one rope of all layers; `theta` and `fraction` are the family's where the file has none.

    Raises RecipeError: a type or a value that is not supported.
    """
    older, newer = section(config, "rope_scaling"), section(config, "rope_parameters")
    if older and newer and older != newer:
        raise RecipeError("rope_scaling and rope_parameters are both given and differ; keep the one that is meant")
    return rope_of(config, older or newer, theta, fraction)


def rope_of(config: Fields, settings: Fields, theta: float, fraction: float = 1.0) -> Rope:
    """The rope of `settings`; what is not there is looked for in `config` itself."""
    merged = {"rope_theta": config.get("rope_theta"), "partial_rotary_factor": config.get("partial_rotary_factor")}
    merged |= {name: value for name, value in settings.items() if value is not None}
    rope = Rope(
        theta=number(merged, "rope_theta", theta),
        fraction=number(merged, "partial_rotary_factor", fraction),
        scaling=_scaling(config, settings),
    )
    if rope.theta <= 1:
        raise RecipeError(f"rope_theta is {rope.theta:g}; expected more than 1")
    # transformers heeds it in families alone that rotate a part of each head by default
    whole = fraction == 1 or isinstance(rope.scaling, YarnScaling)
    if rope.fraction > 1 or (whole and rope.fraction < 1):
        only = "only 1 is with this architecture or rope type" if whole else "expected at most 1"
        raise RecipeError(f"partial_rotary_factor is {rope.fraction:g}, which is not supported; {only}")
    return rope


def _scaling(config: Fields, settings: Fields) -> RopeScaling | None:
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in KINDS:
        known = ", ".join(map(repr, KINDS[:-1]))
        raise RecipeError(f"rope type {kind!r:.60} is not supported; only {known} and {KINDS[-1]!r} are")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(number(settings, "factor"))
    own = settings.get("original_max_position_embeddings")
    positions: dict[str, Any] = config if own is None else settings
    before = count(positions, "max_position_embeddings" if own is None else "original_max_position_embeddings")
    if kind == "yarn":
        return _yarn(settings, before)
    llama3 = Llama3Scaling(
        factor=number(settings, "factor"),
        low_frequency=number(settings, "low_freq_factor"),
        high_frequency=number(settings, "high_freq_factor"),
        original_positions=before,
    )
    found = (llama3.low_frequency, llama3.high_frequency, before)
    if found != tuple(MEGATRON_LLAMA3.values()):
        names = ", ".join(MEGATRON_LLAMA3)
        raise RecipeError(f"rope type 'llama3' with {names} = {found} is not supported; only (1, 4, 8192) is")
    return llama3


def _yarn(settings: Fields, before: int) -> YarnScaling:
    factor = number(settings, "factor")
    if factor <= 1:
        raise RecipeError(f"rope type 'yarn' with factor {factor:g} is not supported; expected more than 1")
    # transformers: mscale counts only together with mscale_all_dim, and 0 is as good as none
    both = settings.get("mscale") and settings.get("mscale_all_dim")
    all_dim = number(settings, "mscale_all_dim") if settings.get("mscale_all_dim") else 0.0
    attention = yarn_gain(factor, number(settings, "mscale")) / yarn_gain(factor, all_dim) if both else None
    return YarnScaling(
        factor=factor,
        original_positions=before,
        attention_factor=number(settings, "attention_factor", attention or yarn_gain(factor, 1.0)),
        beta_fast=number(settings, "beta_fast", 32.0),
        beta_slow=number(settings, "beta_slow", 1.0),
        mscale_all_dim=all_dim,
        truncate=flag(settings, "truncate", True),
    )


def yarn_gain(factor: float, mscale: float) -> float:
    """By what sines and cosines grow with the context (YaRN, equation 22, with DeepSeek's `mscale`)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

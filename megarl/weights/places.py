"""What a directory is: of Hugging Face, a Megatron checkpoint, or a training run with its checkpoints."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megarl.config import HeadName, RecipeError
from megarl.weights.dcp import CONFIG
from megarl.weights.dcp_metadata import METADATA
from megarl.weights.sources import HfSource, MegatronSource, Source


@dataclass(frozen=True)
class Place:
    """Where the weights lie, where the config.json of a Megatron checkpoint, and its step and layout if a run saved it.

    `head` is that of the weights where `config` may be of the model that they started from; None: the one of `config`.
    """

    weights: Path
    config: Path
    megatron: bool
    step: int | None = None
    head: HeadName | None = None
    layout: Mapping[str, Any] = field(default_factory=dict)


def find_place(directory: Path, config: Path | None = None) -> Place:
    """The checkpoint that `directory` is, or the newest one of the run that it is.

    `config` is the Hugging Face directory of the model, for a checkpoint that has no config.json with it. Raises
    RecipeError: nothing of the kind.
    """
    if not directory.is_dir():
        kind = "a file" if directory.exists() else "not there"
        raise RecipeError(f"{directory} is {kind}; expected a directory of Hugging Face, of Megatron, or of a run")
    weights = _newest_step(directory) if (directory / "checkpoints").is_dir() else directory
    if not ((weights / CONFIG).exists() or (weights / METADATA).exists()):
        return _hugging_face(directory)
    of_critic = weights.name == _CRITIC and (weights.parent / _STATE).exists()
    saved = weights.parent if of_critic else weights
    step, head = _step(saved), None
    layout: Mapping[str, Any] = {}
    if step is not None:
        run = saved.parent.parent
        recipe = _recipe(run)
        head = _head(recipe, of_critic)
        layout = (recipe.get("layout") if isinstance(recipe, dict) else None) or {}
        config = config or _config_of_run(run, recipe, of_critic)
    config = config or weights
    if not (config / "config.json").exists():
        raise RecipeError(f"{config} has no config.json; give the model's Hugging Face directory with --config")
    return Place(weights, config, megatron=True, step=step, head=head, layout=layout)


def open_source(directory: Path, config: Path | None = None) -> Source:
    """The checkpoint in `directory`; see find_place. Raises RecipeError: none, or one that cannot be converted."""
    return open_place(find_place(directory, config))


def open_place(place: Place) -> Source:
    """The checkpoint there. Raises RecipeError: one that cannot be converted."""
    return MegatronSource(place.weights, place.config, place.head) if place.megatron else HfSource(place.weights)


def _hugging_face(directory: Path) -> Place:
    if (directory / "config.json").exists():
        return Place(directory, directory, megatron=False)
    result = directory / "hf"
    found = f"it is a run that left no checkpoint; give {result}" if (result / "config.json").exists() else ""
    raise RecipeError(
        f"{directory} has neither config.json, as a Hugging Face directory, nor {CONFIG} or {METADATA}, as a Megatron"
        f" checkpoint, nor checkpoints/, as a run; {found or 'give one of these, or RUN/checkpoints/step_N'}"
    )


def _newest_step(run: Path) -> Path:
    found = [(int(match[1]), path) for path in (run / "checkpoints").iterdir() if (match := _STEP.fullmatch(path.name))]
    if not found:
        raise RecipeError(f"{run} is a run without a checkpoint; its weights may be in {run / 'hf'}")
    return max(found)[1]


_STEP = re.compile(r"step_(\d+)")
_STATE = "run_state.json"
_CRITIC = "critic"  # in a step's directory: the critic's checkpoint


def _step(checkpoint: Path) -> int | None:
    try:
        return int(json.loads((checkpoint / _STATE).read_text())["step"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecipeError(f"{checkpoint / _STATE}: cannot read: {error!r:.80}") from None


def _recipe(run: Path) -> Any:
    """What the run's recipe.yaml says; None if it is not there."""
    with suppress(OSError, yaml.YAMLError):
        return yaml.safe_load((run / "recipe.yaml").read_text())
    return None


def _head(recipe: Any, of_critic: bool) -> HeadName | None:
    if of_critic:
        return "critic"
    return "reward" if isinstance(recipe, dict) and recipe.get("type") == "reward_model" else None


def _config_of_run(run: Path, recipe: Any, of_critic: bool) -> Path:
    """The directory that the run's model or critic started from, or what the run itself wrote at its end."""
    given: Any = None
    with suppress(KeyError, TypeError):
        given = (recipe["critic"] if of_critic else recipe)["model"]["path"]
    written = [] if of_critic else [run / "hf"]
    for directory in ([Path(str(given))] if given else []) + written:
        if (directory / "config.json").exists():
            return directory
    what = "critic" if of_critic else "model"
    found = f"names the {what} {given}, which is not there" if given else f"names no {what}, or is not there"
    raise RecipeError(f"{run}/recipe.yaml {found}; give the {what}'s Hugging Face directory with --config")

"""What a directory is: of Hugging Face, a Megatron checkpoint, or a training run with its checkpoints."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megarl.config import RecipeError
from megarl.weights.dcp import CONFIG
from megarl.weights.dcp_metadata import METADATA
from megarl.weights.sources import HfSource, MegatronSource, Source


@dataclass(frozen=True)
class Place:
    """Where the weights lie, where the config.json of a Megatron checkpoint, and its step if a run saved it."""

    weights: Path
    config: Path
    megatron: bool
    step: int | None = None


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
        return Place(weights, weights, megatron=False)
    step = _step(weights)
    if config is None:
        config = weights if step is None else _config_of_run(weights.parent.parent)
    if not (config / "config.json").exists():
        raise RecipeError(f"{config} has no config.json; give the model's Hugging Face directory with --config")
    return Place(weights, config, megatron=True, step=step)


def open_source(directory: Path, config: Path | None = None) -> Source:
    """The checkpoint in `directory`; see find_place. Raises RecipeError: none, or one that cannot be converted."""
    place = find_place(directory, config)
    return MegatronSource(place.weights, place.config) if place.megatron else HfSource(place.weights)


def _newest_step(run: Path) -> Path:
    found = [(int(match[1]), path) for path in (run / "checkpoints").iterdir() if (match := _STEP.fullmatch(path.name))]
    if not found:
        raise RecipeError(f"{run} is a run without a checkpoint; its weights may be in {run / 'hf'}")
    return max(found)[1]


_STEP = re.compile(r"step_(\d+)")


def _step(checkpoint: Path) -> int | None:
    try:
        return int(json.loads((checkpoint / "run_state.json").read_text())["step"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecipeError(f"{checkpoint / 'run_state.json'}: cannot read: {error!r:.80}") from None


def _config_of_run(run: Path) -> Path:
    """The directory that the run's recipe started from, or what the run itself wrote at its end."""
    given: Any = None
    with suppress(OSError, yaml.YAMLError, KeyError, TypeError):
        given = yaml.safe_load((run / "recipe.yaml").read_text())["model"]["path"]
    for directory in ([Path(str(given))] if given else []) + [run / "hf"]:
        if (directory / "config.json").exists():
            return directory
    raise RecipeError(
        f"{run}/recipe.yaml names the model {given}, which is not there; give the model's Hugging Face directory with"
        " --config"
    )

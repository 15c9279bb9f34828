"""A run's directory and its checkpoints: what makes a run resumable.

A checkpoint is written aside, then its run state as the last file, then renamed: it exists whole or not at all.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TextIO

import msgspec

from megarl.config import AnyRecipe, RecipeError, dump_recipe
from megarl.observe import METRICS_FILE
from megarl.runtime import FAILURE_FILE, LOGGER, ControlPlane

_STATE_FILE = "run_state.json"
_LOCK_FILE = "lock"
_ENDING_JOB_S = 20.0  # a killed job's last process may live this long
_STEP_DIRECTORY = re.compile(r"step_(\d+)")


@dataclass(frozen=True)
class RunState:
    """Where a run stands; its prompts follow from `step`. `files` are the sizes of what must lie beside it."""

    step: int
    updates: int
    type: str
    critic_updates: int = 0
    kl_coefficient: float | None = None
    files: dict[str, int] = field(default_factory=dict)


class RunDirectory:
    """The paths of a run. Only rank 0 writes; all ranks read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.model = path / "hf"
        self._lock: TextIO | None = None

    def check(self, kind: str, *, resume: bool) -> None:
        """Raise RecipeError: the directory holds a run already and is not to be resumed, or the other way round.

        `kind` is the recipe's type, which a resumed run cannot change.
        """
        used = (self.path / METRICS_FILE).exists()
        if used and not resume:
            raise RecipeError(f"run_dir: {self.path} holds a run; --resume continues it, or give another run_dir")
        if resume and not used:
            raise RecipeError(f"--resume: {self.path} holds no run; leave --resume out, or give the run's run_dir")
        newest = self.newest_checkpoint() if resume else None
        if newest and newest[1].type != kind:
            raise RecipeError(
                f"--resume: {self.path} holds a run of type {newest[1].type}, the recipe is of type {kind}"
            )

    def prepare(self, recipe: AnyRecipe) -> None:
        """Make the directory, with the fully resolved recipe in it and without what an earlier start left unfinished.

        Raises RecipeError: another job is using it.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / _LOCK_FILE).open("a")  # held until this process ends
        try:
            _lock(self._lock)
        except BlockingIOError:
            raise RecipeError(f"run_dir: another job is using {self.path}; end it or give another run_dir") from None
        except OSError as error:  # some shared file systems have no locks
            LOGGER.warning("%s cannot be locked (%s): make sure that no other job uses it", self.path, error.strerror)
        (self.path / FAILURE_FILE).unlink(missing_ok=True)
        for path in self._entries():
            if path.suffix == ".partial":
                shutil.rmtree(path)
        (self.path / "recipe.yaml").write_text(dump_recipe(recipe))

    def newest_checkpoint(self) -> tuple[Path, RunState] | None:
        """The newest whole checkpoint; one with missing or short files is passed over."""
        found = [(int(match[1]), path) for path in self._entries() if (match := _STEP_DIRECTORY.fullmatch(path.name))]
        for _, path in sorted(found, reverse=True):
            try:
                state = msgspec.json.decode((path / _STATE_FILE).read_bytes(), type=RunState)
                if state.files == _sizes(path):
                    return path, state
            except (OSError, msgspec.DecodeError):
                pass
            LOGGER.warning("%s is not whole and is passed over", path)
        return None

    def save_checkpoint(self, control: ControlPlane, write: Callable[[Path], None], state: RunState) -> Path:
        """Have all ranks `write` into a new directory and make it the checkpoint of `state`."""
        final = self.checkpoints / f"step_{state.step:06d}"
        aside = final.with_suffix(".partial")
        if control.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        control.barrier("checkpoint directory")
        write(aside)
        control.barrier("checkpoint files")
        if control.rank == 0:
            whole = replace(state, files=_sizes(aside))
            (aside / _STATE_FILE).write_text(json.dumps(asdict(whole), indent=2) + "\n")
            shutil.rmtree(final, ignore_errors=True)
            aside.rename(final)
        control.barrier("checkpoint")
        return final

    def _entries(self) -> list[Path]:
        return list(self.checkpoints.iterdir()) if self.checkpoints.is_dir() else []


def _lock(file: TextIO) -> None:
    """Lock `file` for this process, waiting for a job that is just ending. Raises BlockingIOError if it does not."""
    end = time.monotonic() + _ENDING_JOB_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def _sizes(directory: Path) -> dict[str, int]:
    files = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != _STATE_FILE)
    return {str(path.relative_to(directory)): path.stat().st_size for path in files}

"""Directories that appear whole: everything is written to TARGET.partial, which at the very end is renamed.

A conversion is done in units. What is finished is noted in the partial directory, after the data is on disk, so that
the next conversion of the same source goes on from there.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, TextIO

from megarl.config import RecipeError

_NOTES = ".convert"
"""Where in the partial directory the notes lie: the job, the lock, and a file for each finished unit."""
_ENDING_S = 3.0  # a killed conversion's last worker may live this long


class Staging:
    """The partial directory of `target`, held by this process until it ends or `publish` returns."""

    def __init__(self, target: Path, job: dict[str, Any], *, overwrite: bool) -> None:
        """`job` says all that decides what will be written; only what was begun with the same is gone on with.

        Raises RecipeError: `target` exists and is not to be overwritten, cannot be written, or is being written.
        """
        if not target.name:
            raise RecipeError(f"{target} cannot be written; give another directory")
        self.target, self.path = target, target.with_name(target.name + ".partial")
        self._notes = self.path / _NOTES
        try:
            _check_target(target, overwrite)
            self._notes.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self._notes / "lock", self.path)
            _check_target(target, overwrite)  # another process may have just made it
            self.restarted = self._prepare(json.loads(json.dumps(job)))
        except OSError as error:
            raise RecipeError(f"{self.path} cannot be written: {error.strerror}; give another directory") from None

    def finished(self) -> dict[int, Any]:
        """The units that need not be done again, with what was noted of them."""
        return {int(file.stem): json.loads(file.read_text()) for file in self._notes.glob("[0-9]*.json")}

    def note(self, unit: int, result: Any) -> None:
        """Note that `unit` is finished; its data is on disk already. Any process may call this."""
        _write_whole(self._notes / f"{unit:06d}.json", json.dumps(result))

    def publish(self) -> None:
        """Make the partial directory the target."""
        publish(self.path, self.target)
        self._lock.close()

    def _prepare(self, job: dict[str, Any]) -> bool:
        """Whether there was something of another job, which is gone now."""
        note = self._notes / "job.json"
        try:
            if json.loads(note.read_text()) == job:
                return False
        except (OSError, ValueError):
            pass
        old = [path for path in self.path.iterdir() if path != self._notes]
        old += [path for path in self._notes.iterdir() if path.name != "lock"]
        for path in old:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        _write_whole(note, json.dumps(job))
        return bool(old)


def publish(aside: Path, target: Path) -> None:
    """Give the finished directory `aside` the name `target`, once all of it is on disk; an older `target` goes."""
    for path in [*aside.rglob("*"), aside, aside.parent]:
        _sync(path)
    old = target.with_name(target.name + ".replaced")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    aside.rename(target)
    # not before: without the lock another process would begin in this directory, and a failure would cost all
    shutil.rmtree(target / _NOTES, ignore_errors=True)
    _sync(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _check_target(target: Path, overwrite: bool) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise RecipeError(f"{target} is a file or a link, which is not replaced; give another directory")
    if target.exists() and not overwrite:
        raise RecipeError(f"{target} exists; give another directory, or --overwrite to replace it")


def _lock(file: Path, directory: Path) -> TextIO:
    """Lock `directory` by a file in it."""
    lock, end = file.open("a"), time.monotonic() + _ENDING_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < end:
                time.sleep(0.05)
                continue
            raise RecipeError(f"another process is writing {directory}; wait for it, or end it") from None
        except OSError:  # some shared file systems have no locks
            return lock
        if not file.exists():  # the process that held it has just renamed the directory
            raise RecipeError(f"another process has just finished {directory}; look at its result")
        return lock


def _write_whole(file: Path, text: str) -> None:
    aside = file.with_suffix(".aside")
    with aside.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    aside.rename(file)
    _sync(file.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Checkpoint directories: the newest whole one is found, and a torn one is never taken for whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config import RecipeError
from megarl.observe import METRICS_FILE
from megarl.runtime import ControlPlane, RankInfo, connect
from megarl.trainer.run_state import RunDirectory, RunState


@pytest.fixture(scope="module")
def alone() -> ControlPlane:
    return connect(RankInfo(rank=0, world=1, local_rank=0, ranks_per_node=1, control="tcp"), deadline_s=10)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def write(directory: Path, text: str = "weights") -> None:
    (directory / "model").mkdir()
    (directory / "model" / "shard").write_text(text)
    (directory / "optimizer").write_text("moments")


def save(run: RunDirectory, control: ControlPlane, step: int, text: str = "weights") -> Path:
    return run.save_checkpoint(control, lambda d: write(d, text), RunState(step, 2 * step, "rl"))


def truncate(checkpoint: Path) -> None:
    (checkpoint / "model" / "shard").write_text("weig")


def lose(checkpoint: Path) -> None:
    (checkpoint / "optimizer").unlink()


def add(checkpoint: Path) -> None:
    (checkpoint / "model" / "shard2").write_text("of another save")


def lose_state(checkpoint: Path) -> None:
    (checkpoint / "run_state.json").unlink()


def tear_state(checkpoint: Path) -> None:
    state = checkpoint / "run_state.json"
    state.write_text(state.read_text()[:30])


def empty_state(checkpoint: Path) -> None:
    (checkpoint / "run_state.json").write_text("{}")


def list_state(checkpoint: Path) -> None:
    (checkpoint / "run_state.json").write_text("[]")


def other_state(checkpoint: Path) -> None:
    (checkpoint / "run_state.json").write_text('{"steps": 3}')


def rename(checkpoint: Path) -> None:
    checkpoint.rename(checkpoint.with_suffix(".partial"))


def test_a_run_without_checkpoints_has_none(run: RunDirectory) -> None:
    assert run.newest_checkpoint() is None
    run.checkpoints.mkdir(parents=True)
    assert run.newest_checkpoint() is None


def test_what_was_saved_is_found(run: RunDirectory, alone: ControlPlane) -> None:
    saved = save(run, alone, 3)
    state = RunState(step=3, updates=6, type="rl", files={"model/shard": 7, "optimizer": 7})
    assert run.newest_checkpoint() == (saved, state)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step_000003"]


def test_the_newest_is_the_one_of_the_highest_step(run: RunDirectory, alone: ControlPlane) -> None:
    """By number: step 1000000 has one digit more than the names are padded to."""
    for step in (1_000_000, 9, 20):
        save(run, alone, step)
    (run.checkpoints / "notes.txt").write_text("step_9999999")
    (run.checkpoints / "step_2000000.old").mkdir()
    found = run.newest_checkpoint()
    assert found is not None
    assert found[1].step == 1_000_000


@pytest.mark.parametrize(
    "damage", [truncate, lose, add, lose_state, tear_state, empty_state, list_state, other_state, rename]
)
def test_a_torn_checkpoint_is_passed_over(
    run: RunDirectory, alone: ControlPlane, damage: Callable[[Path], None]
) -> None:
    whole = save(run, alone, 1)
    damage(save(run, alone, 2))
    found = run.newest_checkpoint()
    assert found is not None
    assert found[0] == whole
    damage(whole)
    assert run.newest_checkpoint() is None


def test_a_failed_save_leaves_the_older_checkpoint(run: RunDirectory, alone: ControlPlane) -> None:
    whole = save(run, alone, 1)

    def fail(directory: Path) -> None:
        write(directory)
        raise OSError("disk full, as told")

    with pytest.raises(OSError, match="disk full"):
        run.save_checkpoint(alone, fail, RunState(2, 4, "rl"))
    found = run.newest_checkpoint()
    assert found is not None
    assert found[0] == whole
    save(run, alone, 2)  # the torn attempt is not in the way
    found = run.newest_checkpoint()
    assert found is not None
    assert found[1].step == 2


def test_saving_a_step_again_replaces_it(run: RunDirectory, alone: ControlPlane) -> None:
    save(run, alone, 1, "old weights of another length")
    save(run, alone, 1)
    found = run.newest_checkpoint()
    assert found is not None
    assert found[1].files["model/shard"] == len("weights")


@pytest.mark.parametrize(
    ("used", "resume", "problem"),
    [(False, False, None), (True, True, None), (True, False, "holds a run"), (False, True, "holds no run")],
)
def test_a_used_directory_is_only_resumed(run: RunDirectory, used: bool, resume: bool, problem: str | None) -> None:
    if used:
        run.path.mkdir()
        (run.path / METRICS_FILE).touch()
    if problem is None:
        run.check("sft", resume=resume)
    else:
        with pytest.raises(RecipeError, match=problem):
            run.check("sft", resume=resume)

"""Which journal a run goes on from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import RlRecipe, load_recipe
from megarl.trainer.rollouts import journal_directory
from tests.small_job import write_small_job


def journal(job: Path, *overrides: str, resume: bool = True) -> Path:
    recipe = load_recipe(job / "rl.yaml", list(overrides))
    assert isinstance(recipe, RlRecipe)
    run: Any = SimpleNamespace(run=SimpleNamespace(path=job), resume=resume)
    return journal_directory(run, recipe)


@pytest.mark.parametrize(
    ("override", "kept"),
    [
        ("steps=9", True),
        ("batch.max_tokens_per_rank=99", True),
        ("batch.prompts=3", False),
        ("mode={max_lag: 1, interrupt: true}", False),
        ("reward.sources.other={type: math_verify}", False),
        ("algorithm.advantage.type=remax", False),
        ("rollout.temperature=0.5", False),
    ],
)
def test_a_run_goes_on_from_groups_that_its_recipe_would_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, kept: bool
) -> None:
    monkeypatch.chdir(write_small_job(tmp_path))
    before = journal(tmp_path)
    before.mkdir(parents=True)
    (before / "00000001.journal").touch()
    (before.parent / "notes.txt").touch()  # somebody's
    assert (journal(tmp_path, override) == before) == before.exists() == kept
    assert (before.parent / "notes.txt").exists()


def test_a_run_that_is_not_resumed_begins_a_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_small_job(tmp_path))
    before = journal(tmp_path)
    before.mkdir(parents=True)
    assert journal(tmp_path, resume=False) == before
    assert not before.exists()

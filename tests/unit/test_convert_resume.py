"""A conversion that is killed at any moment leaves nothing under the final name, and goes on where it was."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

from megarl.config import RecipeError
from megarl.runtime import die_with_parent
from megarl.weights import Progress, compare, convert, open_source
from tests.families import write_model

MOMENTS = 10
SMALL: Any = {"unit_bytes": 100_000, "file_bytes": 300_000}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model of each kind."""
    directory = tmp_path_factory.mktemp("sources")
    write_model("qwen3_moe", directory / "hf", hidden_size=128)
    convert(open_source(directory / "hf"), directory / "megatron", to="megatron", workers=1)
    return {"hf": directory / "hf", "megatron": directory / "megatron"}


def work(source: Path, target: Path, to: Literal["hf", "megatron"], workers: int) -> None:
    end = partial(die_with_parent, os.getpid())
    convert(open_source(source), target, to=to, workers=workers, worker_start=end, **SMALL)


def start(*arguments: Any) -> BaseProcess:
    process = get_context("fork").Process(target=work, args=arguments)
    process.start()
    return process


@pytest.mark.parametrize("to", ["megatron", "hf"])
def test_killed_at_any_moment_it_goes_on(
    to: Literal["hf", "megatron"], sources: dict[str, Path], tmp_path: Path
) -> None:
    source = sources["hf" if to == "megatron" else "megatron"]
    work(source, tmp_path / "whole", to, 2)
    begin = time.monotonic()  # not of the first one, which also loads modules
    convert(open_source(source), tmp_path / "whole", to=to, workers=2, overwrite=True, **SMALL)
    seconds, moments, killed, moment = time.monotonic() - begin, random.Random(to), 0, 0
    while moment < MOMENTS or killed < MOMENTS // 2:
        target = tmp_path / str(moment)
        process = start(source, target, to, 1 + moment % 3)
        process.join(moments.uniform(0, seconds))
        process.kill()
        process.join()
        moment += 1
        if process.exitcode:
            killed += 1
        else:
            seconds *= 0.8  # the machine may have been slower before
        if not target.exists():
            work(source, target, to, 2)
        assert not compare(open_source(source), open_source(target), workers=1)
        # a kill just after the rename leaves the notes
        assert sorted(set(os.listdir(target)) - {".convert"}) == sorted(os.listdir(tmp_path / "whole"))
        for path in target.glob("*.safetensors"):
            assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes()
    assert sorted(os.listdir(tmp_path)) == sorted([*map(str, range(moment)), "whole"])


class Stop(Exception):
    pass


def stop_half_way(progress: Progress) -> None:
    if progress.done > progress.total / 2:
        raise Stop


def interrupted(source: Path, target: Path, to: Literal["hf", "megatron"] = "hf") -> None:
    with pytest.raises(Stop):
        convert(open_source(source), target, to=to, workers=1, progress=stop_half_way, **SMALL)


def test_what_is_finished_is_not_done_again(sources: dict[str, Path], tmp_path: Path) -> None:
    interrupted(sources["megatron"], tmp_path / "target")
    seen: list[Progress] = []
    convert(open_source(sources["megatron"]), tmp_path / "target", to="hf", workers=1, progress=seen.append, **SMALL)
    assert all(progress.before > progress.total / 2 for progress in seen)
    assert seen[0].done == seen[0].before
    assert seen[-1].done == seen[-1].total
    assert not compare(open_source(sources["hf"]), open_source(tmp_path / "target"), workers=1)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 10)], ids=["removed", "cut short"])
@pytest.mark.parametrize("to", ["megatron", "hf"])
def test_what_was_finished_and_is_gone_is_done_again(
    to: Literal["hf", "megatron"], damage: Callable[[Path], None], sources: dict[str, Path], tmp_path: Path
) -> None:
    """As when the files of a scratch directory are removed by their age."""
    source = sources["hf" if to == "megatron" else "megatron"]
    interrupted(source, tmp_path / "target", to)
    partial = tmp_path / "target.partial"
    damage(min([*partial.glob("*.distcp"), *partial.glob("*.safetensors")]))
    convert(open_source(source), tmp_path / "target", to=to, workers=1, **SMALL)
    assert not compare(open_source(source), open_source(tmp_path / "target"), workers=1)


def test_publishing_that_fails_keeps_what_is_finished(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(aside: Path, target: Path) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(RecipeError, match="what is finished is kept"):
        patch.setattr("megarl.weights.staging.publish", fail)
        convert(open_source(sources["megatron"]), tmp_path / "target", to="hf", workers=1, **SMALL)
    seen: list[Progress] = []
    convert(open_source(sources["megatron"]), tmp_path / "target", to="hf", workers=1, progress=seen.append, **SMALL)
    assert all(progress.before == progress.total for progress in seen)  # nothing was left to do
    assert not compare(open_source(sources["hf"]), open_source(tmp_path / "target"), workers=1)


@pytest.mark.parametrize("change", ["source", "option"])
def test_another_job_starts_over(change: str, sources: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_model("qwen3_moe", source, hidden_size=128)
    interrupted(source, tmp_path / "target")
    options = SMALL
    if change == "source":
        write_model("qwen3_moe", source, hidden_size=128, seed=1)
    else:
        options = SMALL | {"file_bytes": 1 << 30}
    said: list[str] = []
    seen: list[Progress] = []
    convert(
        open_source(source), tmp_path / "target", to="hf", workers=1, progress=seen.append, say=said.append, **options
    )
    assert all(progress.before == 0 for progress in seen)
    assert "another source or with other options: starting over" in said[0]
    expected = load_file(source / "model.safetensors")
    found = {name: t for path in (tmp_path / "target").glob("*.safetensors") for name, t in load_file(path).items()}
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())

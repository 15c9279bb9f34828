"""The metrics file: whole rows only, and a resumed run writes no step twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.observe import METRICS_FILE, MetricsLog, Phases, read_metrics


def rows(*steps: int) -> list[dict[str, int]]:
    return [{"step": step, "reward": step * step} for step in steps]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a run that wrote steps 1 to 4."""
    log = MetricsLog(tmp_path, keep_steps=0)
    for row in rows(1, 2, 3, 4):
        log.write(row)
    return tmp_path


def test_a_run_that_has_not_begun_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    MetricsLog(tmp_path, keep_steps=0)
    assert (tmp_path / METRICS_FILE).exists(), "the file marks the directory as used"
    assert read_metrics(tmp_path) == []


def test_a_row_is_on_disk_when_it_is_written(run_dir: Path) -> None:
    assert read_metrics(run_dir) == rows(1, 2, 3, 4)


@pytest.mark.parametrize("torn", ["{", '{"step": 5, "rew', '{"step": 5, "reward": 25}'])
def test_a_last_line_still_being_written_is_left_out(run_dir: Path, torn: str) -> None:
    with (run_dir / METRICS_FILE).open("a") as file:
        file.write(torn)
    assert read_metrics(run_dir) == rows(1, 2, 3, 4)
    log = MetricsLog(run_dir, keep_steps=4)  # the run was killed there and is resumed
    log.write(rows(5)[0])
    assert read_metrics(run_dir) == rows(1, 2, 3, 4, 5)


@pytest.mark.parametrize("keep", [0, 2, 4, 9])
def test_a_resumed_run_writes_later_steps_again(run_dir: Path, keep: int) -> None:
    log = MetricsLog(run_dir, keep_steps=keep)
    kept = rows(*range(1, min(keep, 4) + 1))
    assert read_metrics(run_dir) == kept
    log.write(rows(7)[0])
    assert read_metrics(run_dir) == kept + rows(7)
    assert [path.name for path in run_dir.iterdir()] == [METRICS_FILE]


def test_phases_are_summed_in_the_order_they_ran() -> None:
    phases = Phases()
    for name in ("generate", "update", "generate"):
        with phases(name):
            pass
    assert list(phases.seconds) == ["generate", "update"]
    assert all(seconds >= 0 for seconds in phases.seconds.values())

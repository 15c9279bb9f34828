"""metrics.jsonl: one row a step, whatever else is on. Written by rank 0, read by displays and reports."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"


class MetricsLog:
    """Appends rows to a run's metrics; each reaches the file before `write` returns."""

    def __init__(self, run_dir: Path, *, keep_steps: int) -> None:
        """Rows and evaluations of steps after `keep_steps` are dropped: a resumed run writes them again."""
        for path in filter(Path.exists, (run_dir / METRICS_FILE, run_dir / EVALUATIONS_FILE)):
            kept = [row for row in _read_rows(path) if row["step"] <= keep_steps]
            aside = path.with_suffix(".partial")
            aside.write_text("".join(json.dumps(row) + "\n" for row in kept))
            aside.replace(path)
        self._file = (run_dir / METRICS_FILE).open("a")

    def write(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All whole rows so far, one a step; none if the run has not begun."""
    return _read_rows(run_dir / METRICS_FILE)


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """All evaluations so far: accuracies and samples, by step."""
    return _read_rows(run_dir / EVALUATIONS_FILE)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """JSON lines; a last line that is still being written is left out."""
    try:
        lines = path.read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Phases:
    """Seconds of each named phase of a step, in the order they ran."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

"""A live display of a stage, fed by its metrics file alone, so it can watch any run, also one on other nodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from megarl.observe.metrics import read_metrics

_REFRESH_S = 0.5
_PLAIN_LINES = 26  # about as many as fit a screen, where the output is no terminal


def describe(row: dict[str, Any]) -> str:
    """The part of a metrics row that a person follows."""
    if "reward" in row:
        times = "  ".join(f"{name} {seconds:.2f} s" for name, seconds in row["seconds"].items())
        return f"reward {row['reward']:.3f}  length {row['length']:.1f}  {times}"
    return f"loss {row['loss']:.4f}  {row['tokens'] / sum(row['seconds'].values()):,.0f} tokens/s"


def watch(run_dir: Path, *, name: str, steps: int, running: Callable[[], bool], console: Console) -> None:
    """Show the stage's steps until `running` says that it has ended."""
    # on a narrow terminal the phases' times are cut off, not the steps
    now = TextColumn("{task.fields[now]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
    progress = Progress(
        TextColumn("{task.description}", table_column=Column(no_wrap=True, min_width=len(name))),
        BarColumn(bar_width=10),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=2 * len(str(steps)) + 1)),
        TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
        now,
        expand=True,
        console=console,
        disable=not console.is_terminal,
    )
    shown = 0
    with progress:
        task = progress.add_task(name, total=steps, now="starting (models load, engines start)")
        alive = True
        while alive:
            alive = running()  # asked first, so that the last rows are read after the end
            rows = read_metrics(run_dir)
            if len(rows) > shown:
                progress.update(task, completed=rows[-1]["step"], now=describe(rows[-1]))
                if not console.is_terminal:
                    _print_plain(rows[shown:], name, steps, console)
                shown = len(rows)
            if alive:
                time.sleep(_REFRESH_S)


def _print_plain(rows: list[dict[str, Any]], name: str, steps: int, console: Console) -> None:
    stride = max(1, steps // _PLAIN_LINES)
    for row in rows:
        if row["step"] % stride == 0 or row["step"] == steps:
            console.print(f"{name} {row['step']}/{steps}  {describe(row)}", highlight=False, soft_wrap=True)

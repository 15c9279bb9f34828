"""How far a long copy of bytes is: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

_LINE_EVERY_S = 10.0  # in a log file, often enough to see that it lives

Show = Callable[[int, int, int], None]
"""Called with the bytes that are done, those of the whole, and those of `done` that were done before."""


@contextmanager
def show_transfer(name: str, console: Console) -> Iterator[Show]:
    """Display the transfer `name` while the context lasts, and what it came to at the end."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    begin = told = time.monotonic()
    task, last = progress.add_task(name, total=None), (0, 0, 0)

    def show(done: int, total: int, before: int) -> None:
        nonlocal told, last
        last = (done, total, before)
        progress.update(task, completed=done, total=total)
        if not console.is_terminal and time.monotonic() - told > _LINE_EVERY_S:
            told = time.monotonic()
            rate = (done - before) / (told - begin)
            left = f", {(total - done) / rate:.0f} s left" if rate else ""
            line = f"{name} {decimal(done)} of {decimal(total)}, {decimal(int(rate))}/s{left}"
            console.print(line, highlight=False, soft_wrap=True)

    with progress:
        yield show
    seconds = time.monotonic() - begin
    moved = last[0] - last[2]
    kept = f" ({decimal(last[2])} were done before)" if last[2] else ""
    line = f"{name}: {decimal(moved)} in {seconds:.2f} s, {decimal(int(moved / seconds))}/s{kept}"
    console.print(line, highlight=False, soft_wrap=True)

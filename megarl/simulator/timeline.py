"""A picture of the engines over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from megarl.simulator.cluster import Run, Sample

BINS = 600


def draw_timeline(runs: Mapping[str, Run], file: Path) -> None:
    """A PNG: for each policy, left running requests and right the cache held by them, a line of pixels an engine."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    end = max(run.makespan for run in runs.values())
    figure = Figure(figsize=(14, 0.6 + 1.9 * len(runs)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(runs), 2, squeeze=False, sharex=True)
    most = max(sample[1] for run in runs.values() for timeline in run.timelines for sample in timeline)
    for (policy, run), row in zip(runs.items(), panels, strict=True):
        grids = (
            (row[0], binned(run, 1, end), most, "running requests"),
            (row[1], binned(run, 2, end) / run.model.kv_tokens, 1.0, "cache held by them"),
        )
        for panel, grid, top, title in grids:
            image = panel.imshow(
                grid, aspect="auto", interpolation="nearest", vmin=0, vmax=top, extent=(0, end, len(grid), 0)
            )
            finish = sorted(run.finish.values())
            panel.axvline(finish[int(0.9 * (len(finish) - 1))], color="white", linestyle=":")
            panel.axvline(run.makespan, color="white")
            panel.set_title(f"{policy}: {title}", fontsize=9)
            panel.set_ylabel("engine")
            figure.colorbar(image, ax=panel)
    for panel in panels[-1]:
        panel.set_xlabel("seconds")
    figure.savefig(file, dpi=100, format="png")


def binned(run: Run, column: int, end: float) -> np.ndarray:
    """(engines, BINS): the mean of a column of the samples over each bin of time, zero after the last."""
    edges = np.linspace(0.0, end, BINS + 1)
    return np.array([_means(timeline, column, edges) for timeline in run.timelines])


def _means(timeline: list[Sample], column: int, edges: np.ndarray) -> np.ndarray:
    if not timeline:
        return np.zeros(len(edges) - 1)
    times = np.array([sample[0] for sample in timeline])
    values = np.array([sample[column] for sample in timeline], dtype=float)
    areas = np.concatenate([[0.0], np.cumsum((values[:-1] + values[1:]) / 2 * np.diff(times))])
    return np.diff(np.interp(edges, times, areas)) / np.diff(edges)

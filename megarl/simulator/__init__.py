"""A rollout phase without GPUs: simulated engines under the very scheduler that the real system runs.

`simulate` takes a workload, an engine model and a scheduler; `summarize` tells throughput, tail and waste, and the
bounds that no schedule beats. Used by `tools/simulate_rollout.py` and `tools/bench/rollout_policies.py`. Drives
`megarl.rollout_engine.scheduler` and nothing else of other rooms. Loads no torch, and says nothing about anything but
the time of generation.
"""

from megarl.simulator.cluster import Run, make_scheduler, simulate
from megarl.simulator.presets import PRESETS, Preset
from megarl.simulator.report import Bounds, Summary, as_json, bounds, summarize
from megarl.simulator.speed import GPUS, MODELS, EngineModel, Gpu, Placement, measured, roofline
from megarl.simulator.timeline import draw_timeline
from megarl.simulator.workload import GroupLengths, LengthModel, Workload, read_lengths

__all__ = [
    "GPUS",
    "MODELS",
    "PRESETS",
    "Bounds",
    "EngineModel",
    "Gpu",
    "GroupLengths",
    "LengthModel",
    "Placement",
    "Preset",
    "Run",
    "Summary",
    "Workload",
    "as_json",
    "bounds",
    "draw_timeline",
    "make_scheduler",
    "measured",
    "read_lengths",
    "roofline",
    "simulate",
    "summarize",
]

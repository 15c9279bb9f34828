"""A rollout phase without GPUs: simulated engines under the very scheduler that the real system runs.

`simulate` takes a workload, an engine model and a scheduler; `summarize` tells throughput, tail and waste, and the
bounds that no schedule beats. `simulate_training` puts a trainer beside them and runs many steps, in any mode. Used by
`tools/simulate_rollout.py`, `tools/bench/rollout_policies.py` and `tools/bench/modes_simulated.py`. Drives
`megarl.rollout_engine.scheduler` and `megarl.transfer_queue.admission` and nothing else of other rooms. Loads no torch,
and says nothing about anything but time.
"""

from megarl.simulator.cluster import Run, make_scheduler, simulate
from megarl.simulator.presets import PRESETS, Preset
from megarl.simulator.report import Bounds, Summary, as_json, bounds, summarize
from megarl.simulator.speed import GPUS, MODELS, EngineModel, Gpu, Placement, ServedModel, measured, roofline
from megarl.simulator.timeline import draw_timeline
from megarl.simulator.training import Mode, Steps, Trainer, simulate_training, trainer
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
    "Mode",
    "Placement",
    "Preset",
    "Run",
    "ServedModel",
    "Steps",
    "Summary",
    "Trainer",
    "Workload",
    "as_json",
    "bounds",
    "draw_timeline",
    "make_scheduler",
    "measured",
    "read_lengths",
    "roofline",
    "simulate",
    "simulate_training",
    "summarize",
    "trainer",
]

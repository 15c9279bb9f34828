"""Parallel layouts: what each rank holds and how long a step takes, from the model's sizes, without a GPU.

`search` finds the plans of a step (training, rollouts, publication) that are fastest; `memory` and `step_time` say what
one costs. Used by `tools/tune_layout.py`. Loads no torch, but for `planned`.
"""

from megarl.layout.known import KNOWN
from megarl.layout.machine import GENERATIONS, Machine, Shares
from megarl.layout.memory import Memory, fits, layer_bytes, memory
from megarl.layout.model import (
    Attention,
    Decoder,
    Layer,
    Linear,
    Mixture,
    Mlp,
    Scan,
    decoder,
    gated_mlp,
    grouped_attention,
    latent_attention,
)
from megarl.layout.parameters import Held, Stage, held, part_sizes, stages
from megarl.layout.search import Choice, Phases, Request, Search, planned, search
from megarl.layout.serving import Serving, phase_s, served_model, steady_s
from megarl.layout.step import Cost, Step, forward_time, step_time
from megarl.layout.training import Kernel, Precision, Software, Training
from megarl.layout.training_search import MEGARL, Ask, Counts, Trained, trainings
from megarl.layout.workload import WORK_STAGES, Division, Lengths, Rollouts, Work, staged, work_of

__all__ = [
    "GENERATIONS",
    "KNOWN",
    "MEGARL",
    "WORK_STAGES",
    "Ask",
    "Attention",
    "Choice",
    "Cost",
    "Counts",
    "Decoder",
    "Division",
    "Held",
    "Kernel",
    "Layer",
    "Lengths",
    "Linear",
    "Machine",
    "Memory",
    "Mixture",
    "Mlp",
    "Phases",
    "Precision",
    "Request",
    "Rollouts",
    "Scan",
    "Search",
    "Serving",
    "Shares",
    "Software",
    "Stage",
    "Step",
    "Trained",
    "Training",
    "Work",
    "decoder",
    "fits",
    "forward_time",
    "gated_mlp",
    "grouped_attention",
    "held",
    "latent_attention",
    "layer_bytes",
    "memory",
    "part_sizes",
    "phase_s",
    "planned",
    "search",
    "served_model",
    "staged",
    "stages",
    "steady_s",
    "step_time",
    "trainings",
    "work_of",
]

"""Parallel layouts: what each rank holds and how long a step takes, from the model's sizes, without a GPU.

`search` finds the plans of a step (training, rollouts, publication) that are fastest; `memory` and `step_time` say what
one costs. Used by `tools/tune_layout.py`. Loads no torch, but for `planned`.
"""

from megarl.layout.activations import layer_bytes
from megarl.layout.calibration import Dtype, Exchange, Kind, Load, Measured, Products, Table, read_table, write_table
from megarl.layout.known import KNOWN
from megarl.layout.machine import GENERATIONS, Machine, Shares
from megarl.layout.memory import Memory, fits, memory
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
from megarl.layout.operations import Cost
from megarl.layout.parameters import Held, Stage, held, part_sizes, stages
from megarl.layout.report import as_json, in_words, summary, table
from megarl.layout.search import Choice, Phases, Request, Search, planned, search
from megarl.layout.serving import Serving, phase_s, served_model, steady_s
from megarl.layout.step import Step, forward_time, step_time
from megarl.layout.training import MEGARL, MEGARL_CPU, Kernel, Precision, Software, Training
from megarl.layout.training_search import Ask, Counts, Trained, trainings
from megarl.layout.workload import WORK_STAGES, Division, Lengths, Rollouts, Work, staged, work_of

__all__ = [
    "GENERATIONS",
    "KNOWN",
    "MEGARL",
    "MEGARL_CPU",
    "WORK_STAGES",
    "Ask",
    "Attention",
    "Choice",
    "Cost",
    "Counts",
    "Decoder",
    "Division",
    "Dtype",
    "Exchange",
    "Held",
    "Kernel",
    "Kind",
    "Layer",
    "Lengths",
    "Linear",
    "Load",
    "Machine",
    "Measured",
    "Memory",
    "Mixture",
    "Mlp",
    "Phases",
    "Precision",
    "Products",
    "Request",
    "Rollouts",
    "Scan",
    "Search",
    "Serving",
    "Shares",
    "Software",
    "Stage",
    "Step",
    "Table",
    "Trained",
    "Training",
    "Work",
    "as_json",
    "decoder",
    "fits",
    "forward_time",
    "gated_mlp",
    "grouped_attention",
    "held",
    "in_words",
    "latent_attention",
    "layer_bytes",
    "memory",
    "part_sizes",
    "phase_s",
    "planned",
    "read_table",
    "search",
    "served_model",
    "staged",
    "stages",
    "steady_s",
    "step_time",
    "summary",
    "table",
    "trainings",
    "work_of",
    "write_table",
]

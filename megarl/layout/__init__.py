"""Parallel layouts: what each rank holds and how long a step takes, from the model's sizes, without a GPU."""

from megarl.layout.calibration import Dtype, Exchange, Kind, Load, Measured, Products, Table, read_table, write_table
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
from megarl.layout.search import MEGARL, Choice, Request, Search, search
from megarl.layout.step import Cost, Step, step_time
from megarl.layout.training import Kernel, Precision, Software, Training

__all__ = [
    "GENERATIONS",
    "MEGARL",
    "Attention",
    "Choice",
    "Cost",
    "Decoder",
    "Dtype",
    "Exchange",
    "Held",
    "Kernel",
    "Kind",
    "Layer",
    "Linear",
    "Load",
    "Machine",
    "Measured",
    "Memory",
    "Mixture",
    "Mlp",
    "Precision",
    "Products",
    "Request",
    "Scan",
    "Search",
    "Shares",
    "Software",
    "Stage",
    "Step",
    "Table",
    "Training",
    "decoder",
    "fits",
    "gated_mlp",
    "grouped_attention",
    "held",
    "latent_attention",
    "layer_bytes",
    "memory",
    "part_sizes",
    "read_table",
    "search",
    "stages",
    "step_time",
    "write_table",
]

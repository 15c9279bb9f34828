"""Parallel layouts: what each rank holds and how long a step takes, from the model's sizes, without a GPU."""

from megarl.layout.activations import layer_bytes
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
from megarl.layout.parameters import Held, Stage, held, part_sizes, stages
from megarl.layout.search import Choice, Request, Search, search
from megarl.layout.step import Cost, Step, step_time
from megarl.layout.training import MEGARL, MEGARL_CPU, Kernel, Precision, Software, Training

__all__ = [
    "GENERATIONS",
    "MEGARL",
    "MEGARL_CPU",
    "Attention",
    "Choice",
    "Cost",
    "Decoder",
    "Held",
    "Kernel",
    "Layer",
    "Linear",
    "Machine",
    "Memory",
    "Mixture",
    "Mlp",
    "Precision",
    "Request",
    "Scan",
    "Search",
    "Shares",
    "Software",
    "Stage",
    "Step",
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
    "search",
    "stages",
    "step_time",
]

"""Parallel layouts: what each rank holds and how long a step takes, from the model's sizes, without a GPU."""

from megarl.layout.model import Decoder, decoder
from megarl.layout.parameters import Held, Stage, held, part_sizes, stages

__all__ = ["Decoder", "Held", "Stage", "decoder", "held", "part_sizes", "stages"]

"""What the weights of each model family are called and how they lie, on disk and in Megatron; without any engine."""

from megarl.weights.convert import Progress, convert
from megarl.weights.hf import HfReader
from megarl.weights.hf_writer import HfWriter, hf_specs, write_hf
from megarl.weights.keys import checkpoint_place
from megarl.weights.parameter import Parameter
from megarl.weights.sources import Source, is_megatron, open_source
from megarl.weights.table import model_parameters

__all__ = [
    "HfReader",
    "HfWriter",
    "Parameter",
    "Progress",
    "Source",
    "checkpoint_place",
    "convert",
    "hf_specs",
    "is_megatron",
    "model_parameters",
    "open_source",
    "write_hf",
]

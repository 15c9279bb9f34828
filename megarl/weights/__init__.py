"""What the weights of each model family are called and how they lie, on disk and in Megatron; without any engine."""

from megarl.weights.hf import HfReader, split_index, write_hf
from megarl.weights.keys import checkpoint_key, layer_key_prefixes
from megarl.weights.parameter import Parameter
from megarl.weights.table import model_parameters

__all__ = [
    "HfReader",
    "Parameter",
    "checkpoint_key",
    "layer_key_prefixes",
    "model_parameters",
    "split_index",
    "write_hf",
]

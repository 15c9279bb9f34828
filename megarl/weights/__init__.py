"""What the weights of each model family are called and how they lie, on disk and in Megatron; without any engine."""

from megarl.weights.boxes import Box, matrix
from megarl.weights.compare import compare
from megarl.weights.convert import Progress, convert
from megarl.weights.describe import describe
from megarl.weights.fingerprint import combined, fingerprint
from megarl.weights.fp8 import BLOCK, is_quantised, quantise
from megarl.weights.hf import HfReader, split_index
from megarl.weights.hf_writer import HfWriter, copy_config, hf_specs
from megarl.weights.keys import checkpoint_key, layer_key_prefixes
from megarl.weights.layouts import EngineLayout, Replicated
from megarl.weights.parameter import Parameter
from megarl.weights.places import Place, find_place, open_source
from megarl.weights.sources import HfSource, Source
from megarl.weights.staging import publish
from megarl.weights.table import model_parameters

__all__ = [
    "BLOCK",
    "Box",
    "EngineLayout",
    "HfReader",
    "HfSource",
    "HfWriter",
    "Parameter",
    "Place",
    "Progress",
    "Replicated",
    "Source",
    "checkpoint_key",
    "combined",
    "compare",
    "convert",
    "copy_config",
    "describe",
    "find_place",
    "fingerprint",
    "hf_specs",
    "is_quantised",
    "layer_key_prefixes",
    "matrix",
    "model_parameters",
    "open_source",
    "publish",
    "quantise",
    "split_index",
]

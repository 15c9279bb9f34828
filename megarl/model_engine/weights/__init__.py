"""Weights: tables of names and layouts, Hugging Face files, and the shards of a running model."""

from megarl.model_engine.weights.files import write_hf
from megarl.model_engine.weights.parameter import Parameter
from megarl.model_engine.weights.table import model_parameters
from megarl.model_engine.weights.transfer import Bucket, ModelWeights

__all__ = ["Bucket", "ModelWeights", "Parameter", "model_parameters", "write_hf"]

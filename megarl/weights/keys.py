"""What parameters are called in Megatron's distributed checkpoints: the names of its Transformer Engine layers."""

from __future__ import annotations

import re

from megarl.config import ModelShape
from megarl.weights.hf import split_index
from megarl.weights.parameter import Parameter

EXTRA = "hf."
"""Begins the key of a tensor that no weight table knows, which is kept under its Hugging Face name."""

Place = tuple[str, tuple[int, ...]]
"""A key, and the index of a parameter in the tensor under it; () for the whole tensor."""


def layer_key_prefixes(shape: ModelShape, has_experts: bool) -> dict[str, str]:
    """What names within a layer begin with, and their keys: Transformer Engine fuses norms with what follows them."""
    prefixes = {"mlp.experts.": "mlp.experts.experts."}
    if shape.latent is None:
        prefixes["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    else:
        prefixes["self_attention.q_layernorm."] = "self_attention.linear_q_up_proj.layer_norm_"
        prefixes["self_attention.kv_layernorm."] = "self_attention.linear_kv_up_proj.layer_norm_"
    if not has_experts:
        prefixes["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return prefixes


def checkpoint_key(shape: ModelShape, parameter: Parameter) -> str:
    """The key of a parameter, or of the tensor of which an expert's parameter is a slice."""
    key, _ = split_index(parameter.megatron)
    if parameter.layer is not None:
        for name, prefix in layer_key_prefixes(shape, shape.has_experts(parameter.layer)).items():
            key = key.replace(f".{parameter.layer}.{name}", f".{parameter.layer}.{prefix}")
    return key


def checkpoint_place(shape: ModelShape, parameter: Parameter) -> Place:
    """Where a checkpoint has a parameter."""
    _, expert = split_index(parameter.megatron)
    return checkpoint_key(shape, parameter), () if expert is None else (expert,)


def stacked_place(place: Place) -> Place:
    """The same in Megatron's older form, where all layers are one stacked tensor."""
    key, index = place
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", key)
    return (f"decoder.layers.{match[2]}", (int(match[1]), *index)) if match else place

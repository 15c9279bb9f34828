"""What Megatron's distributed checkpoints call a parameter: the keys that Megatron-LM with Transformer Engine writes.

There, a norm before a fused layer belongs to that layer, whatever modules a model is really built of, and all experts
of a layer are one stacked tensor.
"""

from __future__ import annotations

import re

from megarl.config import ModelShape
from megarl.weights.hf import split_index
from megarl.weights.parameter import Parameter

EXTRA = "hf."
"""Begins the key of a tensor that no weight table knows, which is kept under its Hugging Face name."""

Place = tuple[str, tuple[int, ...]]
"""A key, and the index of the parameter in the tensor that is stored under it; () for all of it."""


def checkpoint_place(parameter: Parameter, shape: ModelShape) -> Place:
    """Where a checkpoint has a parameter."""
    name, expert = split_index(parameter.megatron)
    for module, fused in _fused_norms(parameter, shape).items():
        name = re.sub(rf"(?<=\.){re.escape(module)}\.(?=weight|bias)", f"{fused}.layer_norm_", name)
    if expert is None:
        return name, ()
    return name.replace("mlp.experts.", "mlp.experts.experts."), (expert,)


def stacked_place(place: Place) -> Place:
    """The same in Megatron's older form, where all layers are one stacked tensor."""
    name, index = place
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
    return (f"decoder.layers.{match[2]}", (int(match[1]), *index)) if match else place


def _fused_norms(parameter: Parameter, shape: ModelShape) -> dict[str, str]:
    """The norms that belong to the layer behind them."""
    if parameter.layer is None:
        return {}
    if shape.latent is not None:
        attention = {
            "self_attention.q_layernorm": "self_attention.linear_q_up_proj",
            "self_attention.kv_layernorm": "self_attention.linear_kv_up_proj",
        }
    else:
        attention = {"input_layernorm": "self_attention.linear_qkv"}
    dense = {} if shape.has_experts(parameter.layer) else {"pre_mlp_layernorm": "mlp.linear_fc1"}
    return attention | dense

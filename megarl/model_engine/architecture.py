"""What Megatron is told of a model, whatever the parallel layout.

`ModelShape` in the words of TransformerConfig (MLATransformerConfig for latent attention) and of GPTModel. What has no
word there is a module's: norms of 1 + weight and after a block, the embedding's scale, a rope of the windowed layers,
how groups of experts are scored, the epsilon of latent norms. Used where the model is built; builds nothing itself.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from megarl.config import (
    Activation,
    ClampedSwiglu,
    Experts,
    LinearScaling,
    Llama3Scaling,
    ModelShape,
    YarnScaling,
)


def make_config(shape: ModelShape, **others: Any) -> TransformerConfig:
    """Megatron's configuration of the model; `others` are the fields that do not describe the architecture."""
    kind = TransformerConfig if shape.latent is None else MLATransformerConfig
    config = kind(**architecture_fields(shape), **others)
    if shape.latent is None and isinstance(shape.rope.scaling, YarnScaling):
        for name, value in _yarn_attributes(shape.rope.scaling).items():
            setattr(config, name, value)
    return config


def architecture_fields(shape: ModelShape) -> dict[str, Any]:
    """The fields of TransformerConfig, or of MLATransformerConfig, that describe the architecture."""
    bias = shape.experts is not None and shape.experts.bias
    assert bias == shape.attention_output_bias, "Megatron has one switch for the biases of all but the qkv projection"
    fields: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_query_groups": shape.kv_heads,
        "ffn_hidden_size": shape.ffn,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_epsilon,
        "gated_linear_unit": True,
        "add_bias_linear": bias,
        "add_qkv_bias": shape.qkv_bias,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **_activation_fields(shape.activation),
        **(_attention_fields(shape) if shape.latent is None else _latent_fields(shape)),
    }
    if shape.experts is not None:
        fields |= _expert_fields(shape.experts, shape.layers)
    return fields


def model_arguments(shape: ModelShape) -> dict[str, Any]:
    """The arguments of GPTModel that describe the architecture; the vocabulary's padding is the layout's."""
    arguments: dict[str, Any] = {
        "max_sequence_length": shape.max_positions,
        "share_embeddings_and_output_weights": shape.tied,
        "position_embedding_type": "rope",
    }
    if shape.latent is not None:
        return arguments  # its rope is made from the configuration
    rope = shape.rope
    arguments |= {"rotary_base": rope.theta, "rotary_percent": rope.fraction}
    match rope.scaling:
        case LinearScaling(factor=factor):
            arguments["seq_len_interpolation_factor"] = factor
        case Llama3Scaling(factor=factor):
            arguments |= {"rope_scaling": True, "rope_scaling_factor": factor}
        case YarnScaling():
            arguments["position_embedding_type"] = "yarn"
    return arguments


def _activation_fields(activation: Activation) -> dict[str, Any]:
    if isinstance(activation, ClampedSwiglu):
        return {
            "activation_func": partial(_sigmoid_gate, sharpness=activation.sharpness),
            "activation_func_clamp_value": activation.limit,
            "glu_linear_offset": 1.0,
        }
    return {"activation_func": F.silu if activation == "silu" else partial(F.gelu, approximate="tanh")}


def _sigmoid_gate(x: Tensor, sharpness: float) -> Tensor:
    """Megatron's quick_gelu has a fixed sharpness, and is compiled at its first call."""
    return x * torch.sigmoid(sharpness * x)


def _attention_fields(shape: ModelShape) -> dict[str, Any]:
    fields: dict[str, Any] = {"kv_channels": shape.head_dim, "qk_layernorm": shape.qk_norm}
    if shape.softmax_scale is not None:
        fields["softmax_scale"] = shape.softmax_scale
    if shape.sinks:
        fields["softmax_type"] = "learnable"
    if shape.window is not None:
        fields["window_size"] = (shape.window.size - 1, 0)  # tokens before its own, and after
        fields["window_attn_skip_freq"] = [int(layer in shape.window.layers) for layer in range(shape.layers)]
    return fields


def _latent_fields(shape: ModelShape) -> dict[str, Any]:
    latent, scaling = shape.latent, shape.rope.scaling
    assert latent is not None
    fields: dict[str, Any] = {
        "multi_latent_attention": True,
        "kv_channels": None,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope,
        "qk_pos_emb_head_dim": latent.rope,
        "v_head_dim": latent.value,
        # the latent norms are in the layer's specification: with True, Megatron 0.16.1 sums the gradient of the query's
        # norm over tensor-parallel ranks which all have the whole of it already
        "qk_layernorm": False,
        "rope_type": "rope",
        "rotary_base": shape.rope.theta,
    }
    if isinstance(scaling, YarnScaling):
        fields |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_positions,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "mscale": _mscale(scaling),
            "mscale_all_dim": scaling.mscale_all_dim,
        }
    return fields


def _expert_fields(experts: Experts, layers: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "num_moe_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_layer_freq": [int(layer in experts.layers) for layer in range(layers)],
        "moe_shared_expert_intermediate_size": experts.shared_ffn or None,
        "moe_grouped_gemm": False,
        "moe_router_topk": experts.active,
        "moe_router_dtype": "fp32",
        "moe_router_score_function": experts.score,
        # a softmax over the chosen experts is the same as normalized scores of all
        "moe_router_pre_softmax": experts.score == "softmax" and not experts.normalized,
        "moe_router_topk_scaling_factor": None if experts.scaling == 1 else experts.scaling,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_enable_expert_bias": experts.correction_bias,
        "moe_router_bias_update_rate": 0.0,  # else Megatron moves the correction bias at every step
    }
    if experts.groups is not None:
        fields |= {"moe_router_num_groups": experts.groups.count, "moe_router_group_topk": experts.groups.active}
    return fields


def _yarn_attributes(scaling: YarnScaling) -> dict[str, Any]:
    """What GPTModel reads from the configuration, where 0.16.1 declares no such fields."""
    return {
        "yarn_rotary_scaling_factor": scaling.factor,
        "yarn_original_max_position_embeddings": scaling.original_positions,
        "yarn_beta_fast": scaling.beta_fast,
        "yarn_beta_slow": scaling.beta_slow,
        "yarn_mscale": _mscale(scaling),
        "yarn_mscale_all_dim": scaling.mscale_all_dim,
        "yarn_correction_range_round_to_int": scaling.truncate,
    }


def _mscale(scaling: YarnScaling) -> float:
    """What makes Megatron's factor of sines and cosines, gain(mscale) / gain(mscale_all_dim), the attention factor.

    gain(m) = 0.1 m ln(factor) + 1.
    """
    slope = 0.1 * math.log(scaling.factor)
    return (scaling.attention_factor * (slope * scaling.mscale_all_dim + 1.0) - 1.0) / slope

"""Which module Megatron builds at each place of a layer: its own, or ours where its own is missing or wrong."""

from __future__ import annotations

from functools import partial

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config import ExpertBalance, ModelShape
from megarl.model_engine.attention import PackedAttention
from megarl.model_engine.experts import GroupedExperts
from megarl.model_engine.modules import (
    LatentSelfAttention,
    PostNormAdd,
    RMSNorm,
    UnitRMSNorm,
    WindowRopeLayer,
)
from megarl.model_engine.routing import Router
from megarl.weights import layer_key_prefixes


def block_specification(
    config: TransformerConfig, shape: ModelShape, balance: ExpertBalance, part: int | None
) -> TransformerBlockSubmodules:
    """The layers of this rank's pipeline stage, or of a `part` of it."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=part)
    norm = UnitRMSNorm if shape.unit_norms else RMSNorm
    block.layer_norm = norm
    for layer in {id(spec): spec for spec in block.layer_specs}.values():
        _replace(layer, config, shape, norm)
        mlp = layer.submodules.mlp.submodules
        has_experts = shape.experts is not None and hasattr(mlp, "experts")
        if shape.experts is not None and has_experts:
            mlp.router, mlp.experts = partial(Router, experts=shape.experts, balance=balance), GroupedExperts
        layer.submodules.sharded_state_dict_keys_map = layer_key_prefixes(shape, has_experts)
    return block


def _replace(layer: ModuleSpec, config: TransformerConfig, shape: ModelShape, norm: type) -> None:
    modules = layer.submodules
    modules.input_layernorm = modules.pre_mlp_layernorm = norm
    attention = modules.self_attention
    attention.submodules.core_attention = PackedAttention
    if shape.latent is not None:
        attention.module = LatentSelfAttention
        attention.submodules.q_layernorm = attention.submodules.kv_layernorm = norm
    elif shape.qk_norm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = norm
    if shape.post_norms:
        modules.self_attn_bda = modules.mlp_bda = ModuleSpec(PostNormAdd, params={"config": config, "norm": norm})
    if shape.window is not None and shape.window.rope is not None:
        layer.module = WindowRopeLayer

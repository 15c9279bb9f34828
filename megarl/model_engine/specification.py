"""Which module Megatron builds at each place of a layer: its own, or ours where its own is missing or wrong."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
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
    engine = _transformer_engine(config)
    norm = UnitRMSNorm if shape.unit_norms else engine.norm if engine else RMSNorm
    block.layer_norm = norm
    for layer in {id(spec): spec for spec in block.layer_specs}.values():
        _replace(layer, config, shape, norm)
        if engine:
            _replace_matrices(layer, engine)
        mlp = layer.submodules.mlp.submodules
        has_experts = shape.experts is not None and hasattr(mlp, "experts")
        if shape.experts is not None and has_experts:
            mlp.router, mlp.experts = partial(Router, experts=shape.experts, balance=balance), GroupedExperts
        layer.submodules.sharded_state_dict_keys_map = layer_key_prefixes(shape, has_experts)
    return block


class _Engine(NamedTuple):
    norm: Any
    column: type
    row: type


def _transformer_engine(config: TransformerConfig) -> _Engine | None:
    """What to use of Transformer Engine, on a GPU where it is installed.

    Its attention and its experts have ours in their place, which take packed sequences and families' options that its
    own do not; down projections of latent attention stay Megatron's, since `LatentSelfAttention` mends them.
    """
    if config.use_cpu_initialization or not transformer_engine.HAVE_TE:
        return None
    te = transformer_engine
    return _Engine(te.TENorm, te.TEColumnParallelLinear, te.TERowParallelLinear)


def _replace_matrices(layer: ModuleSpec, engine: _Engine) -> None:
    """Those of attention, of a dense MLP and of shared experts."""
    mlp = layer.submodules.mlp.submodules
    for modules in (layer.submodules.self_attention.submodules, getattr(mlp, "shared_experts", None) or mlp):
        modules = getattr(modules, "submodules", modules)
        for name, parallel in vars(modules).items():
            if parallel is ColumnParallelLinear and not name.endswith("down_proj"):
                setattr(modules, name, engine.column)
            elif parallel is RowParallelLinear:
                setattr(modules, name, engine.row)


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

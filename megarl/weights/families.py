"""The parameters of one layer, for each architecture family: what the checkpoints on disk call them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megarl.config import Experts, LatentAttention, ModelShape
from megarl.weights.layouts import (
    InterleavedGateUp,
    Layout,
    QueryKeyValue,
    Replicated,
    RopePairs,
    Split,
    TransposedInputs,
)
from megarl.weights.parameter import Parameter, Place


def layer_parameters(shape: ModelShape, layer: int) -> list[Parameter]:
    """The parameters of `layer`, in a fixed order."""
    return _FAMILIES[shape.family](shape, Place.of_layer(layer))


def _llama_like(shape: ModelShape, at: Place) -> list[Parameter]:
    """Llama, Qwen2, Qwen3: grouped attention and a gated MLP."""
    return [
        _norm(shape, at, "input_layernorm", "input_layernorm"),
        *_grouped_attention(shape, at),
        _norm(shape, at, "pre_mlp_layernorm", "post_attention_layernorm"),
        *at.gated_mlp("mlp.", "mlp.", shape.hidden, shape.ffn),
    ]


def _gemma3(shape: ModelShape, at: Place) -> list[Parameter]:
    """The norms of what attention and the MLP return lie where Megatron adds it to the residual."""
    return [
        _norm(shape, at, "input_layernorm", "input_layernorm"),
        *_grouped_attention(shape, at),
        _norm(shape, at, "self_attn_bda.norm", "post_attention_layernorm"),
        _norm(shape, at, "pre_mlp_layernorm", "pre_feedforward_layernorm"),
        *at.gated_mlp("mlp.", "mlp.", shape.hidden, shape.ffn),
        _norm(shape, at, "mlp_bda.norm", "post_feedforward_layernorm"),
    ]


def _moe(shape: ModelShape, at: Place) -> list[Parameter]:
    """Qwen3-MoE, GLM-4.5 and the DeepSeeks: layers with experts and layers like Llama's."""
    attention = _grouped_attention(shape, at) if shape.latent is None else _latent_attention(shape, shape.latent, at)
    parameters = [
        _norm(shape, at, "input_layernorm", "input_layernorm"),
        *attention,
        _norm(shape, at, "pre_mlp_layernorm", "post_attention_layernorm"),
    ]
    if shape.experts is None or not shape.has_experts(at.layer):
        return [*parameters, *at.gated_mlp("mlp.", "mlp.", shape.hidden, shape.ffn)]
    experts, hidden = shape.experts, shape.hidden
    parameters.append(at.one("mlp.router.weight", "mlp.gate.weight", Replicated(), experts.count, hidden))
    if experts.correction_bias:
        names = ("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias")
        parameters.append(at.one(*names, Replicated(), experts.count, float32=True))
    if experts.shared_ffn:
        parameters += at.gated_mlp("mlp.shared_experts.", "mlp.shared_experts.", hidden, experts.shared_ffn)
    for expert in range(experts.count):
        place = at.of_expert(expert, f"mlp.experts.{expert}.", "mlp.experts.")
        parameters += place.gated_mlp("", "", hidden, experts.ffn)
    return parameters


def _mixtral(shape: ModelShape, at: Place) -> list[Parameter]:
    assert shape.experts is not None
    experts, hidden = shape.experts, shape.hidden
    parameters = [
        _norm(shape, at, "input_layernorm", "input_layernorm"),
        *_grouped_attention(shape, at),
        _norm(shape, at, "pre_mlp_layernorm", "post_attention_layernorm"),
        at.one("mlp.router.weight", "block_sparse_moe.gate.weight", Replicated(), experts.count, hidden),
    ]
    for expert in range(experts.count):
        place = at.of_expert(expert, f"block_sparse_moe.experts.{expert}.", "block_sparse_moe.experts.")
        parameters += place.gated_mlp("", "", hidden, experts.ffn, names=("w1", "w3", "w2"))
    return parameters


def _gpt_oss(shape: ModelShape, at: Place) -> list[Parameter]:
    assert shape.experts is not None
    count, hidden = shape.experts.count, shape.hidden
    return [
        _norm(shape, at, "input_layernorm", "input_layernorm"),
        *_grouped_attention(shape, at),
        _norm(shape, at, "pre_mlp_layernorm", "post_attention_layernorm"),
        at.one("mlp.router.weight", "mlp.router.weight", Replicated(), count, hidden),
        at.one("mlp.router.bias", "mlp.router.bias", Replicated(), count),
        *(parameter for expert in range(count) for parameter in _stacked_expert(shape.experts, hidden, at, expert)),
    ]


def _stacked_expert(experts: Experts, hidden: int, at: Place, expert: int) -> list[Parameter]:
    """Of each projection all experts are one tensor, with inputs before outputs, gates and ups alternating.

    SGLang holds them in the order of the kernel that it chooses.
    """
    place, width = at.of_expert(expert, "mlp.experts.", None), experts.ffn
    return [
        place.one("linear_fc1.weight", f"gate_up_proj[{expert}]", InterleavedGateUp(), hidden, 2 * width),
        place.one("linear_fc1.bias", f"gate_up_proj_bias[{expert}]", InterleavedGateUp(), 2 * width),
        place.one("linear_fc2.weight", f"down_proj[{expert}]", TransposedInputs(), width, hidden),
        place.one("linear_fc2.bias", f"down_proj_bias[{expert}]", Replicated(), hidden),
    ]


_FAMILIES: dict[str, Callable[[ModelShape, Place], list[Parameter]]] = {
    "llama": _llama_like,
    "qwen2": _llama_like,
    "qwen3": _llama_like,
    "gemma3": _gemma3,
    "qwen3_moe": _moe,
    "glm4_moe": _moe,
    "deepseek_v2": _moe,
    "deepseek_v3": _moe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
}


def _norm(shape: ModelShape, at: Place, megatron: str, hf: str) -> Parameter:
    return at.one(f"{megatron}.weight", f"{hf}.weight", Replicated(), shape.hidden)


def _grouped_attention(shape: ModelShape, at: Place) -> list[Parameter]:
    """Query, key and value in one, the output projection, and their biases, norms and sinks if there are any."""
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    megatron, hf = "self_attention.", "self_attn."

    def together(kind: str, *columns: int) -> Parameter:
        return at.fused(
            f"{megatron}linear_qkv.{kind}",
            tuple(f"{hf}{part}_proj.{kind}" for part in "qkv"),
            f"{hf}qkv_proj.{kind}",
            QueryKeyValue(shape.heads, shape.kv_heads, shape.head_dim),
            *((rows, *columns) for rows in (query, key_value, key_value)),
        )

    def one(name: str, hf_name: str, layout: Layout, *size: int) -> Parameter:
        return at.one(megatron + name, hf + hf_name, layout, *size)

    parameters = [
        together("weight", shape.hidden),
        one("linear_proj.weight", "o_proj.weight", Split(dim=1), shape.hidden, query),
    ]
    if shape.qkv_bias:
        parameters.append(together("bias"))
    if shape.attention_output_bias:
        parameters.append(one("linear_proj.bias", "o_proj.bias", Replicated(), shape.hidden))
    if shape.qk_norm:
        norms = (("q_layernorm.weight", "q_norm.weight"), ("k_layernorm.weight", "k_norm.weight"))
        parameters += [one(*names, Replicated(), shape.head_dim) for names in norms]
    if shape.sinks:
        parameters.append(one("core_attention.softmax_offset", "sinks", Split(dim=0), shape.heads))
    return parameters


def _latent_attention(shape: ModelShape, latent: LatentAttention, at: Place) -> list[Parameter]:
    """Down and up projections with a norm between; Megatron takes neighbouring rows as the pairs to rotate.

    SGLang's ranks hold the down projections whole, those of queries above those of keys and values.
    """
    hidden, kv_rank, query_rank = shape.hidden, latent.kv_rank, latent.query_rank
    query, key_value = shape.heads * shape.head_dim, shape.heads * (latent.nope + latent.value)
    rows = Split(dim=0)
    by_head: Layout = rows if latent.interleaved else RopePairs(period=shape.head_dim, rope=latent.rope)
    shared: Layout = rows if latent.interleaved else RopePairs(period=kv_rank + latent.rope, rope=latent.rope)

    def one(name: str, hf_name: str, layout: Layout, *size: int) -> Parameter:
        return at.one(f"self_attention.{name}.weight", f"self_attn.{hf_name}.weight", layout, *size)

    key_value_down = replace(
        one("linear_kv_down_proj", "kv_a_proj_with_mqa", shared, kv_rank + latent.rope, hidden), engine_whole=True
    )
    if query_rank is None:
        queries = [one("linear_q_proj", "q_proj", by_head, query, hidden)]
    else:
        down = f"{at.engine}self_attn.fused_qkv_a_proj_with_mqa.weight"
        query_down = one("linear_q_down_proj", "q_a_proj", rows, query_rank, hidden)
        key_value_down = replace(key_value_down, engine=down, engine_row=query_rank)
        queries = [
            replace(query_down, engine=down, engine_whole=True),
            one("q_layernorm", "q_a_layernorm", Replicated(), query_rank),
            one("linear_q_up_proj", "q_b_proj", by_head, query, query_rank),
        ]
    return [
        *queries,
        key_value_down,
        one("kv_layernorm", "kv_a_layernorm", Replicated(), kv_rank),
        one("linear_kv_up_proj", "kv_b_proj", rows, key_value, kv_rank),
        one("linear_proj", "o_proj", Split(dim=1), hidden, shape.heads * latent.value),
    ]

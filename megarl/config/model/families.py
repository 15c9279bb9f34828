"""One reader a family: what its config.json adds to the sizes that all have, with transformers' defaults."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megarl.config.errors import RecipeError
from megarl.config.model.fields import (
    Fields,
    count,
    flag,
    layer_count,
    layer_list,
    number,
    require,
    section,
    windowed_layers,
)
from megarl.config.model.rope import read_rope, rope_of, yarn_gain
from megarl.config.model.types import (
    ClampedSwiglu,
    ExpertGroups,
    Experts,
    LatentAttention,
    LinearScaling,
    Rope,
    Window,
    YarnScaling,
)

Extra = dict[str, Any]
"""Keyword arguments of ModelShape, beyond the sizes that all families have or in their place."""


@dataclass(frozen=True)
class Family:
    """How the config.json of an architecture is read. `kv_heads`, `head_dim`, `tied`: where it does not name them.

    Without a default there are as many key-value heads as heads, and a head has hidden / heads elements.
    """

    name: str
    read: Callable[[Fields], Extra]
    kv_heads: int | None = None
    head_dim: int | None = None
    tied: bool = False
    activation: tuple[str, str] = ("hidden_act", "silu")


def _llama(config: Fields) -> Extra:
    _no_biases(config)
    return {"rope": read_rope(config)}


def _qwen2(config: Fields) -> Extra:
    _no_biases(config)
    _no_window(config)
    return {"rope": read_rope(config), "qkv_bias": True}


def _qwen3(config: Fields) -> Extra:
    _no_biases(config)
    _no_window(config)
    return {"rope": read_rope(config), "qk_norm": True}


def _qwen3_moe(config: Fields) -> Extra:
    layers = layer_count(config)
    step, dense = count(config, "decoder_sparse_step", 1), layer_list(config, "mlp_only_layers", layers)
    experts = Experts(
        **_expert_counts(config, 128, 8),
        ffn=count(config, "moe_intermediate_size", 768),
        layers=tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0),
        normalized=flag(config, "norm_topk_prob"),
    )
    return _qwen3(config) | {"experts": experts if experts.layers else None}


def _mixtral(config: Fields) -> Extra:
    _no_biases(config)
    require(config, "sliding_window", None)
    experts = Experts(
        **_expert_counts(config, 8, 2),
        ffn=count(config, "intermediate_size"),
        layers=tuple(range(layer_count(config))),
    )
    return {"rope": read_rope(config, theta=1e6), "experts": experts}


def _deepseek_v2(config: Fields) -> Extra:
    require(config, "scoring_func", "softmax")
    require(config, "norm_topk_prob", False)
    require(config, "rope_interleave", True)
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        known = "'greedy' and 'group_limited_greedy'"
        raise RecipeError(f"topk_method {method!r:.60} is not supported with this architecture; only {known} are")
    experts = Experts(
        **_expert_counts(config, 64, None),
        **_leading_dense(config, first_dense=0, shared=2, ffn=1407),
        normalized=False,
        groups=_groups(config, "best") if method == "group_limited_greedy" else None,
    )
    return _latent(config) | {"experts": experts if experts.layers else None}


def _deepseek_v3(config: Fields) -> Extra:
    experts = Experts(
        **_expert_counts(config, 256, 8),
        **_leading_dense(config, first_dense=3, shared=1, ffn=2048, scaling=2.5),
        **_sigmoid(config, n_group=8, topk_group=4),
    )
    return _latent(config) | {"experts": experts if experts.layers else None, "mtp_layers": _mtp(config)}


def _glm4_moe(config: Fields) -> Extra:
    experts = Experts(
        **_expert_counts(config, 128, 8),
        **_leading_dense(config, first_dense=1, shared=1, ffn=1408),
        **_sigmoid(config, n_group=1, topk_group=1),
    )
    return {
        "rope": read_rope(config, fraction=0.5),
        "qkv_bias": flag(config, "attention_bias"),
        "qk_norm": flag(config, "use_qk_norm"),
        "experts": experts if experts.layers else None,
        "mtp_layers": _mtp(config),
    }


def _gpt_oss(config: Fields) -> Extra:
    require(config, "attention_bias", True)
    layers = layer_count(config)
    experts = Experts(
        **_expert_counts(config, 128, 4),
        ffn=count(config, "intermediate_size"),
        layers=tuple(range(layers)),
        bias=True,
    )
    # what transformers takes where a file has no rope settings at all
    default = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    given = config.get("rope_parameters") or config.get("rope_scaling")
    return {
        "rope": read_rope(config if given else config | {"rope_parameters": default}, theta=150_000.0),
        "activation": ClampedSwiglu(number(config, "swiglu_limit", 7.0), number(config, "swiglu_alpha", 1.702)),
        "qkv_bias": True,
        "attention_output_bias": True,
        "sinks": True,
        "window": _window(config, 128, range(0, layers, 2)),
        "experts": experts,
    }


def _gemma3(config: Fields) -> Extra:
    for name, supported in _GEMMA3_FIXED.items():
        require(config, name, supported)
    layers, every = layer_count(config), count(config, "sliding_window_pattern", 6)
    everywhere, local = _gemma3_ropes(config)
    return {
        "rope": everywhere,
        "activation": "gelu_tanh",
        "qk_norm": True,
        "softmax_scale": number(config, "query_pre_attn_scalar", 256) ** -0.5,
        "window": _window(config, 4096, [layer for layer in range(layers) if (layer + 1) % every], rope=local),
        "unit_norms": True,
        "post_norms": True,
        "embedding_scale": math.sqrt(count(config, "hidden_size")),
    }


_GEMMA3_FIXED = {
    "attention_bias": False,
    "use_bidirectional_attention": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


def _gemma3_ropes(config: Fields) -> tuple[Rope, Rope]:
    """The rope of the layers that see everything, and of those with a window."""
    by_kind = section(config, "rope_parameters")
    if by_kind and not by_kind.keys() & {"full_attention", "sliding_attention"}:
        raise RecipeError("rope_parameters: expected an object for full_attention and one for sliding_attention")
    everywhere = rope_of(config, section(by_kind, "full_attention") | section(config, "rope_scaling"), 1e6)
    if not isinstance(everywhere.scaling, LinearScaling | None):
        raise RecipeError("rope_parameters.full_attention: only rope types 'default' and 'linear' are supported")
    settings = section(by_kind, "sliding_attention")
    require(settings, "rope_type", "default")
    return everywhere, rope_of({"rope_theta": config.get("rope_local_base_freq")}, settings, 10_000.0)


def _no_biases(config: Fields) -> None:
    require(config, "attention_bias", False)
    require(config, "mlp_bias", False)


def _no_window(config: Fields) -> None:
    """The engine computes these families without windows, so that training with them would be off policy."""
    require(config, "use_sliding_window", False)
    if windowed_layers(config, layer_count(config), ()):
        raise RecipeError("layer_types has 'sliding_attention', which is not supported with this architecture")


def _window(config: Fields, size: int, layers: Sequence[int], rope: Rope | None = None) -> Window | None:
    """`size` and `layers` are the family's where the file has none."""
    layers = windowed_layers(config, layer_count(config), layers)
    return Window(count(config, "sliding_window", size), layers, rope) if layers else None


def _latent(config: Fields) -> Extra:
    """Multi-head latent attention, and the softmax scale that YaRN changes there."""
    _no_biases(config)
    heads = count(config, "num_attention_heads")
    require(config, "num_key_value_heads", heads)
    latent = LatentAttention(
        query_rank=None if config.get("q_lora_rank", 0) is None else count(config, "q_lora_rank", 1536),
        kv_rank=count(config, "kv_lora_rank", 512),
        nope=count(config, "qk_nope_head_dim", 128),
        rope=count(config, "qk_rope_head_dim", 64),
        value=count(config, "v_head_dim", 128),
        interleaved=flag(config, "rope_interleave", True),
    )
    if latent.rope % 2:
        raise RecipeError(f"qk_rope_head_dim is {latent.rope}; rotary positions need an even number")
    require(config, "head_dim", latent.rope)  # what transformers calls so here
    rope = read_rope(config)
    scaling = rope.scaling
    if not isinstance(scaling, YarnScaling | None):
        raise RecipeError("only rope types 'default' and 'yarn' are supported with this architecture")
    if scaling is not None and not scaling.truncate:
        raise RecipeError("rope type 'yarn' with truncate false is not supported with this architecture")
    gain = yarn_gain(scaling.factor, scaling.mscale_all_dim) if scaling else 1.0
    head_dim = latent.nope + latent.rope
    return {
        "rope": rope,
        "latent": latent,
        "kv_heads": heads,
        "head_dim": head_dim,
        "softmax_scale": None if gain == 1 else gain**2 * head_dim**-0.5,
    }


def _expert_counts(config: Fields, experts: int, active: int | None) -> Extra:
    """transformers takes and writes the number of experts under other names than a family's first files did."""
    names = [name for name in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(name) is not None]
    counts = {count(config, name) for name in names} or {experts}
    if len(counts) > 1:
        raise RecipeError(f"{' and '.join(names)} are not the same number")
    total, chosen = counts.pop(), count(config, "num_experts_per_tok", active)
    if chosen > total:
        raise RecipeError(f"num_experts_per_tok is {chosen}, but there are only {total} experts")
    return {"count": total, "active": chosen}


def _leading_dense(config: Fields, *, first_dense: int, shared: int, ffn: int, scaling: float = 1.0) -> Extra:
    """DeepSeek's pattern, whose other arguments are what a file may leave out: dense layers first, a shared expert."""
    require(config, "moe_layer_freq", 1)
    width = count(config, "moe_intermediate_size", ffn)
    first = count(config, "first_k_dense_replace", first_dense, least=0)
    return {
        "ffn": width,
        "layers": tuple(range(first, layer_count(config))),
        "shared_ffn": width * count(config, "n_shared_experts", shared, least=0),
        "scaling": number(config, "routed_scaling_factor", scaling),
    }


def _sigmoid(config: Fields, *, n_group: int, topk_group: int) -> Extra:
    """DeepSeek-V3's router. Megatron normalizes sigmoid scores whatever it is told."""
    require(config, "scoring_func", "sigmoid")
    require(config, "topk_method", "noaux_tc")
    require(config, "norm_topk_prob", True)
    groups = _groups({"n_group": n_group, "topk_group": topk_group} | config, "two_best")
    return {"score": "sigmoid", "correction_bias": True, "groups": groups}


def _groups(config: Fields, scored_by: Literal["best", "two_best"]) -> ExpertGroups | None:
    """None if all groups are taken, which is as good as none."""
    total, active = count(config, "n_group"), count(config, "topk_group")
    if active >= total:
        return None
    return ExpertGroups(total, active, scored_by)


def check_experts(experts: Experts) -> None:
    """Raise RecipeError for a router that is no family's, or that Megatron would compute otherwise."""
    groups, active = experts.groups, experts.active
    if active == 1 and experts.normalized:
        raise RecipeError("num_experts_per_tok is 1, which is not supported where the chosen experts' weights sum to 1")
    if groups is None:
        return
    if experts.count % groups.count:
        raise RecipeError(f"{experts.count} experts cannot be divided into n_group {groups.count}")
    if active > groups.active * (experts.count // groups.count):
        raise RecipeError(f"topk_group {groups.active} groups have fewer experts than num_experts_per_tok {active}")
    if groups.scored_by == "two_best" and experts.count == groups.count:
        raise RecipeError(f"n_group {groups.count} groups have one expert each, but are scored by their two best")


def _mtp(config: Fields) -> int:
    name = "num_mtp_layers" if "num_mtp_layers" in config else "num_nextn_predict_layers"
    return count(config, name, 1, least=0)


ARCHITECTURES = {
    "LlamaForCausalLM": Family("llama", _llama),
    "Qwen2ForCausalLM": Family("qwen2", _qwen2, kv_heads=32),
    "Qwen3ForCausalLM": Family("qwen3", _qwen3, kv_heads=32, head_dim=128),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", _qwen3_moe, kv_heads=4),
    "MixtralForCausalLM": Family("mixtral", _mixtral, kv_heads=8),
    "DeepseekV2ForCausalLM": Family("deepseek_v2", _deepseek_v2),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", _deepseek_v3),
    "Glm4MoeForCausalLM": Family("glm4_moe", _glm4_moe, kv_heads=8),
    "GptOssForCausalLM": Family("gpt_oss", _gpt_oss, kv_heads=8, head_dim=64),
    "Gemma3ForCausalLM": Family(
        "gemma3", _gemma3, kv_heads=4, head_dim=256, tied=True, activation=("hidden_activation", "gelu_pytorch_tanh")
    ),
}

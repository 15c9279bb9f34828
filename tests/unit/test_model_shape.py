"""Reading config.json: each field is what transformers understands by the file, and what is not supported is named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig

from megarl.config import (
    ClampedSwiglu,
    ExpertGroups,
    Experts,
    LatentAttention,
    LinearScaling,
    Llama3Scaling,
    ModelShape,
    Rope,
    RopeScaling,
    Window,
    YarnScaling,
    read_model_shape,
)
from tests.families import FAMILIES, LLAMA3, YARN, family_config, meta_model

every_family = pytest.mark.parametrize("family", FAMILIES)


def read(directory: Path, config: dict[str, Any]) -> ModelShape:
    (directory / "config.json").write_text(json.dumps(config))
    return read_model_shape(directory)


def fields_of(family: str, **more: Any) -> dict[str, Any]:
    """The file's fields, as transformers writes them."""
    return json.loads(family_config(family, **more).to_json_string())


# --- the same as transformers


def scaling_of(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope["rope_type"]
    if kind == "linear":
        return LinearScaling(rope["factor"])
    if kind == "llama3":
        return Llama3Scaling(rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], 8192)
    if kind == "default":
        return None
    factor, (own, all_dim) = rope["factor"], (rope.get(name) or 0.0 for name in ("mscale", "mscale_all_dim"))
    attention = (0.1 * (own or 1.0) * math.log(factor) + 1) / (0.1 * all_dim * math.log(factor) + 1)
    truncate = rope.get("truncate", True)
    return YarnScaling(factor, 64, pytest.approx(attention), mscale_all_dim=all_dim, truncate=truncate)


def rope_of(rope: dict[str, Any]) -> Rope:
    return Rope(rope["rope_theta"], rope.get("partial_rotary_factor", 1.0), scaling_of(rope))


def experts_of(family: str, config: PreTrainedConfig) -> Experts | None:
    layers, first = range(config.num_hidden_layers), getattr(config, "first_k_dense_replace", 0)
    common = {"count": getattr(config, "num_local_experts", 8), "active": getattr(config, "num_experts_per_tok", 0)}
    leading = {
        "layers": tuple(layers[first:]),
        "shared_ffn": 16 * getattr(config, "n_shared_experts", 0),
        "scaling": getattr(config, "routed_scaling_factor", 1.0),
    }
    sigmoid = {"score": "sigmoid", "correction_bias": True, "normalized": True}
    match family:
        case "qwen3_moe":
            return Experts(**common, ffn=16, layers=tuple(layers))
        case "qwen3_moe_mixed":
            return Experts(**common, ffn=16, layers=(3,), normalized=False)
        case "mixtral":
            return Experts(**common, ffn=48, layers=tuple(layers))
        case "deepseek_v2" | "deepseek_v2_groups":
            return Experts(**common, ffn=16, **leading, normalized=False, groups=ExpertGroups(4, 2, "best"))
        case "deepseek_v2_lite":
            return Experts(**common, ffn=16, **leading, normalized=False)
        case "deepseek_v3" | "deepseek_v3_groups":
            return Experts(**common, ffn=16, **leading, **sigmoid, groups=ExpertGroups(2, 1, "two_best"))
        case "deepseek_v3_direct" | "glm4_moe":
            return Experts(**common, ffn=16, **leading, **sigmoid)
        case "gpt_oss":
            return Experts(**common, ffn=48, layers=tuple(layers), bias=True)
    return None


def latent_of(config: PreTrainedConfig) -> LatentAttention | None:
    if not hasattr(config, "kv_lora_rank"):
        return None
    return LatentAttention(
        query_rank=config.q_lora_rank,
        kv_rank=config.kv_lora_rank,
        nope=config.qk_nope_head_dim,
        rope=config.qk_rope_head_dim,
        value=config.v_head_dim,
        interleaved=getattr(config, "rope_interleave", True),
    )


@every_family
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_every_field_is_what_transformers_has(family: str, tied: bool, tmp_path: Path) -> None:
    config = family_config(family, tie_word_embeddings=tied)
    config.save_pretrained(tmp_path)
    attention = meta_model(config).model.layers[0].self_attn
    latent, gemma, oss = latent_of(config), family == "gemma3", family == "gpt_oss"
    ropes, windowed = (
        config.rope_parameters,
        [kind == "sliding_attention" for kind in getattr(config, "layer_types", [])],
    )
    query_key_dim = getattr(attention, "qk_head_dim", attention.head_dim if latent is None else None)
    window = Window(
        getattr(config, "sliding_window", None) or 0,
        tuple(layer for layer, its in enumerate(windowed) if its),
        rope_of(ropes["sliding_attention"]) if gemma else None,
    )
    ordinary = math.isclose(attention.scaling, query_key_dim**-0.5)
    expected = ModelShape(
        family={"llama3": "llama", "qwen2_yarn": "qwen2", "qwen3_moe_mixed": "qwen3_moe"}.get(
            family, family.removesuffix("_direct").removesuffix("_lite").removesuffix("_groups")
        ),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=query_key_dim,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        max_positions=config.max_position_embeddings,
        norm_epsilon=config.rms_norm_eps,
        rope=rope_of(ropes["full_attention"] if gemma else ropes),
        tied=tied,
        activation=ClampedSwiglu(0.5, 1.702) if oss else "gelu_tanh" if gemma else "silu",
        qkv_bias=latent is None and attention.k_proj.bias is not None,
        attention_output_bias=attention.o_proj.bias is not None,
        qk_norm=getattr(attention, "q_norm", None) is not None,
        softmax_scale=None if ordinary else pytest.approx(attention.scaling),
        sinks=hasattr(attention, "sinks"),
        window=window if any(windowed) else None,
        latent=latent,
        experts=experts_of(family, config),
        unit_norms=gemma,
        post_norms=gemma,
        embedding_scale=math.sqrt(32) if gemma else 1.0,
        mtp_layers=getattr(config, "num_mtp_layers", 0),
    )
    assert read_model_shape(tmp_path) == expected


@every_family
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_parameters_are_counted_as_transformers_counts(family: str, tied: bool, tmp_path: Path) -> None:
    config = family_config(family, tie_word_embeddings=tied)
    config.save_pretrained(tmp_path)
    shape, model = read_model_shape(tmp_path), meta_model(config)
    assert shape.parameters == model.num_parameters()
    stacked = [x.numel() for name, x in model.named_parameters() if ".experts." in name]
    idle = 0 if shape.experts is None else 1 - shape.experts.active / shape.experts.count
    assert shape.active_parameters == shape.parameters - idle * sum(stacked)


ARCHITECTURES = ["llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe"]


@pytest.mark.parametrize("family", [*ARCHITECTURES, "gpt_oss", "gemma3"])
def test_what_a_file_leaves_out_is_as_in_transformers(family: str, tmp_path: Path) -> None:
    kind, architecture, _ = FAMILIES[family]
    given = {"hidden_size": 4096, "vocab_size": 1000, "intermediate_size": 96, "num_attention_heads": 128}
    given |= {"num_hidden_layers": 5, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    if family == "deepseek_v2":
        given["num_experts_per_tok"] = 6
    named = {"architectures": [f"{architecture}ForCausalLM"]}
    full = json.loads(kind(**given, **named).to_json_string(use_diff=False))
    assert read(tmp_path, given | named) == read(tmp_path, full | named)


# --- spellings


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def gemma3_old() -> dict[str, Any]:
    older = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    return without(fields_of("gemma3"), "rope_parameters") | older


@pytest.mark.parametrize(
    ("family", "older"),
    [
        ("llama3", {"rope_theta": 500000.0, "rope_scaling": without(LLAMA3, "rope_theta")}),
        ("qwen2_yarn", {"rope_theta": 10000.0, "rope_scaling": {"type": "yarn", **without(YARN, "rope_type")}}),
        ("glm4_moe", {"rope_theta": 1000000, "partial_rotary_factor": 0.5, "rope_scaling": None}),
        ("deepseek_v3", {"rope_theta": 10000, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    ],
)
def test_older_rope_settings_say_the_same(family: str, older: dict[str, Any], tmp_path: Path) -> None:
    new = fields_of(family)
    assert read(tmp_path, without(new, "rope_parameters", "partial_rotary_factor") | older) == read(tmp_path, new)


def test_gemmas_older_settings_say_the_same(tmp_path: Path) -> None:
    assert read(tmp_path, gemma3_old()) == read(tmp_path, fields_of("gemma3"))
    pattern = without(gemma3_old(), "layer_types") | {"sliding_window_pattern": 2}
    window = read(tmp_path, pattern).window
    assert window is not None
    assert window.layers == (0, 2)


def test_experts_are_counted_under_either_name(tmp_path: Path) -> None:
    new = fields_of("qwen3_moe")
    assert "num_local_experts" in new  # what transformers 5 writes; the files of the model's authors have num_experts
    assert read(tmp_path, without(new, "num_local_experts") | {"num_experts": 8}) == read(tmp_path, new)


@pytest.mark.parametrize(
    ("settings", "attention_factor"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"mscale": 2.0}, 0.1 * math.log(4) + 1),
        ({"mscale": 0, "mscale_all_dim": 2.0}, 0.1 * math.log(4) + 1),
        ({"mscale": 1.0, "mscale_all_dim": 2.0}, (0.1 * math.log(4) + 1) / (0.2 * math.log(4) + 1)),
        ({"mscale": 1.0, "mscale_all_dim": 2.0, "attention_factor": 1.5}, 1.5),
    ],
)
def test_yarns_attention_factor(settings: dict[str, Any], attention_factor: float, tmp_path: Path) -> None:
    scaling = read(tmp_path, fields_of("qwen2", rope_parameters=YARN | settings)).rope.scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.attention_factor == pytest.approx(attention_factor)


def test_unused_groups_are_none(tmp_path: Path) -> None:
    for groups in ({"n_group": 1, "topk_group": 1}, {"n_group": 2, "topk_group": 2}):
        experts = read(tmp_path, fields_of("deepseek_v3", **groups)).experts
        assert experts is not None
        assert experts.groups is None


def test_only_dense_layers_are_no_experts(tmp_path: Path) -> None:
    assert read(tmp_path, fields_of("deepseek_v3", first_k_dense_replace=4)).experts is None
    assert read(tmp_path, fields_of("qwen3_moe", mlp_only_layers=[0, 1, 2, 3])).experts is None


# --- real models, by the sizes in their files

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "vocab_size": 151936,
}
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 32000,
}


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [(DEEPSEEK_V3, 671.0, 37.6), (QWEN3_30B_A3B, 30.5, 3.3), (MIXTRAL_8X7B, 46.7, 12.9)],
    ids=["DeepSeek-V3", "Qwen3-30B-A3B", "Mixtral-8x7B"],
)
def test_known_models_have_their_known_sizes(
    config: dict[str, Any], total: float, active: float, tmp_path: Path
) -> None:
    """Billions, as published; DeepSeek's active number is given as 37."""
    shape = read(tmp_path, config)
    assert shape.parameters / 1e9 == pytest.approx(total, abs=0.06)
    assert shape.active_parameters / 1e9 == pytest.approx(active, abs=0.06)

"""What Megatron is told of each family: its own configuration classes take it, and it is what the model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    YarnRotaryEmbedding,
    _yarn_get_concentration_factor,
    _yarn_get_mscale,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from transformers import AutoModelForCausalLM

from megarl.config import ModelShape, read_model_shape
from megarl.model_engine.architecture import make_config, model_arguments
from tests.families import FAMILIES, YARN, family_config, meta_model

MIXTURES = {"qwen3_moe", "qwen3_moe_mixed", "mixtral", "glm4_moe", "gpt_oss"}
OTHERS = {"moe_token_dispatcher_type": "alltoall", "bias_activation_fusion": False}


def shape_of(family: str, path: Path, **more: Any) -> ModelShape:
    family_config(family, **more).save_pretrained(path)
    return read_model_shape(path)


def config_of(family: str, path: Path, **more: Any) -> TransformerConfig:
    return make_config(shape_of(family, path, **more), **OTHERS)


@pytest.mark.parametrize("family", FAMILIES)
def test_megatrons_configuration_takes_every_family(family: str, tmp_path: Path) -> None:
    config = config_of(family, tmp_path)
    assert isinstance(config, MLATransformerConfig) == family.startswith("deepseek")
    assert (config.num_moe_experts is not None) == (family in MIXTURES or family.startswith("deepseek"))
    assert config.moe_router_bias_update_rate == (1e-3 if config.num_moe_experts is None else 0)


# what a family adds to a plain Llama, in Megatron's words
WORDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"add_qkv_bias": False, "qk_layernorm": False, "kv_channels": 8, "layernorm_epsilon": 1e-5}),
    ("qwen2", {"add_qkv_bias": True, "add_bias_linear": False, "activation_func": F.silu}),
    ("qwen3", {"qk_layernorm": True, "kv_channels": 16, "num_query_groups": 2, "gated_linear_unit": True}),
    ("qwen3_moe", {"moe_router_pre_softmax": False, "moe_layer_freq": [1] * 4, "moe_ffn_hidden_size": 16}),
    ("qwen3_moe_mixed", {"moe_router_pre_softmax": True, "moe_layer_freq": [0, 0, 0, 1], "ffn_hidden_size": 48}),
    ("mixtral", {"moe_router_score_function": "softmax", "moe_router_topk": 2, "num_moe_experts": 8}),
    ("deepseek_v2", {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 16.0}),
    ("deepseek_v2_lite", {"q_lora_rank": None, "moe_router_num_groups": None, "moe_router_pre_softmax": True}),
    (
        "deepseek_v3",
        {
            "q_lora_rank": 16,
            "kv_lora_rank": 24,
            "qk_head_dim": 12,
            "qk_pos_emb_head_dim": 8,
            "v_head_dim": 16,
            "qk_layernorm": False,
            "rope_type": "yarn",
            "rotary_scaling_factor": 4.0,
            "mscale_all_dim": 1.0,
            "moe_layer_freq": [0, 1, 1, 1],
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": 2.5,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    ("deepseek_v3_direct", {"rope_type": "rope", "rotary_base": 50000.0, "moe_router_group_topk": None}),
    ("glm4_moe", {"add_qkv_bias": True, "qk_layernorm": True, "moe_router_enable_expert_bias": True}),
    (
        "gpt_oss",
        {
            "add_bias_linear": True,
            "softmax_type": "learnable",
            "window_size": (7, 0),
            "window_attn_skip_freq": [1, 0, 1, 0],
            "activation_func_clamp_value": 0.5,
            "glu_linear_offset": 1.0,
            "yarn_correction_range_round_to_int": False,
        },
    ),
    ("gemma3", {"softmax_scale": 20**-0.5, "window_attn_skip_freq": [1, 1, 0, 1], "window_size": (7, 0)}),
]


@pytest.mark.parametrize(("family", "expected"), WORDS, ids=[family for family, _ in WORDS])
def test_the_words_of_each_family(family: str, expected: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(family, tmp_path)
    assert {name: getattr(config, name) for name in expected} == expected


def test_activations_are_transformers_own(tmp_path: Path) -> None:
    x = torch.linspace(-4, 4, 33)
    gelu = config_of("gemma3", tmp_path / "gemma3").activation_func
    assert torch.equal(gelu(x), F.gelu(x, approximate="tanh"))
    swiglu = config_of("gpt_oss", tmp_path / "gpt_oss", swiglu_alpha=1.5).activation_func
    assert torch.allclose(swiglu(x), x * torch.sigmoid(x * 1.5))


@pytest.mark.parametrize("settings", [{}, {"mscale": 1.0, "mscale_all_dim": 2.0}, {"attention_factor": 1.4}])
@pytest.mark.parametrize("family", ["qwen2", "deepseek_v3"])
def test_yarns_factors_are_transformers_own(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """That of sines and cosines, and that of latent attention's softmax."""
    theirs = meta_model(family_config(family, rope_parameters=YARN | settings)).model
    config: Any = config_of(family, tmp_path, rope_parameters=YARN | settings)
    if family == "qwen2":
        factors = (config.yarn_rotary_scaling_factor, config.yarn_mscale, config.yarn_mscale_all_dim)
    else:
        factors = (config.rotary_scaling_factor, config.mscale, config.mscale_all_dim)
        softmax_scale = _yarn_get_mscale(config.rotary_scaling_factor, config.mscale_all_dim) ** 2 / 20**0.5
        assert softmax_scale == pytest.approx(theirs.layers[0].self_attn.scaling)
        shape = read_model_shape(tmp_path)
        assert (shape.softmax_scale or 20**-0.5) == pytest.approx(softmax_scale)
    assert _yarn_get_concentration_factor(*factors) == pytest.approx(theirs.rotary_emb.attention_scaling)


@pytest.mark.parametrize(
    ("family", "scaling"),
    [
        ("llama", {}),
        ("llama3", {}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0}}),
        ("glm4_moe", {}),
        ("qwen2_yarn", {}),
        ("gpt_oss", {}),
    ],
)
def test_megatron_rotates_as_transformers(
    family: str, scaling: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The angles of 200 positions, made as GPTModel makes them, but on a CPU."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    config, shape = config_of(family, tmp_path, **scaling), read_model_shape(tmp_path)
    theirs = AutoModelForCausalLM.from_config(family_config(family, **scaling)).model.rotary_emb
    arguments = model_arguments(shape)
    rope = {name: arguments.pop(name) for name in ("rotary_base", "rotary_percent")}
    interpolation = arguments.get("seq_len_interpolation_factor")
    common = {"kv_channels": config.kv_channels, "use_cpu_initialization": True, **rope}
    if arguments["position_embedding_type"] == "yarn":
        names = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings")
        yarn = {name: getattr(config, f"yarn_{name}") for name in names}
        yarn["scaling_factor"] = config.yarn_rotary_scaling_factor
        yarn["correction_range_round_to_int"] = config.yarn_correction_range_round_to_int
        angles, _ = YarnRotaryEmbedding(**common, **yarn).get_emb(200)
    else:
        scaled = {name: arguments[name] for name in ("rope_scaling", "rope_scaling_factor") if name in arguments}
        angles = RotaryEmbedding(**common, **scaled, seq_len_interpolation_factor=interpolation).get_emb(200)
    expected = torch.outer(torch.arange(200.0), theirs.inv_freq)
    assert torch.allclose(angles[:, 0, 0, : expected.shape[1]], expected, rtol=1e-5, atol=1e-5)


def test_latent_attention_has_its_rope_in_the_configuration(tmp_path: Path) -> None:
    assert model_arguments(shape_of("deepseek_v3", tmp_path)) == {
        "max_sequence_length": 256,
        "share_embeddings_and_output_weights": False,
        "position_embedding_type": "rope",
    }

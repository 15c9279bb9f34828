"""A config.json with what is not supported is refused in one line that names it, whatever it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config import ModelShape, RecipeError, read_model_shape
from tests.families import FAMILIES, LLAMA3, YARN, family_config

every_family = pytest.mark.parametrize("family", FAMILIES)


def read(directory: Path, config: dict[str, Any]) -> ModelShape:
    (directory / "config.json").write_text(json.dumps(config))
    return read_model_shape(directory)


def fields_of(family: str) -> dict[str, Any]:
    """The file's fields, as transformers writes them."""
    return json.loads(family_config(family).to_json_string())


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_parameters": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported; only"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling and rope_parameters are both given"),
    ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "'default', 'linear', 'llama3' and 'yarn' are"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "field 'factor' is missing; expected a positive number"),
    ("llama", {"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}, "= (2.0, 4.0, 8192) is not supported; only (1,"),
    ("llama", {"rope_parameters": YARN | {"factor": 1.0}}, "'yarn' with factor 1 is not supported; expected more"),
    ("llama", {"rope_parameters": YARN | {"truncate": "no"}}, "truncate is 'no'; expected true or false"),
    ("llama", {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, "is 0.5, which is not supported; only 1 is"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor is 1.5, which is not"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "only 1 is with this architecture or rope type"),
    ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "which is not supported; expected at most 1"),
    ("llama", {"rope_parameters": {"rope_theta": 1.0}}, "rope_theta is 1; expected more than 1"),
    ("llama", {"architectures": ["a\nb"]}, "architectures is ['a\\nb']; expected a list of one of LlamaForCausalLM"),
    ("llama", {"mlp_bias": True}, "mlp_bias is true, which is not supported; only false is"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu', which is not supported; only 'silu' is"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "the weights are quantized"),
    ("llama", {"vision_config": {}}, "LlamaForCausalLM has vision_config; models of more than text are not supported"),
    ("qwen2", {"use_sliding_window": True}, "use_sliding_window is true, which is not supported; only false is"),
    ("qwen3", {"attention_bias": True}, "attention_bias is true, which is not supported; only false is"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 4}, "layer_types has 'sliding_attention', which is not"),
    ("qwen3", {"layer_types": ["full_attention"]}, "expected a list of 4, each full_attention or sliding_attention"),
    ("qwen3_moe", {"attention_bias": True}, "attention_bias is true, which is not supported"),
    ("qwen3_moe", {"mlp_only_layers": [4]}, "mlp_only_layers is [4]; expected a list of layers from 0 to 3"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but there are only 8 experts"),
    ("qwen3_moe", {"num_experts_per_tok": 1}, "is 1, which is not supported where the chosen experts' weights sum"),
    ("qwen3_moe", {"num_experts": 16}, "num_experts and num_local_experts are not the same number"),
    ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob is 1; expected true or false"),
    ("mixtral", {"sliding_window": 4096}, "sliding_window is 4096, which is not supported; only null is"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported with this architecture"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is true, which is not supported; only false is"),
    ("deepseek_v2", {"rope_interleave": False}, "rope_interleave is false, which is not supported; only true is"),
    ("deepseek_v3", {"head_dim": 20}, "head_dim is 20, which is not supported; only 8 is"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid', which is not supported"),
    ("deepseek_v2", {"n_group": 3}, "8 experts cannot be divided into n_group 3"),
    ("deepseek_v2", {"topk_group": 1}, "topk_group 1 groups have fewer experts than num_experts_per_tok 3"),
    ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq is 2, which is not supported; only 1 is"),
    ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads is 2, which is not supported; only 4 is"),
    ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob is false, which is not supported; only true is"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax', which is not supported; only 'sigmoid'"),
    ("deepseek_v3", {"n_group": 8, "topk_group": 2}, "n_group 8 groups have one expert each, but are scored by their"),
    ("deepseek_v3", {"attention_bias": True}, "attention_bias is true, which is not supported; only false is"),
    ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7; rotary positions need an even number"),
    ("deepseek_v3", {"rope_parameters": YARN | {"truncate": False}}, "'yarn' with truncate false is not supported"),
    (
        "deepseek_v3",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        "only rope types 'default' and 'yarn'",
    ),
    ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob is false, which is not supported; only true is"),
    ("glm4_moe", {"n_shared_experts": -1}, "n_shared_experts is -1; expected a whole number of at least 0"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias is false, which is not supported; only true is"),
    ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "the weights are quantized"),
    (
        "gemma3",
        {"architectures": ["Gemma3ForConditionalGeneration"]},
        "Gemma3ForConditionalGeneration is not supported",
    ),
    ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu', which is not supported; only 'gelu_pyt"),
    ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0, which is not supported; only null"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true, which is not supported"),
    ("gemma3", {"rope_parameters": {"rope_theta": 1e6}}, "expected an object for full_attention and one for sliding"),
    ("gemma3", {"rope_parameters": {"full_attention": YARN}}, "rope_parameters.full_attention: only rope types"),
    ("gemma3", {"rope_parameters": {"sliding_attention": YARN}}, "rope_type is 'yarn', which is not supported; only"),
]


@pytest.mark.parametrize(("family", "change", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_not_supported_is_refused_by_name(
    family: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, fields_of(family) | change)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/config.json: ")
    assert len(str(caught.value).splitlines()) == 1


@every_family
def test_any_field_is_taken_or_explained(family: str, tmp_path: Path) -> None:
    """Values of every kind in every field: a shape or one line that says what is wrong, never another error."""
    fields = fields_of(family)
    told = [
        complaint(tmp_path, fields | {name: value})
        for name in fields
        for value in (None, True, 0, -1, 3, 7.5, "8", "", [], [1], {}, {"a": 1}, 1e400, 10**400, ["a\n"])
    ]
    assert max(len(text.splitlines()) for text in told) == 1


@pytest.mark.parametrize("text", ["", "[]", "1" * 5000, "[" * 100_000, '{"architectures": [' + "9" * 5000 + "]}"])
def test_any_file_is_explained(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RecipeError) as caught:
        read_model_shape(tmp_path)
    assert len(str(caught.value).splitlines()) == 1


ROPES = {
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 10.0, "factor": 4.0, "original_max_position_embeddings": 8},
    "rope_scaling": {"rope_type": "llama3", "factor": 4.0, "rope_theta": 10.0},
}


@every_family
@pytest.mark.parametrize("field", ROPES)
def test_any_rope_is_taken_or_explained(field: str, family: str, tmp_path: Path) -> None:
    fields = {name: value for name, value in fields_of(family).items() if name != "rope_parameters"}
    names = ("factor", "rope_theta", "rope_type", "type", "mscale", "mscale_all_dim", "attention_factor", "beta_fast")
    told = [
        complaint(tmp_path, fields | {field: ROPES[field] | {"mscale": 1.0, "mscale_all_dim": 1.0, name: value}})
        for name in names
        for value in (None, True, 0, -1, "8", [], {}, 1e308, 1e-308, 10**400)
    ]
    assert max(len(text.splitlines()) for text in told) == 1


def complaint(directory: Path, config: dict[str, Any]) -> str:
    try:
        read(directory, config)
    except RecipeError as error:
        return str(error)
    return ""

"""A small model of each supported family, with the structure of the real ones: every test of a family starts here.

4 layers, 4 heads, 2 key-value heads and 8 experts, so that they split over tensor 2 and 4, expert 2 and pipeline 2 and
4; the vocabulary divides by none of these.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from megarl.config import HeadName

VOCAB = 101
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
DENSE = SIZES | {"intermediate_size": 48}
DEEPSEEK = SIZES | {
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


QWEN3_MOE = DENSE | {
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
DEEPSEEK_V2 = DEEPSEEK | {
    "q_lora_rank": 16,
    "n_shared_experts": 2,
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 16.0,
    "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
DEEPSEEK_V3 = DEEPSEEK | {
    "q_lora_rank": 16,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}
GLM4_MOE = DENSE | {
    "head_dim": 16,
    "attention_bias": True,
    "use_qk_norm": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
}
GPT_OSS = DENSE | {
    "head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "swiglu_limit": 0.5,
    "sliding_window": 8,
    "rope_parameters": YARN | {"rope_theta": 150000.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
}
GEMMA3 = DENSE | {
    "head_dim": 24,
    "query_pre_attn_scalar": 20,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}

FAMILIES: dict[str, tuple[type[PreTrainedConfig], str, dict[str, Any]]] = {
    "llama": (LlamaConfig, "Llama", DENSE | {"rms_norm_eps": 1e-5}),
    "llama3": (LlamaConfig, "Llama", DENSE | {"rope_parameters": LLAMA3, "max_position_embeddings": 131072}),
    "qwen2": (Qwen2Config, "Qwen2", DENSE),
    "qwen2_yarn": (Qwen2Config, "Qwen2", DENSE | {"rope_parameters": YARN}),
    "qwen3": (Qwen3Config, "Qwen3", DENSE | {"head_dim": 16}),
    "qwen3_moe": (Qwen3MoeConfig, "Qwen3Moe", QWEN3_MOE),
    # dense layers among those with experts, whose weights are not normalized
    "qwen3_moe_mixed": (
        Qwen3MoeConfig,
        "Qwen3Moe",
        QWEN3_MOE | {"mlp_only_layers": [1], "decoder_sparse_step": 2, "norm_topk_prob": False},
    ),
    "mixtral": (MixtralConfig, "Mixtral", DENSE | {"num_local_experts": 8}),
    "deepseek_v2": (DeepseekV2Config, "DeepseekV2", DEEPSEEK_V2),
    "deepseek_v2_lite": (
        DeepseekV2Config,
        "DeepseekV2",
        DEEPSEEK_V2
        | {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
    ),
    # as the real one has it, more than one expert for each active group
    "deepseek_v2_groups": (DeepseekV2Config, "DeepseekV2", DEEPSEEK_V2 | {"num_experts_per_tok": 4}),
    "deepseek_v3": (DeepseekV3Config, "DeepseekV3", DEEPSEEK_V3),
    # direct queries, rotated halves, plain rope, no groups
    "deepseek_v3_direct": (
        DeepseekV3Config,
        "DeepseekV3",
        DEEPSEEK_V3
        | {"q_lora_rank": None, "rope_interleave": False, "n_group": 1, "rope_parameters": {"rope_theta": 50000.0}},
    ),
    "deepseek_v3_groups": (DeepseekV3Config, "DeepseekV3", DEEPSEEK_V3 | {"num_experts_per_tok": 3}),
    "glm4_moe": (Glm4MoeConfig, "Glm4Moe", GLM4_MOE),
    "gpt_oss": (GptOssConfig, "GptOss", GPT_OSS),
    "gemma3": (Gemma3TextConfig, "Gemma3", GEMMA3),
}
"""Name to transformers' class of the configuration, what its architecture's name begins with, and the fields."""

AUTO: dict[HeadName, Any] = {
    "policy": AutoModelForCausalLM,
    "critic": AutoModelForTokenClassification,
    "reward": AutoModelForSequenceClassification,
}
"""transformers' loader of the models with each head."""


def family_config(name: str, **more: Any) -> PreTrainedConfig:
    """transformers' configuration of the family's small model; `more` replaces single fields."""
    kind, architecture, fields = FAMILIES[name]
    return kind(**deepcopy(fields) | {"architectures": [f"{architecture}ForCausalLM"]} | more)


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@torch.no_grad()
def write_model(
    name: str, directory: Path, *, seed: int = 0, head: HeadName = "policy", **more: Any
) -> PreTrainedModel:
    """Write a random model of the family as transformers does, and return it, in float32 and with plain attention.

    Norms, biases, sinks and routers are moved from their initial values, so that none can be lost unseen. Among
    processes that form a group, only the first writes.
    """
    torch.manual_seed(seed)
    model = AUTO[head].from_config(family_config(name, **more), attn_implementation="eager").float().eval()
    for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, torch.nn.Parameter):
            spread = 0.3 if key.endswith(("gate.weight", "router.weight", "sinks")) else 0.05
            tensor.add_(torch.randn_like(tensor) * spread)
        elif key.endswith("e_score_correction_bias"):
            tensor.copy_(torch.randn_like(tensor) * 0.1)
    model.save_pretrained(directory)
    return model

"""A whole small job on disk that launch/train.py --check accepts: recipes, data, and a model that is only a shape."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
from safetensors.numpy import save_file

from megarl.data import carry_addition, write_rows

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "vocab_size": 512,
    "tie_word_embeddings": True,
}
COMMON = "steps: 4\nrun_dir: run\nmodel: {path: model}\noptimizer: {learning_rate: 1e-4}\n"
SFT = f"{COMMON}type: sft\ndata: {{train: demonstrations.jsonl}}\nbatch: {{sequences: 8}}\n"
RL = f"""{COMMON}type: rl
data: {{train: train.jsonl, test: test.jsonl}}
batch: {{prompts: 2, group_size: 4}}
rollout: {{max_new_tokens: 32}}
reward: {{sources: {{answer: {{type: exact_match}}}}}}
"""


def write_small_job(path: Path) -> Path:
    """Write rl.yaml, sft.yaml, model/ and the data; the recipes name them relative to `path`."""
    carry_addition.build_tokenizer().save_pretrained(path / "model")
    (path / "model/config.json").write_text(json.dumps(CONFIG))
    save_file({"model.norm.weight": numpy.zeros(64, numpy.float32)}, path / "model/model.safetensors")
    demonstrations = carry_addition.demonstrations(3, worked=5, mixed=0, direct=0, max_digits=2)
    write_rows(path / "demonstrations.jsonl", demonstrations)
    write_rows(path / "train.jsonl", carry_addition.problems(1, 20, 4))
    write_rows(path / "test.jsonl", carry_addition.problems(2, 5, 4, held_out=True))
    (path / "rl.yaml").write_text(RL)
    (path / "sft.yaml").write_text(SFT)
    return path

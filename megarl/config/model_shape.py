"""What a Hugging Face config.json says of the model: the numbers that layouts divide and Megatron needs.

Reads JSON only, so that a recipe is checked on a login node before any model is built.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.errors import RecipeError

FAMILIES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


@dataclass(frozen=True)
class ModelShape:
    """The dense decoder of a Hugging Face directory; sizes in elements."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    norm_epsilon: float
    rope_theta: float
    tied: bool

    def padded_vocab(self, tensor: int) -> int:
        """Vocabulary rows so that each of `tensor` ranks has the same number of them."""
        return -(-self.vocab // tensor) * tensor

    @property
    def parameters(self) -> int:
        """Weights of the matrices: embeddings, attention and MLP (norms and biases left out)."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.ffn
        return self.layers * layer + self.vocab * self.hidden * (1 if self.tied else 2)


def read_model_shape(path: Path) -> ModelShape:
    """Read `path`/config.json.

    Raises RecipeError: no such directory or file, not JSON, a field missing, or an architecture that is not supported.
    """
    file = path / "config.json"
    if not path.is_dir():
        raise RecipeError(
            f"model.path: no directory {path}; give a Hugging Face directory with config.json and weights"
        )
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise RecipeError(f"model.path: {path} has no config.json; it is not a Hugging Face directory") from None
    except json.JSONDecodeError as error:
        raise RecipeError(f"{file}: line {error.lineno} is not JSON: {error.msg}") from None
    try:
        return _shape(config, file)
    except KeyError as error:
        raise RecipeError(f"{file}: field {error.args[0]!r} is missing") from None


def _shape(config: dict[str, Any], file: Path) -> ModelShape:
    architecture = (config.get("architectures") or ["none given"])[0]
    if architecture not in FAMILIES:
        raise RecipeError(f"{file}: architecture {architecture} is not supported; known are {', '.join(FAMILIES)}")
    # transformers 5 keeps all rope settings in rope_parameters; older files have rope_theta and rope_scaling beside it
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise RecipeError(f"{file}: rope type {kind!r} is not supported; only 'default' is")
    if config.get("hidden_act", "silu") != "silu":
        raise RecipeError(f"{file}: hidden_act {config['hidden_act']!r} is not supported; only 'silu' is")
    for flag in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if config.get(flag):
            raise RecipeError(f"{file}: {flag} is true, which is not supported")
    heads = config["num_attention_heads"]
    return ModelShape(
        family=FAMILIES[architecture],
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        ffn=config["intermediate_size"],
        vocab=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        norm_epsilon=config["rms_norm_eps"],
        rope_theta=float(rope["rope_theta"]),
        tied=bool(config.get("tie_word_embeddings", False)),
    )

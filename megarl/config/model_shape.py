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
DEFAULT_ROPE_THETA = 10_000.0  # what transformers takes for these families when a file names none


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
    experts: None = None

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

    Raises RecipeError: no such directory or file, not JSON, a field missing or wrong, or a model that is not supported.
    """
    file = path / "config.json"
    if not path.is_dir():
        raise RecipeError(
            f"model.path: no directory {path}; expected a Hugging Face directory with config.json, *.safetensors and"
            " the tokenizer (nothing is downloaded)"
        )
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(
            f"model.path: cannot read {file}: {error.strerror}; is it a Hugging Face directory?"
        ) from None
    except (UnicodeDecodeError, RecursionError):
        raise RecipeError(f"{file}: not JSON; expected the model's configuration") from None
    except json.JSONDecodeError as error:
        raise RecipeError(f"{file}: line {error.lineno} is not JSON: {error.msg}") from None
    if not isinstance(config, dict):
        raise RecipeError(f"{file}: expected an object with the model's configuration, found {config!r:.60}")
    try:
        return _shape(config)
    except RecipeError as error:
        raise RecipeError(f"{file}: {error}") from None


def _shape(config: dict[str, Any]) -> ModelShape:
    family = _family(config)
    _refuse_variants(config)
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise RecipeError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if config.get("head_dim") is None and hidden % heads:
        raise RecipeError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is missing"
        )
    head_dim = _count(config, "head_dim", default=hidden // heads)
    if head_dim % 2:
        raise RecipeError(f"heads of {head_dim} elements are not supported; rotary positions need an even number")
    return ModelShape(
        family=family,
        layers=_count(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=_count(config, "intermediate_size"),
        vocab=_count(config, "vocab_size"),
        max_positions=_count(config, "max_position_embeddings"),
        norm_epsilon=_number(config, "rms_norm_eps"),
        rope_theta=_rope_theta(config),
        tied=_tied(config),
    )


def _family(config: dict[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise RecipeError(f"architectures is {names!r:.60}; expected a list of one of {', '.join(FAMILIES)}")
    if str(names[0]) not in FAMILIES:
        raise RecipeError(f"architecture {names[0]} is not supported; known are {', '.join(FAMILIES)}")
    return FAMILIES[str(names[0])]


def _refuse_variants(config: dict[str, Any]) -> None:
    """What these architectures may have and megarl does not compute."""
    if config.get("hidden_act", "silu") != "silu":
        raise RecipeError(f"hidden_act {config['hidden_act']!r:.60} is not supported; only 'silu' is")
    for flag in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if config.get(flag):
            raise RecipeError(f"{flag} is {json.dumps(config[flag])}, which is not supported; only false is")
    if config.get("quantization_config"):
        raise RecipeError("the weights are quantized (quantization_config), which is not supported; take the original")


def _tied(config: dict[str, Any]) -> bool:
    value = config.get("tie_word_embeddings", False)
    if not isinstance(value, bool):
        raise RecipeError(f"tie_word_embeddings is {value!r:.60}; expected true or false")
    return value


def _rope_theta(config: dict[str, Any]) -> float:
    """transformers 5 keeps all rope settings in rope_parameters; older files have rope_theta and rope_scaling."""
    settings: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = config.get(name) or {}
        if not isinstance(value, dict):
            raise RecipeError(f"{name} is {value!r:.60}; expected an object")
        settings |= value
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind != "default":
        raise RecipeError(f"rope type {kind!r:.60} is not supported; only 'default' is")
    if {**config, **settings}.get("partial_rotary_factor") not in (None, 1.0):
        raise RecipeError("partial_rotary_factor is not 1, which is not supported")
    if config.get("rope_parameters") or config.get("rope_theta") is not None:
        return _number({"rope_theta": config.get("rope_theta"), **settings}, "rope_theta")
    return DEFAULT_ROPE_THETA


def _count(config: dict[str, Any], name: str, default: int | None = None) -> int:
    value = default if config.get(name) is None else config[name]
    if value is None:
        raise RecipeError(f"field {name!r} is missing; expected a positive whole number")
    if type(value) is not int or value < 1:
        raise RecipeError(f"{name} is {value!r:.60}; expected a positive whole number")
    return value


def _number(config: dict[str, Any], name: str) -> float:
    value = config.get(name)
    if value is None:
        raise RecipeError(f"field {name!r} is missing; expected a positive number")
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise RecipeError(f"{name} is {value!r:.60}; expected a positive number")
    return float(value)

"""Reading a config.json: the file itself, and the sizes that all families have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.config.errors import RecipeError
from megarl.config.model.families import ARCHITECTURES, Family, check_experts
from megarl.config.model.fields import Fields, count, flag, layer_count, number, require, section
from megarl.config.model.heads import HeadName, PolicyHead, read_head, split_architecture
from megarl.config.model.types import ModelShape


def read_model_shape(path: Path, head: HeadName = "policy", *, fp8: bool = False) -> ModelShape:
    """Read `path`/config.json, of a model that is to have `head`; `fp8`: its weights may be block-quantized to FP8.

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
    except json.JSONDecodeError as error:
        raise RecipeError(f"{file}: line {error.lineno} is not JSON: {error.msg}") from None
    except (ValueError, RecursionError):  # not UTF-8, a number of thousands of digits, too deep
        raise RecipeError(f"{file}: not JSON; expected the model's configuration") from None
    if not isinstance(config, dict):
        raise RecipeError(f"{file}: expected an object with the model's configuration, found {config!r:.60}")
    try:
        return _shape(config, path, head, fp8)
    except RecipeError as error:
        raise RecipeError(f"{file}: {error}") from None
    except (OverflowError, MemoryError) as error:
        raise RecipeError(f"{file}: a number is too large for a model ({error}); correct it") from None


def _shape(config: Fields, directory: Path, wanted: HeadName, fp8: bool) -> ModelShape:
    decoder, stored = _architecture(config)
    family = ARCHITECTURES[f"{decoder}ForCausalLM"]
    require(config, *family.activation)
    if config.get("quantization_config"):
        _check_quantization(section(config, "quantization_config").get("quant_method"), fp8)
    extra = family.read(config)
    if extra.get("experts") is not None:
        check_experts(extra["experts"])
    head = read_head(config, directory, decoder, stored, wanted)
    sizes: dict[str, Any] = {
        "layers": layer_count(config),
        "hidden": count(config, "hidden_size"),
        "heads": count(config, "num_attention_heads"),
        "ffn": count(config, "intermediate_size"),
        "vocab": count(config, "vocab_size"),
        "max_positions": count(config, "max_position_embeddings"),
        "norm_epsilon": number(config, "rms_norm_eps"),
        "head": head,
        "tied": flag(config, "tie_word_embeddings", family.tied) and isinstance(head, PolicyHead),
    }
    if extra.get("latent") is None:
        sizes |= _head_sizes(config, family)
    return ModelShape(family=family.name, **sizes, **extra)


def _check_quantization(method: Any, fp8: bool) -> None:
    if method != "fp8":
        raise RecipeError(f"the weights are quantized ({method!r:.60}), which is not supported; take the original")
    if not fp8:
        raise RecipeError(
            "the weights are quantized to FP8; tools/convert_checkpoint.py export makes a bfloat16 directory of them"
        )


def _architecture(config: Fields) -> tuple[str, HeadName]:
    """The decoder, such as Llama, and the head of the checkpoint."""
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not str(names[0]).isidentifier():
        raise RecipeError(f"architectures is {names!r:.60}; expected a list of one of {', '.join(ARCHITECTURES)}")
    name = str(names[0])
    if other := sorted(config.keys() & {"audio_config", "text_config", "vision_config"}):
        raise RecipeError(f"architecture {name} has {other[0]}; models of more than text are not supported")
    found = split_architecture(name, (policy.removesuffix("ForCausalLM") for policy in ARCHITECTURES))
    if found is None:
        raise RecipeError(f"architecture {name} is not supported; known are {', '.join(ARCHITECTURES)}")
    return found


def _head_sizes(config: Fields, family: Family) -> dict[str, int]:
    """A null is transformers' way to say "as many as heads" and "hidden / heads", whatever the family's default."""
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    kv_heads = count(config, "num_key_value_heads", _default(config, "num_key_value_heads", family.kv_heads, heads))
    if heads % kv_heads:
        raise RecipeError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    default = _default(config, "head_dim", family.head_dim, None)
    if config.get("head_dim") is None and default is None and hidden % heads:
        raise RecipeError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is missing"
        )
    head_dim = count(config, "head_dim", default or hidden // heads)
    if head_dim % 2:
        raise RecipeError(f"heads of {head_dim} elements are not supported; rotary positions need an even number")
    return {"kv_heads": kv_heads, "head_dim": head_dim}


def _default(config: Fields, name: str, family: int | None, otherwise: int | None) -> int | None:
    return otherwise if family is None or name in config else family

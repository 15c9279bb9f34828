"""What a model makes of its last hidden states: which of transformers' classes have that head, and their config.json.

A plain language model may become a critic or a reward model, and a reward model a critic; what their heads then lack
starts as zeros, the same on all ranks and the usual start of a critic.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from megarl.config.errors import RecipeError
from megarl.config.model.fields import Fields, count, require

HeadName = Literal["policy", "critic", "reward"]


@dataclass(frozen=True)
class PolicyHead:
    """Logits over the vocabulary."""

    name: ClassVar[HeadName] = "policy"


@dataclass(frozen=True)
class CriticHead:
    """A value at each token, of the sequence up to there.

    `architecture` is transformers' name of such a model; tensors that are `missing` in the checkpoint start as zeros.
    """

    architecture: str
    missing: tuple[str, ...] = ()
    name: ClassVar[HeadName] = "critic"
    tensors: ClassVar[tuple[str, ...]] = ("score.weight", "score.bias")


@dataclass(frozen=True)
class RewardHead:
    """A score of the whole sequence: the value at its last token that is not `padding`.

    `architecture` and `missing` are as in CriticHead.
    """

    architecture: str
    padding: int
    missing: tuple[str, ...] = ()
    name: ClassVar[HeadName] = "reward"
    tensors: ClassVar[tuple[str, ...]] = ("score.weight",)

    def scored(self, input_ids: list[int]) -> list[int]:
        """The tokens at whose last one the score is; as in transformers the first token, if all are padding."""
        last = next((i for i in reversed(range(len(input_ids))) if input_ids[i] != self.padding), 0)
        return input_ids[: last + 1]


Head = PolicyHead | CriticHead | RewardHead

POLICY = PolicyHead()

_ENDINGS: dict[HeadName, str] = {
    "policy": "ForCausalLM",
    "critic": "ForTokenClassification",
    "reward": "ForSequenceClassification",
}
_OTHER_NAMES: dict[tuple[str, HeadName], str | None] = {
    ("DeepseekV2", "critic"): None,
    ("Glm4Moe", "critic"): None,
    ("Glm4Moe", "reward"): None,
    ("Gemma3", "critic"): None,
    ("Gemma3", "reward"): "Gemma3Text",
}
"""Where transformers (5.12) has no such class, or one that is not called as the decoder's others are."""

_SOURCES: dict[HeadName, tuple[HeadName, ...]] = {
    "policy": ("policy",),
    "critic": ("critic", "reward", "policy"),
    "reward": ("reward", "policy"),
}
"""The checkpoints that a model with each head may start from."""

_STORED: dict[HeadName, tuple[str, ...]] = {
    "policy": (),
    "critic": CriticHead.tensors,
    "reward": RewardHead.tensors,
}
"""Of a scalar head's tensors, those that a checkpoint of each kind has."""


def architecture(decoder: str, head: HeadName) -> str | None:
    """transformers' class of `decoder`, such as Llama, with a head; None if it has none."""
    base = _OTHER_NAMES.get((decoder, head), decoder)
    return None if base is None else base + _ENDINGS[head]


def split_architecture(name: str, decoders: Iterable[str]) -> tuple[str, HeadName] | None:
    """The decoder and the head of an architecture; None if it has none of `decoders`."""
    for decoder in decoders:
        for head in _ENDINGS:
            if architecture(decoder, head) == name:
                return decoder, head
    return None


def read_head(config: Fields, directory: Path, decoder: str, stored: HeadName, wanted: HeadName) -> Head:
    """The head that is `wanted` of a checkpoint with the one that is `stored`.

    Raises RecipeError: transformers has no class for it, the checkpoint's head is another, or has several labels.
    """
    found, name = architecture(decoder, stored), architecture(decoder, wanted)
    if name is None:
        expected = decoder + _ENDINGS[wanted]
        raise RecipeError(f"transformers has no {expected}, so that such a {wanted} model could not be read by others")
    if stored not in _SOURCES[wanted]:
        names = " or ".join(str(architecture(decoder, source)) for source in _SOURCES[wanted])
        raise RecipeError(f"architecture {found} has not the head of a {wanted} model; expected {names}")
    if wanted == "policy":
        return PolicyHead()
    if stored != "policy":
        _require_one_label(config)
    if stored == "critic":
        require(config, "token_classification_bias", True)
    if wanted == "critic":
        return CriticHead(name, tuple(tensor for tensor in CriticHead.tensors if tensor not in _STORED[stored]))
    missing = tuple(tensor for tensor in RewardHead.tensors if tensor not in _STORED[stored])
    return RewardHead(name, _padding(config, directory), missing)


def head_config(config: Fields, head: Head) -> Fields:
    """The config.json of a model with `head`, from that of its initial weights."""
    if isinstance(head, PolicyHead):
        return config
    changed = {name: value for name, value in config.items() if name != "num_labels"}
    changed |= {"architectures": [head.architecture], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return changed | {"pad_token_id": head.padding} if isinstance(head, RewardHead) else changed


def _require_one_label(config: Fields) -> None:
    """transformers takes a file that names no labels to have two."""
    names = config.get("id2label")
    labels = len(names) if isinstance(names, dict) else config.get("num_labels", 2)
    if labels != 1:
        raise RecipeError(
            f"the head has {labels!r:.60} labels (id2label, num_labels); expected one value, num_labels 1"
        )


def _padding(config: Fields, directory: Path) -> int:
    """The token that transformers takes as padding: config.json's, or the tokenizer's if it names none."""
    given = config.get("pad_token_id")
    token = _tokenizer_padding(directory) if given is None else given
    if token is None:
        raise RecipeError(
            "field 'pad_token_id' is missing and the tokenizer has no pad_token; expected the token behind the end of a"
            " sequence, which transformers must know to score several together"
        )
    vocab = count(config, "vocab_size")
    if type(token) is not int or not 0 <= token < vocab:
        raise RecipeError(f"pad_token_id is {token!r:.60}; expected a token from 0 to {vocab - 1}")
    return token


def _tokenizer_padding(directory: Path) -> int | None:
    """What the tokenizer's files say, where they are there and can be read."""
    try:
        named: Any = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8")).get("pad_token")
        text = named["content"] if isinstance(named, dict) else named
        added: Any = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
        return next((token["id"] for token in added if token["content"] == text), None)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None

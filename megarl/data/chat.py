"""Text to token ids: the tokenizer of a Hugging Face directory and its chat template.

The tokenizer is read from tokenizer.json as it stands, by transformers' generic fast class. That needs neither torch
nor the model's own tokenizer class, and takes one second, or two for 150,000 tokens, where AutoTokenizer, which imports
torch, takes five.
A directory without tokenizer.json is refused, since converting one belongs before a run, not into its start.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.data.errors import DataError
from megarl.data.jsonl import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(path: Path | str) -> PreTrainedTokenizerFast:
    """The tokenizer of the Hugging Face directory `path`, with a chat template and an end-of-turn token.

    Raises DataError: no tokenizer.json, an unreadable one, no chat template, or no eos token.
    """
    path = Path(path)
    if not (path / "tokenizer.json").is_file():
        raise DataError(f"{path}: no tokenizer.json; expected a Hugging Face directory with a fast tokenizer")
    # here, not above, since importing transformers takes most of a second and most users of the room need none of it
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    except Exception as error:  # the tokenizers library raises plain Exception for a file it cannot parse
        raise DataError(f"{path}: tokenizer.json cannot be loaded: {error}") from error
    if not tokenizer.chat_template:
        raise DataError(
            f"{path}: the tokenizer has no chat template; add chat_template.jinja or take the instruct model"
        )
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"{path}: the tokenizer has no eos token; name the one that ends a turn in tokenizer_config.json"
        )
    return tokenizer


def chat_text(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], *, ask: bool) -> str:
    """`messages` in the chat template; if `ask`, up to where the assistant's answer begins."""
    if not messages:  # transformers would raise an IndexError
        return ""
    given = [{"role": message.role, "content": message.content} for message in messages]
    return str(tokenizer.apply_chat_template(given, tokenize=False, add_generation_prompt=ask))


def prompt_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Token ids of `text` as one user message in the chat template, up to where the assistant's answer begins."""
    return prompts_ids(tokenizer, [text])[0]


def prompts_ids(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    """`prompt_ids` of many texts at once, several times as fast."""
    asked = [chat_text(tokenizer, [Message("user", text)], ask=True) for text in texts]
    return [encoding.ids for encoding in encode(tokenizer, asked)]


def response_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Token ids of `text` as the assistant's answer: nothing in front, the eos token behind."""
    return [*encode(tokenizer, [text])[0].ids, tokenizer.eos_token_id]


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[Any]:
    """An encoding of the tokenizers library for each text, with `ids` and the `offsets` of their characters."""
    if not texts:  # the tokenizer would raise an IndexError
        return []
    # the template already holds every special token, so the tokenizer must add none
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False)
    return encoded.encodings or []

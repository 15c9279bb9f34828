"""Demonstrations as token sequences for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import msgspec

from megarl.data.chat import prompts_ids, responses_ids
from megarl.data.errors import DataError
from megarl.data.jsonl import Demonstration

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Sequence(msgspec.Struct, frozen=True):
    """Prompt and response in one row of tokens; those from `prompt_length` on are learned."""

    input_ids: list[int]
    prompt_length: int

    @property
    def response_length(self) -> int:
        """Tokens of the response, its eos token included."""
        return len(self.input_ids) - self.prompt_length


def encode_demonstrations(
    tokenizer: PreTrainedTokenizerFast, demonstrations: Items[Demonstration], max_positions: int
) -> list[Sequence]:
    """Each demonstration as a Sequence of at most `max_positions` tokens, in order.

    Raises DataError for one that is longer, naming its line if the demonstrations are a whole file from its start.
    """
    prompts = prompts_ids(tokenizer, [row.prompt for row in demonstrations])
    responses = responses_ids(tokenizer, [row.response for row in demonstrations])
    sequences = []
    for number, (prompt, response) in enumerate(zip(prompts, responses, strict=True), start=1):
        if len(prompt) + len(response) > max_positions:
            raise DataError(
                f"demonstration {number} (line {number} of its file): {len(prompt)} prompt tokens + {len(response)}"
                f" response tokens = {len(prompt) + len(response)}, more than the model's {max_positions} positions;"
                " shorten it or remove it"
            )
        sequences.append(Sequence(prompt + response, len(prompt)))
    return sequences

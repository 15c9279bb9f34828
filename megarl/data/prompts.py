"""Problems as prompts with token ids: what the coordinator asks the engines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megarl.data.chat import prompts_ids
from megarl.data.errors import DataError
from megarl.data.jsonl import read_problems
from megarl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class PromptSet:
    """A file of problems, or its first `count`; prompt i of a run is row i, and again from the top when they end.

    `datasets` are those of the whole file.
    """

    def __init__(
        self,
        path: Path,
        tokenizer: PreTrainedTokenizerFast,
        *,
        max_positions: int,
        max_new_tokens: int,
        count: int | None = None,
    ) -> None:
        """Raises DataError: a bad row, or a prompt that leaves no room for a response of `max_new_tokens`."""
        rows = read_problems(path)
        self.datasets = {row.dataset for row in rows}
        self._rows = rows[:count]
        self._ids = prompts_ids(tokenizer, [row.prompt for row in self._rows])
        room = max_positions - max_new_tokens
        for line, ids in enumerate(self._ids, start=1):
            if len(ids) > room:
                raise DataError(
                    f"{path}: line {line}: the prompt has {len(ids)} tokens, but the model's {max_positions} positions"
                    f" less rollout.max_new_tokens ({max_new_tokens}) leave {room}; shorten it, remove it or lower"
                    " rollout.max_new_tokens"
                )

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max((len(ids) for ids in self._ids), default=0)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        number = index % len(self._rows)
        row = self._rows[number]
        return Prompt(index, row.prompt, self._ids[number], row.answer, row.dataset)

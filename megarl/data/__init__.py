"""What a run is fed: problems and demonstrations from JSON lines, and their token ids through the chat template,
and how their lengths divide among ranks.

Used by the trainers and the coordinator, and by the scripts that make the example tasks. Every mistake in a file is a
DataError that names file and line, found before a GPU is used. Imports no torch.
"""

from megarl.data import carry_addition, sums
from megarl.data.balance import plan_microbatches
from megarl.data.chat import load_tokenizer, prompt_ids, response_ids
from megarl.data.errors import DataError
from megarl.data.jsonl import (
    Conversation,
    Demonstration,
    Message,
    Preference,
    Problem,
    read_conversations,
    read_demonstrations,
    read_preferences,
    read_problems,
    whole_pairs,
)
from megarl.data.prompts import PromptSet
from megarl.data.sequence import Sequence, encode_conversations
from megarl.data.writing import already_prepared, whole_directory, write_rows

__all__ = [
    "Conversation",
    "DataError",
    "Demonstration",
    "Message",
    "Preference",
    "Problem",
    "PromptSet",
    "Sequence",
    "already_prepared",
    "carry_addition",
    "encode_conversations",
    "load_tokenizer",
    "plan_microbatches",
    "prompt_ids",
    "read_conversations",
    "read_demonstrations",
    "read_preferences",
    "read_problems",
    "response_ids",
    "sums",
    "whole_directory",
    "whole_pairs",
    "write_rows",
]

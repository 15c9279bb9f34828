"""Multi-digit addition with written-out carries: a task on which a tiny model learns by RL within CPU minutes.

Made by `launch/prepare_carry_addition.py`, and used by tests that need a problem with a known answer. Pure: the same
arguments give the same problems on every machine. The tokenizer and the model's configuration belong to the task, since
they are what makes it learnable at this size: each digit is one token.

    57+68=            the prompt
    7+8+0=15          one line a column, lowest first: digit + digit + carry = sum
    5+6+1=12
    <answer>125</answer>
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megarl.data.heldout import is_held_out
from megarl.data.jsonl import Demonstration, Preference, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, TURN_START, TURN_END = "<|pad|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY_LIMIT = 512
VOCABULARY_MULTIPLE = 64


def problems(seed: int, count: int, max_digits: int = 8, *, held_out: bool = False) -> list[Problem]:
    """`count` sums "a+b=" with log-uniform numbers of digits, all held out for tests or none.

    The longer number has 1 to `max_digits` digits, the shorter at most two fewer. Short sums repeat, as there are few.
    """
    return [Problem(f"{a}+{b}=", str(a + b)) for a, b in _take(_pairs(seed, max_digits), count, held_out)]


def demonstrations(seed: int, *, worked: int, mixed: int, direct: float, max_digits: int = 8) -> list[Demonstration]:
    """First `worked` worked solutions, then `mixed` rows of which a fraction `direct` only state the answer."""
    coin = random.Random(f"demonstrations {seed}")
    rows = []
    for number, (a, b) in enumerate(_take(_pairs(seed, max_digits), worked + mixed, held_out=False)):
        shortcut = number >= worked and coin.random() < direct
        rows.append(Demonstration(f"{a}+{b}=", direct_answer(a, b) if shortcut else worked_solution(a, b)))
    return rows


def preferences(seed: int, count: int, max_digits: int = 8, *, held_out: bool = False) -> list[Preference]:
    """Worked solutions, preferred to the answer alone and to worked solutions that do not mark it, half and half."""
    coin = random.Random(f"preferences {seed}")
    rows = []
    for a, b in _take(_pairs(seed, max_digits), count, held_out):
        chosen = worked_solution(a, b)
        unmarked = chosen.replace("<answer>", "").replace("</answer>", "")
        rows.append(Preference(f"{a}+{b}=", chosen, direct_answer(a, b) if coin.random() < 0.5 else unmarked))
    return rows


def worked_solution(a: int, b: int) -> str:
    """The sum column by column with carries, then the answer."""
    lines, carry = [], 0
    for column in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**column % 10, b // 10**column % 10
        total = x + y + carry
        lines.append(f"{x}+{y}+{carry}={total}")
        carry = total // 10
    return "\n".join([*lines, direct_answer(a, b)])


def direct_answer(a: int, b: int) -> str:
    """The answer alone."""
    return f"<answer>{a + b}</answer>"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE in which each digit is a token, with a ChatML template; the same on every machine."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_LIMIT,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [
        f"user\n{row.prompt}\nassistant\n{row.response}" for row in demonstrations(0, worked=200, mixed=0, direct=0)
    ]
    backend.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=TURN_END,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def model_config(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Arguments of transformers' Qwen3Config for a model of about 0.4 million parameters."""
    return {
        "vocab_size": math.ceil(len(tokenizer) / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
        "hidden_size": 96,
        "intermediate_size": 288,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        # large initial weights and a short rotary period: so small a model learns the columns in half the steps
        "initializer_range": 0.08,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _pairs(seed: int, max_digits: int) -> Iterator[tuple[int, int]]:
    """Endless pairs of numbers; the first is the one whose digits are drawn log-uniformly."""
    source = random.Random(seed)
    while True:
        long = min(max_digits, int(math.exp(source.uniform(0, math.log(max_digits + 1)))))
        short = source.randint(max(1, long - 2), long)
        yield _number(source, long), _number(source, short)


def _number(source: random.Random, digits: int) -> int:
    return source.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)


def _take(pairs: Iterator[tuple[int, int]], count: int, held_out: bool) -> Iterator[tuple[int, int]]:
    while count > 0:
        a, b = next(pairs)
        if is_held_out(f"{a}+{b}=") == held_out:
            count -= 1
            yield a, b

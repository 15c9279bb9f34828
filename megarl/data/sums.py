"""Two-term sums in words, for a pretrained instruct model that half knows them.

Made by `launch/prepare_smollm2.py`. The demonstrations teach the form of a short answer, so that reinforcement learning
is left with the arithmetic. Pure: the same arguments give the same problems on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from megarl.data.heldout import is_held_out
from megarl.data.jsonl import Demonstration, Problem

# For exact_match: its last match is the last whole number of a response, whatever the words around it.
ANSWER_PATTERN = r"(-?\d+)"


def problems(seed: int, count: int, max_digits: int = 2, *, held_out: bool = False) -> list[Problem]:
    """`count` sums such as "What is 47 + 38?", all held out for tests or none."""
    return [Problem(question(a, b), str(a + b)) for a, b in _take(seed, count, max_digits, held_out)]


def demonstrations(seed: int, count: int, max_digits: int = 2) -> list[Demonstration]:
    """`count` sums with their short answers, none held out."""
    return [Demonstration(question(a, b), short_answer(a, b)) for a, b in _take(seed, count, max_digits, False)]


def question(a: int, b: int) -> str:
    """The prompt."""
    return f"What is {a} + {b}?"


def short_answer(a: int, b: int) -> str:
    """The demonstrated response."""
    return f"{a + b}"


def _take(seed: int, count: int, max_digits: int, held_out: bool) -> Iterator[tuple[int, int]]:
    """`count` pairs, each number with 1 to `max_digits` digits, every number of digits equally likely."""
    source = random.Random(seed)
    while count > 0:
        a, b = (source.randrange(10 ** source.randint(1, max_digits)) for _ in range(2))
        if is_held_out(question(a, b)) == held_out:
            count -= 1
            yield a, b

"""Reward rules: plain functions of a response and the true answer, 1.0 for right and 0.0 for wrong, or the user's own.

Run by `worker.py` in a process that is killed when a rule takes too long, so none of them watches the time.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from megarl.config import load_function

Rule = Callable[[str, str], float]

# The final expression stands at the end. Longer ones are not mathematics but attempts to keep the parser busy.
MATH_WINDOW_CHARACTERS = 2000


def build_rule(options: Mapping[str, Any]) -> Rule:
    """A rule of a recipe's `reward.sources`, given as plain values. Raises ValueError for one that is not known."""
    match options:
        case {"type": "exact_match", "pattern": pattern}:
            return functools.partial(exact_match, pattern=pattern)
        case {"type": "math_verify"}:
            return math_verify_reward
        case {"type": "own", "function": function, "options": given}:
            return functools.partial(load_function(function, 2, given), **given)
    raise ValueError(
        f"{dict(options)} is no rule; its type is exact_match, with a pattern, math_verify, or own, with a function and"
        " options"
    )


def exact_match(response: str, answer: str, pattern: str) -> float:
    """1 if the last match of `pattern`'s group in `response` equals `answer`, both stripped of white space."""
    last = None
    for last in re.finditer(pattern, response):  # noqa: B007 (the last one is what the loop is for)
        pass
    if last is None or last.group(1) is None:
        return 0.0
    return float(last.group(1).strip() == answer.strip())


def math_verify_reward(response: str, answer: str) -> float:
    """1 if math-verify finds the last expression of `response` equal to `answer`, bare or within $...$ or \\boxed{}.

    math-verify's own time-outs are off, since they use the process's alarm signal and there is an outer limit already.
    """
    library = _math_verify()
    truth = answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}"
    expected = library.parse(truth, parsing_timeout=None)
    given = library.parse(_ending(response), parsing_timeout=None)
    return float(library.verify(expected, given, timeout_seconds=None))


@functools.cache
def _math_verify() -> ModuleType:
    """The library, imported at the first use since that takes a good part of a second."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time-outs are off
    return math_verify


def _ending(response: str) -> str:
    """As many whole last lines as fit the window; whole, so that no $...$ is cut open. Of a longer line, its end."""
    if len(response) <= MATH_WINDOW_CHARACTERS:
        return response
    window = response[-MATH_WINDOW_CHARACTERS:]
    if response[-MATH_WINDOW_CHARACTERS - 1] == "\n":
        return window
    _, _, whole_lines = window.partition("\n")
    return whole_lines or window

"""What a rollout phase has to generate: groups of responses, each as long as its model will make it.

Lengths of language models' responses are about log-normal. The spread between prompts and the spread between the
responses to one prompt differ much from model to model, and decide what a scheduler can know in advance.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class GroupLengths:
    """The responses to one prompt: tokens of the prompt, and of each response."""

    prompt: int
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """What one rollout phase generates. `cap` (tokens) is the longest response that is allowed."""

    groups: tuple[GroupLengths, ...]
    cap: int

    @property
    def requests(self) -> int:
        return sum(len(group.lengths) for group in self.groups)

    @property
    def tokens(self) -> int:
        """New tokens of all responses."""
        return sum(sum(group.lengths) for group in self.groups)


@dataclass(frozen=True)
class LengthModel:
    """Log-normal lengths, clipped at `cap`, of which the fraction `runaway` runs to the cap whatever its group does.

    `between` and `within` are standard deviations of the logarithm: of groups' means, and of a group's members.
    `mean` is that of the clipped lengths with the runaways; all lengths are tokens.
    """

    mean: float
    cap: int
    between: float
    within: float
    groups: int
    group_size: int
    prompt: int = 512
    runaway: float = 0.0

    def draw(self, seed: int = 0) -> Workload:
        """The same for the same seed. The mean of the drawn lengths is `mean`, not only its expectation."""
        random = np.random.default_rng(seed)
        spread = self.between * random.standard_normal((self.groups, 1))
        spread = spread + self.within * random.standard_normal((self.groups, self.group_size))
        runs_away = random.random(spread.shape) < self.runaway

        def lengths(location: float) -> np.ndarray:
            drawn = np.clip(np.rint(np.exp(location + spread)), 1, self.cap)
            return np.where(runs_away, self.cap, drawn).astype(np.int64)

        low, high = 0.0, 2 * np.log(self.cap)
        if not lengths(low).mean() <= self.mean <= lengths(high).mean():
            raise ValueError(
                f"no log-normal clipped at {self.cap:,} tokens has a mean of {self.mean:,.0f}: "
                f"{runs_away.sum():,} of {spread.size:,} requests run to the cap"
            )
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if lengths(middle).mean() < self.mean else (low, middle)
        groups = tuple(GroupLengths(self.prompt, tuple(row)) for row in lengths(high).tolist())
        return Workload(groups, self.cap)


def read_lengths(path: Path, *, cap: int | None = None, prompt: int = 512) -> Workload:
    """A group a line: a JSON list of lengths, or {"prompt": tokens, "lengths": [...]}. `cap`: the longest, if None."""
    groups = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: no JSON: {error}") from None
        if isinstance(row, list):
            row = {"lengths": row}
        row = row if isinstance(row, dict) else {}
        lengths, own = row.get("lengths"), row.get("prompt", prompt)
        if (
            not isinstance(lengths, list)
            or not lengths
            or not all(type(one) is int and one > 0 for one in [*lengths, own])
        ):
            raise ValueError(
                f'{path}:{number}: expected a list of lengths (whole numbers above 0) or {{"prompt": ..., "lengths": '
                f"[...]}}, got {line.strip()[:80]}"
            )
        groups.append(GroupLengths(own, tuple(lengths)))
    if not groups:
        raise ValueError(f"{path} has no line, expected one a group")
    longest = max(max(group.lengths) for group in groups)
    if cap is not None and longest > cap:
        raise ValueError(f"{path} has a length of {longest:,} tokens, above the cap of {cap:,}")
    return Workload(tuple(groups), cap or longest)

"""What payload_delivery.py is told and what it reports: one step's groups, trained on with and without the queue."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec

from megarl.types import Group, Prompt, Trajectory, VersionSpan
from tests.distributed.json_file import JsonFile
from tests.families import VOCAB

PROMPTS, SAMPLES, LONGEST = 4, 4, 40


class Plan(JsonFile):
    recipe: Path
    policy: Path
    reward: Path
    layouts: dict[str, dict[str, int]]
    out: Path


class Found(msgspec.Struct):
    """All that training on the step gives: one with the groups whole on every rank, one with what each fetches.

    `fetched` are the tokens that each rank was sent, in sequences; by field.
    """

    whole: list[list[float]]
    delivered: list[list[float]]
    fetched: list[dict[str, list[int]]]


def groups() -> list[Group]:
    """Some answers end in padding, some are that alone, and one is empty."""
    draw = random.Random(5)
    made = []
    for index in range(PROMPTS):
        prompt = Prompt(index, "", [draw.randrange(1, VOCAB) for _ in range(draw.randrange(1, 12))], "")
        made.append(Group(prompt, [trajectory(draw) for _ in range(SAMPLES)]))
    made[1].trajectories[2] = answer([0, 0, 0], draw)
    made[2].trajectories[0] = answer([5, 6, 0, 0], draw)
    made[3].trajectories[3] = answer([], draw)
    return made


def trajectory(draw: random.Random) -> Trajectory:
    return answer([draw.randrange(VOCAB) for _ in range(draw.randrange(1, LONGEST))], draw)


def answer(ids: list[int], draw: random.Random) -> Trajectory:
    logprobs = [-5 * draw.random() for _ in ids]
    return Trajectory(ids, logprobs, [VersionSpan(0, 0, len(ids))], "stop", "", {"answer": draw.random()})

"""Steps that were taken from the queue, as ranks fetch them: one row of bytes for each sequence and field."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import chain, takewhile

from megarl.types import Group, GroupHeader, Trajectory, TrajectoryHeader

FIELDS = {"input_ids": "<i", "engine_logprob": "<f"}
"""What can be fetched of a sequence: the tokens of prompt and response; the engine's log-probability (nats) of each
token of the response. With their types, as `struct` and numpy call them."""

HELD_STEPS = 2
"""The one that is trained on, and the one that may be taken meanwhile."""


class Shelf:
    """The fields of all sequences of the last steps. A step's sequences count through its groups, from 0."""

    def __init__(self) -> None:
        self._steps: dict[int, list[dict[str, bytes]]] = {}

    def put(self, step: int, groups: Sequence[Group]) -> list[GroupHeader]:
        """Hold these for `step`, and steps further back than HELD_STEPS no more; returns their headers."""
        fields = [_fields(group, trajectory) for group in groups for trajectory in group.trajectories]
        kept = {number: held for number, held in self._steps.items() if step - HELD_STEPS < number < step}
        self._steps = {**kept, step: fields}
        return [_header(group) for group in groups]

    def read(self, step: int, wanted: Mapping[str, Sequence[int]]) -> list[bytes]:
        """The values of the sequences that are `wanted` of each field, in this order.

        Raises ValueError: there is no such step, field or sequence. It names steps as users see them: the first is 1.
        """
        if step not in self._steps:
            raise ValueError(f"step {step + 1} is not held; steps {[held + 1 for held in sorted(self._steps)]} are")
        held = self._steps[step]
        if unknown := wanted.keys() - FIELDS.keys():
            raise ValueError(f"there are no fields {sorted(unknown)}; expected some of {sorted(FIELDS)}")
        if wrong := {number for numbers in wanted.values() for number in numbers if not 0 <= number < len(held)}:
            raise ValueError(f"step {step + 1} has no sequences {sorted(wrong)}; expected 0 to {len(held) - 1}")
        return [held[number][field] for field, numbers in wanted.items() for number in numbers]


def _fields(group: Group, trajectory: Trajectory) -> dict[str, bytes]:
    values: dict[str, Sequence[float]] = {
        "input_ids": group.prompt.input_ids + trajectory.output_ids,
        "engine_logprob": trajectory.engine_logprobs,
    }
    # in half the time that numpy takes to make an array of a list
    return {field: struct.pack(f"<{len(values[field])}{kind[1]}", *values[field]) for field, kind in FIELDS.items()}


def _header(group: Group) -> GroupHeader:
    return GroupHeader(
        index=group.prompt.index,
        dataset=group.prompt.dataset,
        prompt_length=len(group.prompt.input_ids),
        trajectories=[
            TrajectoryHeader(
                length=len(trajectory.output_ids),
                ending=_ending(group.prompt.input_ids, trajectory.output_ids),
                versions=trajectory.versions,
                finish_reason=trajectory.finish_reason,
                scores=trajectory.scores,
            )
            for trajectory in group.trajectories
        ],
        greedy_scores=group.greedy_scores,
    )


def _ending(prompt: Sequence[int], response: Sequence[int]) -> tuple[int, int]:
    backwards = chain(reversed(response), reversed(prompt))
    last = next(backwards)
    return last, 1 + sum(1 for _ in takewhile(lambda token: token == last, backwards))

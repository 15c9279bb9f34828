"""Steps that were taken from the queue, as ranks fetch them: one array for each sequence and field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from megarl.types import Group, GroupHeader, Trajectory, TrajectoryHeader

Array = npt.NDArray[np.number]

FIELDS = {"input_ids": np.dtype("<i4"), "engine_logprob": np.dtype("<f4")}
"""What can be fetched of a sequence: the tokens of prompt and response; the engine's log-probability (nats) of each
token of the response. Little-endian, as they travel."""

HELD_STEPS = 2
"""The one that is trained on, and the one that may be taken meanwhile."""


class Shelf:
    """The fields of all sequences of the last steps. A step's sequences count through its groups, from 0."""

    def __init__(self) -> None:
        self._steps: dict[int, list[dict[str, Array]]] = {}

    def put(self, step: int, groups: Sequence[Group]) -> list[GroupHeader]:
        """Hold these for `step`, and steps further back than HELD_STEPS no more; returns their headers."""
        fields = [[_fields(group, trajectory) for trajectory in group.trajectories] for group in groups]
        kept = {number: held for number, held in self._steps.items() if step - HELD_STEPS < number < step}
        self._steps = {**kept, step: [held for part in fields for held in part]}
        return [_header(group, part) for group, part in zip(groups, fields, strict=True)]

    def read(self, step: int, wanted: Mapping[str, Sequence[int]]) -> list[Array]:
        """The arrays of the sequences that are `wanted` of each field, in this order.

        Raises ValueError: there is no such step, field or sequence.
        """
        if step not in self._steps:
            raise ValueError(f"step {step} is not held; steps {sorted(self._steps)} are")
        held = self._steps[step]
        if unknown := wanted.keys() - FIELDS.keys():
            raise ValueError(f"there are no fields {sorted(unknown)}; expected some of {sorted(FIELDS)}")
        if wrong := {number for numbers in wanted.values() for number in numbers if not 0 <= number < len(held)}:
            raise ValueError(f"step {step} has no sequences {sorted(wrong)}; expected 0 to {len(held) - 1}")
        return [held[number][field] for field, numbers in wanted.items() for number in numbers]


def _fields(group: Group, trajectory: Trajectory) -> dict[str, Array]:
    values = {
        "input_ids": group.prompt.input_ids + trajectory.output_ids,
        "engine_logprob": trajectory.engine_logprobs,
    }
    return {field: np.array(values[field], dtype) for field, dtype in FIELDS.items()}


def _header(group: Group, held: Sequence[Mapping[str, Array]]) -> GroupHeader:
    return GroupHeader(
        index=group.prompt.index,
        dataset=group.prompt.dataset,
        prompt_length=len(group.prompt.input_ids),
        trajectories=[
            TrajectoryHeader(
                length=len(trajectory.output_ids),
                ending=_ending(fields["input_ids"]),
                versions=trajectory.versions,
                finish_reason=trajectory.finish_reason,
                scores=trajectory.scores,
            )
            for trajectory, fields in zip(group.trajectories, held, strict=True)
        ],
        greedy_scores=group.greedy_scores,
    )


def _ending(ids: Array) -> tuple[int, int]:
    others = np.flatnonzero(ids != ids[-1])
    return int(ids[-1]), len(ids) - (int(others[-1]) + 1 if len(others) else 0)

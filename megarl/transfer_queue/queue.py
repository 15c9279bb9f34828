"""The transfer queue: groups go in as they finish, and come out as whole steps."""

from __future__ import annotations

from megarl.transfer_queue.admission import Admission
from megarl.types import Group, WeightVersion


class TransferQueue:
    """Groups by their row; what is admitted is put once and taken once."""

    def __init__(self, groups_per_step: int, *, max_lag: int, ask: int, steps: int) -> None:
        """`max_lag` versions of the weights is the most that a token may lag behind the step that trains on it.

        `ask` groups are under way, waiting or in training at most, and `steps` steps in all take groups.
        """
        self._admission = Admission(groups_per_step, max_lag=max_lag, ask=ask, steps=steps)
        self._max_lag = max_lag
        self._groups: dict[int, Group] = {}

    def publish(self, version: WeightVersion) -> None:
        """The engines have `version`."""
        self._admission.publish(version)

    def admit(self) -> list[int]:
        """Rows that may be asked from now on; more come with the next version."""
        return self._admission.admit()

    async def put(self, row: int, group: Group) -> None:
        """Accept a finished group. Raises ValueError: the row was put before, or never admitted."""
        self._admission.finish(row)
        self._groups[row] = group

    def take(self, step: int) -> list[Group] | None:
        """The groups of `step`, in order of their rows; None: it has to wait. A token that is too old is a mistake."""
        assert step == self._admission.step, (
            f"step {step} takes groups when it is the turn of step {self._admission.step}"
        )
        rows = self._admission.take()
        if rows is None:
            return None
        groups = [self._groups.pop(row) for row in rows]
        stale = [row for row, group in zip(rows, groups, strict=True) if step - group.oldest_version > self._max_lag]
        assert not stale, f"rows {stale} of step {step} have tokens that lag by more than {self._max_lag} versions"
        return groups

"""Which prompts may be asked and which groups a step takes, so that no token is too old for the step that learns it.

Pure: no I/O and no clock. A group is known by its row, its place in the run's sequence of prompts. A row that was
admitted under version a of the weights has tokens of version a or newer, and so must be taken by step a + max_lag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.types import WeightVersion


class Admission:
    """Rows are admitted, finished and taken, each once; every step takes `groups_per_step` of them.

    Not yet taken rows, running or finished, and those of the step that trains are never more than `ask`. `take` leaves
    for no later step more rows that must be taken by then than it has room for. So, by induction, a step that waits
    for all rows can always take all that must be taken, and neither is the lag ever exceeded nor does a step starve.
    """

    def __init__(self, groups_per_step: int, *, max_lag: int, ask: int, steps: int) -> None:
        """`ask` is between one step's groups and (max_lag + 1) times as many; rows end after `steps` steps."""
        assert groups_per_step <= ask <= (max_lag + 1) * groups_per_step, (groups_per_step, max_lag, ask)
        self._groups_per_step, self._max_lag, self._ask, self._steps = groups_per_step, max_lag, ask, steps
        self._version: WeightVersion = -1
        self._next_row = self._lost = 0
        self._finished: set[int] = set()
        self._interrupted: set[int] = set()
        self._replayed: dict[int, list[int]] = {}
        self.step = 0
        """The next that takes groups."""
        self.admitted: dict[int, WeightVersion] = {}
        """Rows that were not taken yet, and the version under which they were admitted."""

    @property
    def finished(self) -> int:
        """Rows that wait to be taken."""
        return len(self._finished)

    def restore(
        self, step: int, admitted: Mapping[int, WeightVersion], finished: Sequence[int], took: Mapping[int, list[int]]
    ) -> None:
        """Begin at `step`, with rows that no earlier step took. Steps that took theirs before take the same again.

        Those that were interrupted are admitted again when the version is there under which they were before: older
        weights than that must not go on with them. Rows of which nothing is known any more are passed over.
        """
        self.step, self._finished, self.admitted = step, set(finished), dict(admitted)
        self._replayed, self._interrupted = dict(took), admitted.keys() - self._finished
        known = step * self._groups_per_step + len(admitted)
        self._next_row = max([known, *(row + 1 for row in admitted)])
        self._lost = self._next_row - known

    def publish(self, version: WeightVersion) -> None:
        """What is admitted from now on has tokens of `version` or newer."""
        self._version = version

    def admit(self) -> list[int]:
        """The rows that may be asked now, in addition to those before; new ones are behind the interrupted ones."""
        groups = self._groups_per_step
        bound = min(self._version * groups + self._ask, self._steps * groups) + self._lost
        rows = list(range(self._next_row, bound))
        self.admitted |= dict.fromkeys(rows, self._version)
        self._next_row = max(self._next_row, bound)
        again = sorted(row for row in self._interrupted if self.admitted[row] <= self._version)
        self._interrupted.difference_update(again)
        return again + rows

    def check_unfinished(self, row: int) -> None:
        """Raise ValueError: the group was there before, or nobody asked for it."""
        if row not in self.admitted or row in self._finished:
            raise ValueError(f"the group of row {row} was put into the queue before, or never asked for")

    def finish(self, row: int) -> None:
        """The group is there. Raises ValueError as `check_unfinished`."""
        self.check_unfinished(row)
        self._finished.add(row)

    def take(self) -> list[int] | None:
        """The rows of the next step, in order; None: it has to wait for more to finish."""
        rows = self._replayed.get(self.step) or self._choose()
        if rows is None or not self._finished.issuperset(rows):  # what a damaged journal lost comes again
            return None
        self._finished.difference_update(rows)
        for row in rows:
            del self.admitted[row]
        self.step += 1
        return sorted(rows)

    def _choose(self) -> list[int] | None:
        """The finished rows that must be taken first, if what they leave can be taken in time."""
        chosen = sorted(self._finished, key=lambda row: (self.admitted[row], row))[: self._groups_per_step]
        if len(chosen) < self._groups_per_step:
            return None
        taken = set(chosen)
        left = sorted(version + self._max_lag for row, version in self.admitted.items() if row not in taken)
        room = ((last - self.step) * self._groups_per_step for last in left)
        return chosen if all(count <= most for count, most in enumerate(room, start=1)) else None

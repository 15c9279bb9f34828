"""What the records of a journal come to, without their tokens: which rows still matter, and where their records lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megarl.transfer_queue.records import Accepted, Admitted, Base, Chunk, Dropped, Record, Took, Trained
from megarl.transfer_queue.segment import Place
from megarl.types import WeightVersion


@dataclass(slots=True)
class Row:
    """A row that is needed; `lengths` are the tokens of its samples' chunks, `places` are those of what is needed."""

    version: WeightVersion
    accepted: bool = False
    lengths: dict[int, int] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)


class Ledger:
    """The journal's writer and its recovery pass the same records through it, so they agree on what is needed.

    `took[i]` are the rows of step `floor + i`. Whatever steps before `floor` took is forgotten: `floor` is where the
    checkpoint before the newest one (`trained`) stands, so that a run can fall back by one checkpoint.
    """

    def __init__(self, step: int) -> None:
        """`step` is where the run stands, should no record say otherwise."""
        self.first = 1
        self.floor = self.trained = step
        self.took: list[list[int]] = []
        self.rows: dict[int, Row] = {}
        self.lowest_row = self.next_row = 0

    @property
    def end(self) -> int:
        """The step that takes next."""
        return self.floor + len(self.took)

    @property
    def live_bytes(self) -> int:
        return sum(place.length for row in self.rows.values() for place in row.places)

    def base(self, first: int) -> Base:
        versions = {number: row.version for number, row in self.rows.items()}
        return Base(first, self.floor, self.trained, list(self.took), versions, self.lowest_row, self.next_row)

    def restart(self, base: Base) -> None:
        """Take over what `base` says, which is more where records before it are damaged."""
        self.first = max(self.first, base.first)  # a segment may be older than what cleaning made of those before it
        self.floor, self.trained, self.took = base.floor, base.trained, base.took
        self.lowest_row, self.next_row = base.lowest_row, base.next_row
        self.rows = {
            number: row if (row := self.rows.get(number)) and row.version == version else Row(version)
            for number, version in base.rows.items()
        }

    def check(self, record: Record) -> None:
        """Raise ValueError: the record contradicts those before it."""
        match record:
            case Admitted(row=row):
                if self._taken_by(row) is not None and self.rows[row].accepted:
                    raise ValueError(f"row {row} is admitted, but step {self._taken_by(row)} took its group")
            case Chunk(row=row, sample=sample, start=start):
                length = self._open(row, "a chunk").lengths.get(sample, 0)
                if start != length:
                    raise ValueError(
                        f"a chunk of row {row}, sample {sample}, begins at token {start}, but {length} are there"
                    )
            case Accepted(row=row):
                self._open(row, "a group")
            case Dropped(row=row):
                if row not in self.rows or self._taken_by(row) is not None:
                    raise ValueError(f"row {row} is dropped, but was {self._state(row)}")
            case Took(step=step, rows=rows):
                if not self.floor <= step <= self.end:
                    raise ValueError(
                        f"step {step} takes groups, expected {self.end}, or one that did before, from {self.floor} on"
                    )
                taken = {row for earlier in self.took[: step - self.floor] for row in earlier}
                for row in rows:
                    if row in taken or row not in self.rows or not self.rows[row].accepted:
                        raise ValueError(f"step {step} takes row {row}, which was {self._state(row)}")
                if len(set(rows)) < len(rows):
                    raise ValueError(f"step {step} takes rows {rows}, of which some come twice")
            case Trained(step=step):
                if step > self.end:
                    raise ValueError(f"a checkpoint holds steps before {step}, but step {self.end} took no groups yet")

    def add(self, record: Record, place: Place) -> None:
        """The record, which passed `check`, lies at `place`."""
        match record:
            case Admitted(row=row, version=version):
                self.rows[row] = Row(version)
                self.lowest_row, self.next_row = min(self.lowest_row, row), max(self.next_row, row + 1)
            case Chunk(row=row, sample=sample, completion=completion):
                known = self.rows[row]
                known.lengths[sample] = known.lengths.get(sample, 0) + len(completion.output_ids)
                known.places.append(place)
            case Accepted(row=row):
                self.rows[row] = Row(self.rows[row].version, accepted=True, places=[place])
            case Dropped(row=row):
                del self.rows[row]
            case Took(step=step, rows=rows):
                index = step - self.floor
                if self.took[index : index + 1] != [rows]:
                    self.took[index:] = [list(rows)]
            case Trained(step=step):
                if step > self.trained:
                    self._forget(self.trained)
                    self.trained = step

    def resume(self, step: int) -> Iterator[str]:
        """The run goes on from a checkpoint at `step`; says what is lost by that, or is done again.

        It names steps as users see them: the first is 1.
        """
        if step > self.end:
            yield (
                f"the run resumes from step {step}, but what steps {self.end + 1} to {step} took is lost: whatever is"
                " here may have been trained, so nothing of it is used"
            )
            self.floor, self.took, self.rows = step, [], {}
        elif step < self.floor:
            yield (
                f"the run resumes from step {step}, but what steps up to {self.floor} took was cleaned away when"
                " newer checkpoints were there: all is generated again, since what is here is of newer weights"
            )
            self.floor, self.took, self.rows = step, [], {}
        elif step < self.end:
            yield f"steps {step + 1} to {self.end} took groups before the run ended, and train on the same again"
        self.trained = step
        for late in range(step, self.end):
            missing = [row for row in self.took[late - self.floor] if not self.rows[row].accepted]
            if missing:
                yield f"step {late + 1} took rows {missing}, whose groups are lost: they are generated again"

    def _forget(self, floor: int) -> None:
        """What steps before `floor` took."""
        for rows in self.took[: floor - self.floor]:
            for row in rows:
                del self.rows[row]
        self.took, self.floor = self.took[floor - self.floor :], floor

    def _taken_by(self, row: int) -> int | None:
        return next((self.floor + i for i, rows in enumerate(self.took) if row in rows), None)

    def _open(self, row: int, what: str) -> Row:
        if row not in self.rows or self.rows[row].accepted:
            raise ValueError(f"{what} comes of row {row}, which was {self._state(row)}")
        return self.rows[row]

    def _state(self, row: int) -> str:
        """For messages."""
        by, known = self._taken_by(row), self.rows.get(row)
        if by is not None:
            return f"taken by step {by}"
        if known is None:
            return "not admitted, or is trained or dropped"
        return "accepted before" if known.accepted else "not accepted yet"

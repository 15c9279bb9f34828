"""The journal: what must outlive the coordinator, in an append-only sequence of segments that one process writes.

Three things hold, whenever the process or the node dies:

- What is durable implies that all records before it are: segments go to disk in order.
- A segment begins with a Base, which says what all records before it come to. So a damaged segment loses tokens, but
  not what was trained: no group is in two steps of one history. Where the last segment is damaged, recovery sees that
  steps are missing, and uses nothing that they may have trained.
- Cleaning happens at one moment, by a rename. A Base that counts from its own segment on, and behind it all records
  that are still needed, are written aside; the rename puts them in place of the newest closed segment. Before, all
  segments count; after, those before it do not, whether they are there or not and whichever were removed.

Cleaning keeps what the checkpoint before the newest one needs. It is worthwhile when more than half is not needed; so a
slow row keeps no other's records on disk, which has at most twice the needed bytes, or those and a segment's, and what
came since the last checkpoint.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from megarl.runtime import LOGGER
from megarl.transfer_queue.ledger import Ledger
from megarl.transfer_queue.records import Accepted, Admitted, Base, Chunk, Dropped, Record, Took, Trained
from megarl.transfer_queue.segment import (
    DamagedError,
    JournalError,
    Place,
    SegmentWriter,
    decode_frame,
    encode_frame,
    read_frame,
    reading,
    scan,
    segment_numbers,
    segment_path,
    sync_path,
    writing,
)
from megarl.types import Completion, Group, WeightVersion

SyncPolicy = Literal["always", "group", "never"]

_WAITED_FOR: dict[SyncPolicy, tuple[type[Record], ...]] = {
    "always": (Admitted, Chunk, Accepted, Dropped, Took, Trained),
    "group": (Accepted, Took, Trained),
    "never": (),
}
_ASIDE = "cleaning.aside"


@dataclass(frozen=True)
class Recovered:
    """What a run that resumes from a checkpoint at `step` finds.

    `admitted` are the rows that no step before `step` trained, with the newest version when they were; `groups` and
    `chunks` are of these rows only. `chunks` are by row and sample, joined. `took` are the rows of steps from `step` on
    that train again on the same groups; append their Took again. A row from `lowest_row` to `next_row` (exclusive) that
    was admitted and is not in `admitted` was trained or dropped, unless `reports` says otherwise. `reports` are
    sentences for the log: what was damaged, what is lost by that, and what is done again. `ledger` is the writer's.
    """

    admitted: dict[int, WeightVersion]
    chunks: dict[tuple[int, int], Completion]
    groups: dict[int, Group]
    took: dict[int, list[int]]
    lowest_row: int
    next_row: int
    reports: list[str]
    ledger: Ledger


def recover(directory: Path, step: int) -> Recovered:
    """Read what a run that goes on from `step` needs, and change nothing. The directory need not exist.

    In a damaged segment, what is before the damage counts, and nothing behind it: where the next record begins is not
    known. The next segment counts again, as its Base makes good for what is lost. Raises JournalError: a file cannot be
    read, or is of another format.
    """
    ledger, reports = Ledger(step), []
    present = segment_numbers(directory)
    first = max((_first_that_counts(segment_path(directory, number)) for number in present), default=1)
    for number in range(first, max(present, default=0) + 1):
        if number in present:
            reports += _read_segment(directory, number, ledger)
        else:
            reports.append(f"{segment_path(directory, number)} is missing; what it held is left out")
    reports += ledger.resume(step)
    return _load(directory, ledger, step, reports)


class Journal:
    """Open for writing, in a segment of its own. Use it from one event loop; `close` it at the end."""

    def __init__(
        self, directory: Path, recovered: Recovered, *, sync: SyncPolicy, segment_bytes: int = 64 << 20
    ) -> None:
        """`recovered` is of this directory, and nothing was written there since.

        `sync` says which records `add` waits for until they are on disk: "always" for all, "group" for groups and what
        steps took, "never" for none. With "never", a node that dies may take with it what steps took that a checkpoint
        holds; recovery notices and uses nothing of such a journal. Raises JournalError: it cannot be written.
        """
        self._directory, self._ledger = directory, recovered.ledger
        self._waited_for, self._segment_bytes = _WAITED_FOR[sync], segment_bytes
        with writing(directory, "open the journal"):
            directory.mkdir(parents=True, exist_ok=True)
            sync_path(directory.parent)
            (directory / _ASIDE).unlink(missing_ok=True)
            numbers = segment_numbers(directory)
            for number in numbers:  # what was recovered may not be on disk yet, and is built on from here
                sync_path(segment_path(directory, number))
            self._number = max(numbers, default=0) + 1
            self._segment = SegmentWriter(segment_path(directory, self._number), self._ledger.base(self._ledger.first))
            self._remove_before(self._ledger.first)
            closed = [number for number in numbers if number >= self._ledger.first]
            self._sizes = {number: segment_path(directory, number).stat().st_size for number in closed}
        self._full: list[SegmentWriter] = []  # closed ones that may not be on disk yet
        self._appended = self._durable = 0  # records
        self._flushing: asyncio.Task[None] | None = None
        self._cleaning: asyncio.Task[None] | None = None
        self._failure: str | None = None

    async def add(self, record: Record) -> None:
        """Append, wait until the record is on disk if the policy says so, and after a Trained clean if worthwhile."""
        self.append(record)
        if isinstance(record, self._waited_for):
            await self.sync()
        if isinstance(record, Trained):
            await self._clean()

    def append(self, record: Record) -> None:
        """Write the record. Raises JournalError: it cannot be written; ValueError: it contradicts those before it."""
        if self._failure is not None:
            raise JournalError(self._failure)
        self._ledger.check(record)
        frame = encode_frame(record)
        if self._segment.size > self._segment_bytes or self._segment.broken:
            self._rotate()
        place = Place(self._number, self._segment.size, len(frame))
        self._segment.write(frame)
        self._ledger.add(record, place)
        self._appended += 1

    async def sync(self) -> None:
        """Wait until all that was appended is on disk; those who wait at the same time share the work.

        Raises JournalError: it cannot be known to be on disk, now or ever again.
        """
        wanted = self._appended
        while self._durable < wanted:
            if self._failure is not None:
                raise JournalError(self._failure)
            if self._flushing is None:
                self._flushing = asyncio.create_task(self._flush())
            await asyncio.shield(self._flushing)  # who waits may be cancelled; the thread goes on

    async def close(self) -> None:
        """Wait until all is on disk, whatever the policy."""
        try:
            if self._cleaning is not None:
                await self._cleaning
            await self.sync()
        finally:
            self._failure = self._failure or f"{self._directory}: the journal is closed"
            for segment in [*self._full, self._segment]:
                os.close(segment.fd)

    async def _flush(self) -> None:
        appended, full, segment = self._appended, list(self._full), self._segment
        try:
            await asyncio.to_thread(_flush_files, self._directory, [*full, segment])
        except OSError as error:
            # The kernel may have given up pages that it could not write: another fsync would succeed without them.
            self._failure = (
                f"{self._directory}: cannot bring the journal to disk: {error.strerror}; make room (space or quota) or"
                " repair the file system, then resume the run: it goes on from what is on disk"
            )
            raise JournalError(self._failure) from None
        finally:
            self._flushing = None
        self._durable = appended
        del self._full[: len(full)]
        for closed in full:
            os.close(closed.fd)

    def _rotate(self) -> None:
        path = segment_path(self._directory, self._number + 1)
        segment = SegmentWriter(path, self._ledger.base(self._ledger.first))
        self._sizes[self._number] = self._segment.size
        self._full.append(self._segment)
        self._segment = segment
        self._number += 1

    async def _clean(self) -> None:
        live = self._ledger.live_bytes
        unneeded = sum(self._sizes.values()) + self._segment.size - live
        if self._cleaning is None and unneeded > max(live, self._segment_bytes):
            self._cleaning = asyncio.create_task(self._compact())
        if self._cleaning is not None:
            await asyncio.shield(self._cleaning)

    async def _compact(self) -> None:
        """What cannot be cleaned stays as it is, and the next checkpoint tries again."""
        try:
            self._rotate()
            last, ledger = self._number - 1, self._ledger
            places = sorted(place for row in ledger.rows.values() for place in row.places)  # in order of writing
            moved = await asyncio.to_thread(_rewrite, self._directory, last, ledger.base(first=last), places)
            for row in ledger.rows.values():
                row.places = [moved.get(place, place) for place in row.places]
            ledger.first = last
            self._sizes[last] = segment_path(self._directory, last).stat().st_size
            await asyncio.to_thread(self._remove_before, last)
            self._sizes = {number: size for number, size in self._sizes.items() if number >= last}
        except (JournalError, OSError) as error:
            LOGGER.warning("%s: the journal was not cleaned, and grows until it is: %s", self._directory, error)
        finally:
            self._cleaning = None

    def _remove_before(self, first: int) -> None:
        """Remove segments that do not count any more, once it is on disk that they do not."""
        sync_path(self._directory)
        for number in segment_numbers(self._directory):
            if number < first:
                segment_path(self._directory, number).unlink()
        sync_path(self._directory)


def _flush_files(directory: Path, segments: list[SegmentWriter]) -> None:
    for segment in segments:
        os.fsync(segment.fd)
    if len(segments) > 1:  # the last one is new
        sync_path(directory)


def _rewrite(directory: Path, number: int, base: Base, places: list[Place]) -> dict[Place, Place]:
    """Put `base` and the frames at `places` in place of segment `number`; says where each frame lies then."""
    aside = directory / _ASIDE
    aside.unlink(missing_ok=True)
    writer = SegmentWriter(aside, base)
    try:
        moved = {}
        for place, frame in _frames(directory, places):
            moved[place] = Place(number, writer.size, place.length)
            writer.write(frame)
        os.fsync(writer.fd)
    except BaseException:
        aside.unlink()
        raise
    finally:
        os.close(writer.fd)
    aside.replace(segment_path(directory, number))
    return moved


def _frames(directory: Path, places: list[Place]) -> Iterator[tuple[Place, bytes]]:
    """The frames at `places`, which are in order."""
    for number, here in groupby(places, key=lambda place: place.segment):
        with reading(segment_path(directory, number)) as file:
            for place in here:
                yield place, read_frame(file, place)


def _first_that_counts(path: Path) -> int:
    """According to the segment's Base; 1 if that is damaged."""
    with suppress(DamagedError):
        for _, _, record in scan(path):
            assert isinstance(record, Base), "a segment that does not begin with its Base"
            return record.first
    return 1


def _read_segment(directory: Path, number: int, ledger: Ledger) -> list[str]:
    """Add its records to the ledger; says what was left out."""
    path, reports, refused = segment_path(directory, number), [], []
    try:
        for offset, length, record in scan(path):
            if isinstance(record, Base):
                ledger.restart(record)
                continue
            try:
                ledger.check(record)
            except ValueError as error:  # what it builds on was damaged
                refused.append(str(error))
            else:
                ledger.add(record, Place(number, offset, length))
    except DamagedError as damage:
        reports.append(f"{path} {damage}")
    if refused:
        reports.append(
            f"{path}: {len(refused)} records do not fit those before them and are left out; the first: {refused[0]}"
        )
    return reports


def _load(directory: Path, ledger: Ledger, step: int, reports: list[str]) -> Recovered:
    trained = {row for rows in ledger.took[: step - ledger.floor] for row in rows}
    needed = {number: row for number, row in ledger.rows.items() if number not in trained}
    chunks: dict[tuple[int, int], Completion] = {}
    groups: dict[int, Group] = {}
    for _, frame in _frames(directory, sorted(place for row in needed.values() for place in row.places)):
        match decode_frame(frame):
            case Chunk(row=row, sample=sample, completion=completion):
                chunks.setdefault((row, sample), Completion([], [], "length", [])).extend(completion)
            case Accepted(row=row, group=group):
                groups[row] = group
    return Recovered(
        admitted={number: row.version for number, row in needed.items()},
        chunks=chunks,
        groups=groups,
        took={late: ledger.took[late - ledger.floor] for late in range(step, ledger.end)},
        lowest_row=ledger.lowest_row,
        next_row=ledger.next_row,
        reports=reports,
        ledger=ledger,
    )

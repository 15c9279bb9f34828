"""The journal: what it says is durable is there afterwards, and nothing is trained twice, however a run ended."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from megarl.transfer_queue import JournalError
from megarl.transfer_queue.journal import Journal, Recovered, SyncPolicy, recover
from megarl.transfer_queue.records import Accepted, Admitted, Chunk, Dropped, Record, Took, Trained
from megarl.transfer_queue.segment import encode_frame, scan, segment_numbers, segment_path
from megarl.types import Completion, FinishReason, Group, Prompt, Trajectory, VersionSpan

HEADER_BYTES = 16


def tokens(count: int, version: int = 0, reason: FinishReason = "length", first: int = 0) -> Completion:
    ids = list(range(first, first + count))
    return Completion(ids, [-0.5 * i for i in ids], reason, [VersionSpan(version, 0, count)])


def group(row: int, size: int = 1) -> Group:
    whole = tokens(size, reason="stop", first=row)
    trajectory = Trajectory(whole.output_ids, whole.logprobs, whole.versions, "stop", f"text {row}", {"answer": 1.0})
    return Group(Prompt(row, "question", [1, 2], "answer"), [trajectory, trajectory])


STORY: list[Record] = [
    Admitted(0, 0),
    Admitted(1, 0),
    Chunk(0, 0, 0, tokens(3)),
    Chunk(0, 1, 0, tokens(1)),
    Admitted(2, 0),
    Chunk(0, 0, 3, tokens(2, version=1, first=3)),
    Accepted(1, group(1)),
    Accepted(0, group(0)),
    Took(0, [1, 0]),
    Chunk(2, 0, 0, tokens(2)),
    Dropped(2),
    Admitted(-1, 1),
    Trained(1),
    Admitted(3, 1),
    Chunk(3, 0, 0, tokens(2, version=1)),
    Chunk(-1, 0, 0, tokens(1, version=1)),
    Accepted(-1, group(-1)),
    Took(1, [-1]),
]


def write(directory: Path, records: list[Record], *, step: int = 0, segment_bytes: int = 1 << 20) -> Recovered:
    """Append in one more process, as it were; returns what it started from."""
    before = recover(directory, step)

    async def run() -> None:
        journal = Journal(directory, before, sync="never", segment_bytes=segment_bytes)
        for record in records:
            journal.append(record)
        await journal.close()

    asyncio.run(run())
    return before


def contents(recovered: Recovered) -> dict[str, Any]:
    """All of it that a run goes on from."""
    names = {field.name for field in dataclasses.fields(recovered)} - {"reports", "ledger"}
    return {name: getattr(recovered, name) for name in names}


def states(tmp_path: Path, records: list[Record], step: int) -> list[dict[str, Any]]:
    """What is recovered when the first n records are there, for each n."""
    found = []
    for count in range(len(records) + 1):
        write(tmp_path / f"first{count}", records[:count])
        recovered = recover(tmp_path / f"first{count}", step)
        found.append(contents(recovered))
    return found


def only_segment(directory: Path) -> Path:
    (number,) = segment_numbers(directory)
    return segment_path(directory, number)


def test_what_was_recorded_is_recovered(tmp_path: Path) -> None:
    write(tmp_path / "j", STORY)
    found = recover(tmp_path / "j", 1)
    assert found.reports == ["steps 2 to 2 took groups before the run ended, and train on the same again"]
    assert found.admitted == {-1: 1, 3: 1}
    assert found.groups == {-1: group(-1)}
    assert found.took == {1: [-1]}
    assert found.chunks == {(3, 0): tokens(2, version=1)}
    assert (found.lowest_row, found.next_row) == (-1, 4)


def test_chunks_are_joined_with_their_spans(tmp_path: Path) -> None:
    chunks = [tokens(3), tokens(2, version=0, first=3), tokens(4, version=2, reason="stop", first=5)]
    write(tmp_path, [Admitted(7, 0), Chunk(7, 1, 0, chunks[0])])
    write(tmp_path, [Chunk(7, 1, 3, chunks[1]), Chunk(7, 1, 5, chunks[2])])  # by another process
    assert recover(tmp_path, 0).chunks == {
        (7, 1): Completion(
            list(range(9)), [-0.5 * i for i in range(9)], "stop", [VersionSpan(0, 0, 5), VersionSpan(2, 5, 9)]
        )
    }


def test_nothing_is_recovered_from_nothing(tmp_path: Path) -> None:
    found = recover(tmp_path / "none", 4)
    assert not found.admitted
    assert not found.reports
    assert not (tmp_path / "none").exists()


def test_a_row_that_is_admitted_again_begins_again(tmp_path: Path) -> None:
    write(tmp_path, [Admitted(0, 0), Chunk(0, 0, 0, tokens(3)), Admitted(0, 2), Chunk(0, 0, 0, tokens(1))])
    found = recover(tmp_path, 0)
    assert found.admitted == {0: 2}
    assert found.chunks == {(0, 0): tokens(1)}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (Chunk(9, 0, 0, tokens(1)), "a chunk comes of row 9, which was not admitted, or is trained or dropped"),
        (Chunk(3, 0, 1, tokens(1)), "a chunk of row 3, sample 0, begins at token 1, but 2 are there"),
        (Chunk(-1, 0, 1, tokens(1)), "a chunk comes of row -1, which was taken by step 1"),
        (Accepted(0, group(0)), "a group comes of row 0, which was taken by step 0"),
        (Accepted(4, group(4)), "a group comes of row 4, which was accepted before"),
        (Accepted(2, group(2)), "a group comes of row 2, which was not admitted, or is trained or dropped"),
        (Admitted(-1, 1), "row -1 is admitted, but step 1 took its group"),
        (Dropped(-1), "row -1 is dropped, but was taken by step 1"),
        (Dropped(2), "row 2 is dropped, but was not admitted, or is trained or dropped"),
        (Took(2, [3]), "step 2 takes row 3, which was not accepted yet"),
        (Took(2, [-1]), "step 2 takes row -1, which was taken by step 1"),
        (Took(2, [4, 4]), r"step 2 takes rows \[4, 4\], of which some come twice"),
        (Took(3, [4]), "step 3 takes groups, expected 2, or one that did before, from 0 on"),
        (Trained(3), "a checkpoint holds steps before 3, but step 2 took no groups yet"),
    ],
)
def test_a_record_that_contradicts_others_is_refused_and_not_written(
    tmp_path: Path, record: Record, message: str
) -> None:
    whole = [*STORY, Admitted(4, 1), Accepted(4, group(4))]

    async def run() -> None:
        journal = Journal(tmp_path / "j", recover(tmp_path / "j", 0), sync="never")
        for one in whole:
            journal.append(one)
        with pytest.raises(ValueError, match=f"^{message}$"):
            journal.append(record)
        await journal.close()

    asyncio.run(run())
    write(tmp_path / "same", whole)
    assert contents(recover(tmp_path / "j", 0)) == contents(recover(tmp_path / "same", 0))


def test_a_run_that_takes_others_for_a_step_begins_another_history(tmp_path: Path) -> None:
    rows: list[Record] = [record for row in range(4) for record in (Admitted(row, 0), Accepted(row, group(row)))]
    write(tmp_path, [*rows, Took(0, [0]), Took(1, [1]), Took(2, [2])])
    write(tmp_path, [Took(1, [1])], step=1)  # the same again changes nothing
    assert recover(tmp_path, 1).took == {1: [1], 2: [2]}
    write(tmp_path, [Took(1, [3])], step=1)
    found = recover(tmp_path, 1)
    assert found.took == {1: [3]}
    assert found.groups.keys() == {1, 2, 3}


# Damage.


def test_a_segment_that_is_cut_anywhere_keeps_all_records_before_the_cut(tmp_path: Path) -> None:
    write(tmp_path / "whole", STORY)
    data = only_segment(tmp_path / "whole").read_bytes()
    ends = [offset + length for offset, length, _ in scan(only_segment(tmp_path / "whole"))]
    expected = states(tmp_path, STORY, 0)
    cut = tmp_path / "cut" / "00000001.journal"
    cut.parent.mkdir()
    for size in range(len(data)):
        cut.write_bytes(data[:size])
        found = recover(cut.parent, 0)
        kept = sum(end <= size for end in ends)
        assert contents(found) == expected[max(kept - 1, 0)], size  # the first is the segment's Base
        begin = ends[kept - 1] if kept else HEADER_BYTES if size >= HEADER_BYTES else 0
        told = [report for report in found.reports if "bytes from there" in report]
        if size == begin and size:
            assert not told  # a file that ends with a record looks like a whole one
        else:
            (damage,) = told
            assert damage.startswith(str(cut))
            assert f"at byte {begin}; the {size - begin} bytes from there on are left out" in damage
    # The run goes on behind a cut, in a segment of its own, and the cut is told again.
    cut.write_bytes(data[: ends[4] + 3])
    write(cut.parent, STORY[4:])
    found = recover(cut.parent, 0)
    assert contents(found) == expected[-1]
    assert f"{cut} ends within a record at byte {ends[4]}; the 3 bytes" in found.reports[0]


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    story = [*STORY[:3], Accepted(1, Group(Prompt(1, "", [], ""), [])), Took(0, [1])]
    write(tmp_path / "whole", story)
    data = only_segment(tmp_path / "whole").read_bytes()
    expected = states(tmp_path, story, 0)
    flipped = tmp_path / "flipped" / "00000001.journal"
    flipped.parent.mkdir()
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        flipped.write_bytes(damaged)
        found = recover(flipped.parent, 0)
        assert any("bytes from there on are left out" in report for report in found.reports), bit
        assert contents(found) in expected, bit


def test_bytes_of_a_disk_that_lost_power_are_no_records(tmp_path: Path) -> None:
    write(tmp_path, STORY[:4])
    path = only_segment(tmp_path)
    kept = contents(recover(tmp_path, 0))
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(4096))
    found = recover(tmp_path, 0)
    assert contents(found) == kept
    (report,) = found.reports
    assert report == f"{path} a record fails its checksum at byte {size}; the 4096 bytes from there on are left out"


def damage(path: Path, number: int) -> None:
    """Record `number` of a segment, its Base being 0."""
    offset = [offset for offset, _, _ in scan(path)][number]
    data = bytearray(path.read_bytes())
    data[offset + 8] ^= 255
    path.write_bytes(data)


def test_behind_damage_in_the_middle_the_next_segment_counts(tmp_path: Path) -> None:
    first: list[Record] = [
        Admitted(0, 0),
        Admitted(1, 0),
        Admitted(2, 0),
        Accepted(0, group(0)),
        Chunk(1, 0, 0, tokens(2)),
    ]
    lost: list[Record] = [Chunk(1, 0, 2, tokens(2)), Accepted(2, group(2)), Took(0, [0, 2]), Admitted(3, 0)]
    write(tmp_path, [*first, *lost])
    write(tmp_path, [Chunk(1, 0, 4, tokens(1)), Chunk(1, 1, 0, tokens(1)), Accepted(3, group(3))])
    damage(segment_path(tmp_path, 1), 6)
    found = recover(tmp_path, 0)
    assert found.admitted == {0: 0, 1: 0, 2: 0, 3: 0}
    assert found.groups == {0: group(0), 3: group(3)}
    assert found.chunks == {(1, 0): tokens(2), (1, 1): tokens(1)}
    assert found.took == {0: [0, 2]}  # known from the next segment's beginning
    damaged, refused, replayed, missing = found.reports
    assert "00000001.journal a record fails its checksum at byte" in damaged
    assert "00000002.journal: 1 records do not fit those before them and are left out" in refused
    assert "a chunk of row 1, sample 0, begins at token 4, but 2 are there" in refused
    assert replayed == "steps 1 to 1 took groups before the run ended, and train on the same again"
    assert missing == "step 1 took rows [2], whose groups are lost: they are generated again"
    # It goes on from there: the lost group is generated again, and trained in its step.
    write(tmp_path, [Accepted(2, group(2)), Took(0, [0, 2]), Chunk(1, 0, 2, tokens(1, first=2))])
    found = recover(tmp_path, 0)
    assert found.groups.keys() == {0, 2, 3}
    assert found.chunks[1, 0] == tokens(3)
    assert recover(tmp_path, 1).groups.keys() == {3}


def test_chunks_from_before_an_admission_that_was_lost_are_not_joined_with_later_ones(tmp_path: Path) -> None:
    write(tmp_path, [Admitted(0, 0), Chunk(0, 0, 0, tokens(2)), Admitted(0, 1), Chunk(0, 0, 0, tokens(2, version=1))])
    write(tmp_path, [Chunk(0, 0, 2, tokens(1, version=1))])
    damage(segment_path(tmp_path, 1), 3)
    found = recover(tmp_path, 0)
    assert found.admitted == {0: 1}
    assert not found.chunks
    assert "a chunk of row 0, sample 0, begins at token 2, but 0 are there" in found.reports[1]


def test_what_may_have_been_trained_is_not_used_where_that_is_not_known(tmp_path: Path) -> None:
    write(tmp_path, [record for row in range(3) for record in (Admitted(row, 0), Accepted(row, group(row)))])
    write(tmp_path, [Took(0, [1]), Took(1, [0]), Trained(2)])
    damage(segment_path(tmp_path, 2), 2)
    found = recover(tmp_path, 2)
    assert (found.admitted, found.groups, found.chunks, found.took) == ({}, {}, {}, {})
    assert found.next_row == 3
    assert found.reports[-1] == (
        "the run resumes from step 2, but what steps 2 to 2 took is lost: whatever is here may have been trained, so"
        " nothing of it is used"
    )
    write(tmp_path, [Admitted(3, 2), Accepted(3, group(3)), Took(2, [3])], step=2)
    found = recover(tmp_path, 2)  # from there on all is as usual
    assert (found.groups, found.took) == ({3: group(3)}, {2: [3]})
    assert not any("is lost" in report for report in found.reports)


@pytest.mark.parametrize("number", [1, 2])
def test_no_damaged_byte_makes_a_group_train_twice(tmp_path: Path, number: int) -> None:
    write(tmp_path / "j", STORY[:9])
    write(tmp_path / "j", STORY[9:])
    path = segment_path(tmp_path / "j", number)
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :])
        for step, trained in [(1, {0, 1}), (2, {0, 1, -1})]:
            found = recover(tmp_path / "j", step)
            assert not trained & found.groups.keys(), place
            assert not trained & found.admitted.keys(), place
            assert found.reports


def test_a_segment_that_is_missing_is_told(tmp_path: Path) -> None:
    for record in STORY[:3]:
        write(tmp_path, [record])
    segment_path(tmp_path, 2).unlink()
    found = recover(tmp_path, 0)
    assert found.reports == [f"{segment_path(tmp_path, 2)} is missing; what it held is left out"]
    assert found.admitted == {0: 0, 1: 0}  # as the third begins with what must be known


def test_what_is_no_damage_but_unknown_is_refused(tmp_path: Path) -> None:
    write(tmp_path, STORY[:3])
    path = only_segment(tmp_path)
    whole = path.read_bytes()
    newer = b"megarl-j" + (2).to_bytes(4, "little")
    path.write_bytes(newer + crc(newer) + whole[HEADER_BYTES:])
    with pytest.raises(JournalError, match=rf"{re.escape(str(path))}: is a journal of format 2, expected 1: resume"):
        recover(tmp_path, 0)
    frame = bytes(encode_frame(Took(0, []))).replace(b"Took", b"Tool")
    payload = frame[8:]
    path.write_bytes(whole + frame[:4] + crc(frame[:4] + payload) + payload)
    with pytest.raises(JournalError, match=rf"record at byte {len(whole)} is whole but of no known kind"):
        recover(tmp_path, 0)


def crc(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "little")


def test_a_file_that_cannot_be_read_is_no_damage(tmp_path: Path) -> None:
    segment_path(tmp_path, 1).mkdir()
    with pytest.raises(JournalError, match=r"00000001.journal: cannot be read: Is a directory; try again"):
        recover(tmp_path, 0)


# Writes that fail.


class Writes:
    """os.write for files of a directory: `limits` are how many bytes the next calls take, or the error they raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.limits: list[int | OSError] = []
        self._write = os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, fd: int, data: Any) -> int:
        if not self.limits:
            return self._write(fd, data)
        limit = self.limits.pop(0)
        if isinstance(limit, OSError):
            raise limit
        return self._write(fd, memoryview(data)[:limit])


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = Writes(monkeypatch)
    writes.limits = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 1, 1]
    write(tmp_path / "short", STORY)
    assert not writes.limits
    write(tmp_path / "whole", STORY)
    assert only_segment(tmp_path / "short").read_bytes() == only_segment(tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("written", [0, 1, 9, 30])
@pytest.mark.parametrize("cut_fails", [False, True])
def test_nothing_stands_behind_what_a_full_disk_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int, cut_fails: bool
) -> None:
    writes = Writes(monkeypatch)

    def truncate(fd: int, size: int) -> None:
        raise OSError(errno.EIO, "no")

    async def run() -> None:
        journal = Journal(tmp_path, recover(tmp_path, 0), sync="never")
        journal.append(STORY[0])
        writes.limits = [written, full()] if written else [full()]
        size = len(encode_frame(STORY[2]))
        message = rf"00000001.journal: cannot write {size} bytes: No space left on device; .* make room"
        with monkeypatch.context() as patch, pytest.raises(JournalError, match=message):
            if cut_fails:
                patch.setattr(os, "ftruncate", truncate)
            journal.append(STORY[2])
        journal.append(STORY[1])
        journal.append(STORY[2])  # as if it had not been tried
        await journal.close()

    asyncio.run(run())
    found = recover(tmp_path, 0)
    assert found.admitted == {0: 0, 1: 0}
    assert found.chunks == {(0, 0): tokens(3)}
    assert segment_numbers(tmp_path) == ([1, 2] if cut_fails else [1])
    assert len(found.reports) == (cut_fails and written > 0)


def test_a_segment_that_cannot_be_begun_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = Writes(monkeypatch)

    async def run() -> None:
        journal = Journal(tmp_path, recover(tmp_path, 0), sync="never", segment_bytes=1)
        for record in STORY[:2]:
            writes.limits = [7, full()]
            with pytest.raises(JournalError, match=r"No space left on device"):
                journal.append(record)
            writes.limits = []
            journal.append(record)
        await journal.close()

    asyncio.run(run())
    assert segment_numbers(tmp_path) == [1, 2, 3]
    assert recover(tmp_path, 0).admitted == {0: 0, 1: 0}
    assert not recover(tmp_path, 0).reports


def test_a_journal_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match=r"file/j: cannot open the journal: Not a directory"):
        Journal(tmp_path / "file" / "j", recover(tmp_path / "none", 0), sync="never")


# Durability.


@pytest.fixture
def fsyncs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One for each fsync, whether it was in the main thread."""
    calls, fsync = [], os.fsync

    def counted(fd: int) -> None:
        calls.append(threading.current_thread() is threading.main_thread())
        fsync(fd)

    monkeypatch.setattr(os, "fsync", counted)
    return calls


async def opened(directory: Path, sync: SyncPolicy = "always", segment_bytes: int = 1 << 20, step: int = 0) -> Journal:
    return Journal(directory, recover(directory, step), sync=sync, segment_bytes=segment_bytes)


def test_those_who_wait_at_the_same_time_share_an_fsync(tmp_path: Path, fsyncs: list[bool]) -> None:
    async def run() -> None:
        journal = await opened(tmp_path)
        fsyncs.clear()
        await asyncio.gather(*(journal.add(Admitted(row, 0)) for row in range(50)))
        assert fsyncs == [False]  # one, and not in the thread of the event loop
        # Those who come while one is under way share the next.
        first = asyncio.create_task(journal.add(Admitted(100, 0)))
        await asyncio.sleep(0.01)
        await asyncio.gather(first, *(journal.add(Admitted(row, 0)) for row in range(200, 250)))
        assert len(fsyncs) <= 3
        await journal.sync()  # nothing is new
        assert len(fsyncs) <= 3
        await journal.close()

    asyncio.run(run())


def test_who_waits_can_be_cancelled_and_others_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, begun, fsync = threading.Event(), threading.Event(), os.fsync

    def slow(fd: int) -> None:
        begun.set()
        assert go.wait(60)
        fsync(fd)

    async def run() -> None:
        journal = await opened(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", slow)
            one = asyncio.create_task(journal.add(Admitted(0, 0)))
            other = asyncio.create_task(journal.add(Admitted(1, 0)))
            await asyncio.to_thread(begun.wait, 60)
            one.cancel()
            await asyncio.sleep(0.01)
            assert one.cancelled()
            assert not other.done()
            go.set()
            await other
        await journal.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("always", {"Admitted", "Chunk", "Accepted", "Dropped", "Took", "Trained"}),
        ("group", {"Accepted", "Took", "Trained"}),
        ("never", set()),
    ],
)
def test_the_policy_says_what_is_waited_for(
    tmp_path: Path, fsyncs: list[bool], policy: SyncPolicy, expected: set[str]
) -> None:
    waited: set[str] = set()
    plain: set[str] = set()

    async def run() -> None:
        journal = await opened(tmp_path, policy)
        for record in STORY:
            fsyncs.clear()
            await journal.add(record)
            (waited if fsyncs else plain).add(type(record).__name__)
        await journal.close()

    asyncio.run(run())
    assert waited == expected
    assert not waited & plain


def test_what_comes_after_the_end_is_refused(tmp_path: Path) -> None:
    """Its file may be another's by then."""

    async def run() -> None:
        journal = await opened(tmp_path)
        await journal.add(Admitted(0, 0))
        await journal.close()
        with pytest.raises(JournalError, match="the journal is closed"):
            await journal.add(Admitted(1, 0))

    asyncio.run(run())


def test_after_a_failed_fsync_nothing_is_called_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    async def run() -> None:
        journal = await opened(tmp_path)
        message = r"cannot bring the journal to disk: Disk quota exceeded; make room .* resume the run"
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            results = await asyncio.gather(*(journal.add(Admitted(row, 0)) for row in range(2)), return_exceptions=True)
        assert [type(result) for result in results] == [JournalError, JournalError]
        assert re.search(message, str(results[0]))
        for _ in range(2):  # although an fsync would now succeed
            with pytest.raises(JournalError, match=message):
                await journal.sync()
        with pytest.raises(JournalError, match=message):
            journal.append(Admitted(5, 0))
        with pytest.raises(JournalError, match=message):
            await journal.close()

    asyncio.run(run())


class Disk:
    """What of a directory would outlive a loss of power: directory entries and bytes that were synced, and luck.

    Stands between the journal and `os`. `before` is called before each change, with `what` it is, in whatever thread.
    """

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before: Callable[[str], None] = lambda what: None
        self._directory = directory
        self._real = {name: getattr(os, name) for name in ("open", "write", "fsync", "ftruncate", "replace", "unlink")}
        self._durable: dict[str, Node] = {}
        self._changes: list[dict[str, Node | None]] = []  # of entries, not synced
        self._nodes: dict[int, Node] = {}  # by inode, which a node's handle keeps from being used again
        for name in self._real:
            monkeypatch.setattr(os, name, getattr(self, name))

    def _mine(self, path: Any) -> bool:
        return isinstance(path, str | Path) and Path(path).parent == self._directory

    def _now(self) -> dict[str, Node]:
        entries: dict[str, Node | None] = dict(self._durable)
        for change in self._changes:
            entries |= change
        return {name: node for name, node in entries.items() if node is not None}

    def open(self, path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if self._mine(path) and flags & os.O_CREAT:
            self.before("open")
        fd = self._real["open"](path, flags, *args, **kwargs)
        if self._mine(path) and flags & os.O_CREAT:
            node = Node(self._real["open"](path, os.O_RDONLY))
            self._nodes[os.fstat(fd).st_ino] = node
            self._changes.append({Path(path).name: node})
        return fd

    def write(self, fd: int, data: Any) -> int:
        if os.fstat(fd).st_ino in self._nodes:
            self.before("write")
        return self._real["write"](fd, data)

    def ftruncate(self, fd: int, size: int) -> None:
        if os.fstat(fd).st_ino in self._nodes:
            self.before("ftruncate")
        self._real["ftruncate"](fd, size)

    def fsync(self, fd: int) -> None:
        inode = os.fstat(fd).st_ino
        if inode in self._nodes:
            self.before("fsync")
            self._nodes[inode].durable = os.fstat(fd).st_size
        elif inode == self._directory.stat().st_ino:
            self.before("fsync")
            self._durable, self._changes = self._now(), []
        self._real["fsync"](fd)

    def replace(self, source: Any, target: Any) -> None:
        if self._mine(source):
            self.before("replace")
            self._changes.append({Path(target).name: self._now()[Path(source).name], Path(source).name: None})
        self._real["replace"](source, target)

    def unlink(self, path: Any, **kwargs: Any) -> None:
        if self._mine(path) and os.path.exists(path):
            self.before("unlink")
            self._changes.append({Path(path).name: None})
        self._real["unlink"](path, **kwargs)

    def lose_power(self, target: Path, chance: random.Random) -> None:
        """Make `target` what the directory would be afterwards."""
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        entries: dict[str, Node | None] = dict(self._durable)
        for change in self._changes:
            if chance.random() < 0.5:
                entries |= change
        for name, node in entries.items():
            if node is not None:
                (target / name).write_bytes(node.after_power_loss(chance))

    def close(self) -> None:
        for node in self._nodes.values():
            os.close(node.fd)


class Node:
    """A file's content, by a handle of our own."""

    def __init__(self, fd: int) -> None:
        self.fd, self.durable = fd, 0

    def after_power_loss(self, chance: random.Random) -> bytes:
        """What was synced and some of what follows, the rest being gone, or zero, or noise."""
        data = os.pread(self.fd, os.fstat(self.fd).st_size, 0)
        kept = chance.randint(min(self.durable, len(data)), len(data))
        rest = len(data) - kept
        return data[:kept] + chance.choice([b"", bytes(rest), chance.randbytes(rest)])


def assert_kept(found: Recovered, appended: list[Record], promised: int, step: int) -> None:
    """The first `promised` records are there, except what steps before `step` trained, which are among them."""
    dropped = {record.row for record in appended if isinstance(record, Dropped)}  # may be there, promised or not
    appended = appended[:promised]
    took = {record.step: record.rows for record in appended if isinstance(record, Took)}
    trained = {row for late, rows in took.items() if late < step for row in rows}
    assert not trained & found.admitted.keys()
    assert not trained & found.groups.keys()
    for late, rows in took.items():
        assert late < step or found.took[late] == rows
    for record in appended:
        match record:
            case Admitted(row=row):
                assert row in trained | dropped or row in found.admitted
            case Accepted(row=row, group=expected):
                assert row in trained | dropped or found.groups[row] == expected
            case Chunk(row=row, sample=sample, start=start, completion=completion):
                end = start + len(completion.output_ids)
                if row not in trained | dropped and row not in found.groups:
                    assert found.chunks[row, sample].output_ids[start:end] == completion.output_ids


def life(seed: int, steps: int) -> Iterator[list[Record]]:
    """What a coordinator records; those of a list at the same time. A checkpoint is written at every second step."""
    chance = random.Random(seed)
    row = 0
    ready: list[int] = []
    for step in range(steps):
        while len(ready) < 2:
            new = list(range(row, row + 3))
            row += 3
            yield [Admitted(one, step) for one in new]
            for part in range(2):
                yield [Chunk(one, 0, 4 * part, tokens(4, version=step, first=4 * part)) for one in new]
            slow = chance.choice(new)
            yield [Accepted(one, group(one, size=chance.randint(1, 9))) for one in new if one != slow]
            ready += [one for one in new if one != slow]
            if chance.random() < 0.3:
                yield [Dropped(slow)]
        taken, ready = ready[:2], ready[2:]
        yield [Took(step, taken)]
        if step % 2:
            yield [Trained(step + 1)]


@pytest.mark.parametrize("policy", ["always", "group", "never"])
@pytest.mark.parametrize("seed", range(3))
def test_what_was_promised_outlives_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: SyncPolicy, seed: int
) -> None:
    disk = Disk(tmp_path / "j", monkeypatch)
    chance = random.Random(seed)
    appended: list[Record] = []
    promised = step = losses = 0  # the first `promised` of `appended` are durable, as someone was told so
    lock = threading.Lock()

    def lose(what: str) -> None:
        nonlocal losses
        with lock:
            if chance.random() > 0.3:
                return
            losses += 1
            known, resumed = promised, step
            disk.lose_power(tmp_path / "after", chance)
            found = recover(tmp_path / "after", resumed)
            if policy != "never":
                assert_kept(found, appended, known, resumed)
            took = [record for record in appended if isinstance(record, Took) and record.step < resumed]
            assert not {row for record in took for row in record.rows} & found.groups.keys()
            write_on(tmp_path / "after", resumed)

    def write_on(directory: Path, resumed: int) -> None:
        """A journal goes on there, and loses nothing by that."""
        before = contents(recover(directory, resumed))
        with ThreadPoolExecutor(1) as elsewhere:  # as a loop runs here
            elsewhere.submit(asyncio.run, close(directory, resumed)).result()
        assert contents(recover(directory, resumed)) == before

    async def close(directory: Path, resumed: int) -> None:
        await (await opened(directory, "never", step=resumed)).close()

    async def run() -> None:
        nonlocal promised, step
        journal = await opened(tmp_path / "j", policy, segment_bytes=800)

        async def add(record: Record) -> None:
            nonlocal promised
            appended.append(record)
            number = len(appended)
            await journal.add(record)
            synced = policy == "always" or (policy == "group" and isinstance(record, Accepted | Took | Trained))
            if synced:
                with lock:
                    promised = max(promised, number)

        for together in life(seed, steps=8):
            if isinstance(together[0], Trained):
                step = together[0].step  # the checkpoint is there before it is recorded
            await asyncio.gather(*(add(record) for record in together))
            if chance.random() < 0.1:  # the process is killed, and the next one builds on what it finds
                for segment in [*journal._full, journal._segment]:
                    os.close(segment.fd)
                journal = await opened(tmp_path / "j", policy, segment_bytes=800, step=step)
                with lock:
                    promised = len(appended)
        await journal.close()

    disk.before = lose
    (tmp_path / "j").mkdir()
    asyncio.run(run())
    disk.close()
    assert losses > 20


# Segments and cleaning.


def test_a_segment_that_is_full_is_followed_by_another(tmp_path: Path) -> None:
    write(tmp_path / "j", STORY, segment_bytes=500)
    numbers = segment_numbers(tmp_path / "j")
    assert len(numbers) > 2
    assert numbers == list(range(1, len(numbers) + 1))
    largest = max(len(encode_frame(record)) for record in STORY)
    assert all(500 < segment_path(tmp_path / "j", number).stat().st_size <= 500 + largest for number in numbers[:-1])
    write(tmp_path / "one", STORY)
    assert contents(recover(tmp_path / "j", 1)) == contents(recover(tmp_path / "one", 1))
    write(tmp_path / "j", [])  # each process writes a segment of its own
    assert segment_numbers(tmp_path / "j") == [*numbers, numbers[-1] + 1]


def test_full_segments_are_synced_before_what_follows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = [], os.fsync

    def noted(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    async def run() -> None:
        journal = await opened(tmp_path / "j", "group", segment_bytes=1)
        monkeypatch.setattr(os, "fsync", noted)
        for row in range(2):
            await journal.add(Admitted(row, 0))
        assert not synced
        await journal.add(Accepted(1, group(1)))
        assert synced == [f"0000000{number}.journal" for number in (1, 2, 3, 4)] + ["j"]
        await journal.close()

    asyncio.run(run())


async def live(journal: Journal, seed: int, steps: int) -> list[Record]:
    """Record a life; returns its records."""
    records = [record for together in life(seed, steps) for record in together]
    for record in records:
        await journal.add(record)
    return records


@pytest.mark.parametrize("seed", range(2))
def test_cleaning_can_end_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """At each change of a file the directory is copied, as a killed process would leave it."""
    disk = Disk(tmp_path / "j", monkeypatch)
    copies: list[tuple[str, Path]] = []
    cleaning: list[str] = []

    def copy(what: str) -> None:
        copies.append((what, tmp_path / f"copy{len(copies)}"))
        shutil.copytree(tmp_path / "j", copies[-1][1])

    (tmp_path / "j").mkdir()
    records = [record for together in life(seed, steps=8) for record in together]
    with asyncio.Runner() as runner:
        journal = runner.run(opened(tmp_path / "j", "never", segment_bytes=1500))
        for position, record in enumerate(records):
            if not isinstance(record, Trained):
                runner.run(journal.add(record))
                continue
            copies.clear()
            disk.before = copy
            runner.run(journal.add(record))
            disk.before = lambda what: None
            copy("end")
            cleaning += [what for what, _ in copies]
            for step in (record.step, record.step - 2):
                plain = tmp_path / f"plain{record.step}.{step}"
                write(plain, records[: position + 1])
                expected = contents(recover(plain, step))
                for what, path in copies:
                    assert contents(recover(path, step)) == expected, what
            for what, path in copies:
                write(path, [], step=record.step)  # a process goes on, and removes what was left behind
                assert not list(path.glob("*.aside"))
                assert segment_numbers(path)[0] == recover(path, record.step).ledger.first
                assert contents(recover(path, record.step)) == contents(recover(tmp_path / "j", record.step)), what
                shutil.rmtree(path)
        runner.run(journal.close())
    disk.close()
    assert {"open", "write", "fsync", "replace", "unlink"} <= set(cleaning)


def test_a_run_can_fall_back_by_one_checkpoint(tmp_path: Path) -> None:
    async def run() -> list[Record]:
        journal = await opened(tmp_path, "never", segment_bytes=500)
        records = await live(journal, 0, steps=12)
        await journal.close()
        return records

    records = asyncio.run(run())
    assert segment_numbers(tmp_path)[0] > 1  # it was cleaned
    took = {record.step: record.rows for record in records if isinstance(record, Took)}
    found = recover(tmp_path, 12)
    assert not found.took
    found = recover(tmp_path, 10)
    assert found.took == {10: took[10], 11: took[11]}
    assert found.groups.keys() >= {*took[10], *took[11]}
    assert found.reports == ["steps 11 to 12 took groups before the run ended, and train on the same again"]
    # An older checkpoint needs what is not there any more.
    found = recover(tmp_path, 8)
    assert (found.admitted, found.groups, found.took) == ({}, {}, {})
    (report,) = found.reports
    assert "the run resumes from step 8, but what steps up to 10 took was cleaned away" in report
    rows = took[8]
    write(tmp_path, [record for row in rows for record in (Admitted(row, 8), Accepted(row, group(row)))], step=8)
    write(tmp_path, [Took(8, rows)], step=8)
    found = recover(tmp_path, 8)
    assert (found.took, found.reports) == (
        {8: rows},
        ["steps 9 to 9 took groups before the run ended, and train on the same again"],
    )
    assert not set(rows) & recover(tmp_path, 9).groups.keys()


def test_damage_of_what_was_cleaned_is_all_that_is_told(tmp_path: Path) -> None:
    async def run() -> None:
        journal = await opened(tmp_path, "never", segment_bytes=500)
        await live(journal, 0, steps=12)
        await journal.close()

    asyncio.run(run())
    write(tmp_path, [], step=12)
    damage(segment_path(tmp_path, segment_numbers(tmp_path)[0]), 0)
    told = recover(tmp_path, 12).reports
    assert "a record fails its checksum at byte 16" in told[0]
    assert not any("is missing" in report for report in told)


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def test_a_slow_row_keeps_no_others_on_disk(tmp_path: Path) -> None:
    segment_bytes = 4000
    sizes = []

    async def run() -> Recovered:
        journal = await opened(tmp_path, "never", segment_bytes=segment_bytes)
        await journal.add(Admitted(10_000, 0))
        for step in range(60):
            await journal.add(Chunk(10_000, 0, step, tokens(1, first=step)))
            for row in (2 * step, 2 * step + 1):
                await journal.add(Admitted(row, step))
                await journal.add(Accepted(row, group(row, size=20)))
            await journal.add(Took(step, [2 * step, 2 * step + 1]))
            await journal.add(Trained(step + 1))
            on_disk = size_of(tmp_path)
            needed = recover(tmp_path, step + 1).ledger.live_bytes
            assert on_disk <= needed + max(needed, segment_bytes)
            sizes.append(on_disk)
        await journal.close()
        return recover(tmp_path, 60)

    found = asyncio.run(run())
    assert found.admitted == {10_000: 0}
    assert found.chunks[10_000, 0] == tokens(60)
    assert max(sizes) < 60 * 2 * len(encode_frame(Accepted(0, group(0, size=20)))) / 4


def test_a_run_goes_on_while_its_journal_is_cleaned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, begun, replace = threading.Event(), threading.Event(), os.replace
    cleanings = []

    def slow(*args: Any) -> None:
        cleanings.append(args)
        begun.set()
        assert go.wait(60)
        replace(*args)

    async def run() -> list[Record]:
        journal = await opened(tmp_path / "j", "always", segment_bytes=500)
        records = [record for together in life(1, steps=8) for record in together]
        monkeypatch.setattr(os, "replace", slow)
        waiting = []
        for record in records:
            waiting.append(asyncio.create_task(journal.add(record)))
            if not isinstance(record, Trained):
                await waiting[-1]
            elif not begun.is_set():
                await asyncio.to_thread(begun.wait, 60)
                waiting[-1].cancel()  # the thread goes on all the same
        await asyncio.sleep(0.05)
        assert len(cleanings) == 1  # at a time
        go.set()
        await asyncio.gather(*waiting[:-1], return_exceptions=True)
        await waiting[-1]
        await journal.add(Admitted(1000, 8))
        await journal.close()
        return [*records, Admitted(1000, 8)]

    write(tmp_path / "plain", asyncio.run(run()))
    assert segment_numbers(tmp_path / "j")[0] > 1
    for step in (8, 6):
        assert contents(recover(tmp_path / "j", step)) == contents(recover(tmp_path / "plain", step))


@pytest.mark.parametrize("call", ["write", "replace", "unlink"])
def test_what_cannot_be_cleaned_is_told_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    real = getattr(os, call)
    monkeypatch.setattr(logging.getLogger("megarl"), "propagate", True)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return real(*args, **kwargs)
        raise full()

    async def run() -> list[Record]:
        journal = await opened(tmp_path / "j", "never", segment_bytes=500)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            records = await live(journal, 0, steps=8)
        assert contents(recover(tmp_path / "j", 6))["took"].keys() == {6, 7}
        before = segment_numbers(tmp_path / "j")
        later: list[Record] = [record for row in (100, 101) for record in (Admitted(row, 8), Accepted(row, group(row)))]
        later += [Took(8, [100, 101]), Trained(9)]
        for record in later:
            await journal.add(record)  # now it succeeds
        assert segment_numbers(tmp_path / "j")[0] > before[0]
        await journal.close()
        return records + later

    write(tmp_path / "plain", asyncio.run(run()))
    assert "the journal was not cleaned, and grows until it is" in caplog.text
    assert "No space left on device" in caplog.text
    for step in (9, 8):
        assert contents(recover(tmp_path / "j", step)) == contents(recover(tmp_path / "plain", step))


def test_damage_that_cleaning_meets_is_told_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("megarl"), "propagate", True)

    async def run() -> None:
        journal = await opened(tmp_path, "never", segment_bytes=1)
        before: list[Record] = [Admitted(5, 0), Accepted(5, group(5)), *STORY[:9], Trained(1)]
        for record in before:
            await journal.add(record)
        (place,) = recover(tmp_path, 0).ledger.rows[5].places
        damage(segment_path(tmp_path, place.segment), 1)
        after: list[Record] = [Admitted(2, 1), Accepted(2, group(2)), Took(1, [2]), Trained(2)]
        for record in after:
            await journal.add(record)
        await journal.close()

    asyncio.run(run())
    assert "was not cleaned" in caplog.text
    assert "the record at byte" in caplog.text
    assert "was whole before and is damaged now" in caplog.text
    found = recover(tmp_path, 2)
    assert found.admitted == {5: 0}
    assert not found.groups
    assert "a record fails its checksum" in found.reports[0]


# All together.


class Lives(RuleBasedStateMachine):
    """A journal that lives through many processes, beside a reference that keeps whole history in memory."""

    @initialize(directory=st.just(None), segment_bytes=st.sampled_from([1, 300, 1500]))
    def begin(self, directory: None, segment_bytes: int) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.runner, self.segment_bytes = asyncio.Runner(), segment_bytes
        self.versions: dict[int, int] = {}  # of rows that were not dropped
        self.chunks: dict[tuple[int, int], Completion] = {}
        self.groups: dict[int, Group] = {}
        self.took: list[list[int]] = []
        self.checkpoints = [0]
        self.rows: range = range(0)
        self.journal = self.open(0)

    def teardown(self) -> None:
        self.runner.run(self.journal.close())
        self.runner.close()
        shutil.rmtree(self.directory)

    def open(self, step: int) -> Journal:
        return self.runner.run(opened(self.directory, "never", self.segment_bytes, step))

    def add(self, record: Record) -> None:
        self.runner.run(self.journal.add(record))

    def untaken(self, step: int) -> list[int]:
        """Groups that steps before `step` left."""
        taken = {row for rows in self.took[:step] for row in rows}
        return sorted(self.groups.keys() - taken)

    @rule(row=st.integers(-3, 12))
    def admit(self, row: int) -> None:
        if row in self.groups and row not in self.untaken(len(self.took)):
            return
        self.forget(row)
        self.versions[row] = len(self.took)
        self.rows = range(min(self.rows.start, row), max(self.rows.stop, row + 1))
        self.add(Admitted(row, len(self.took)))

    def forget(self, row: int) -> None:
        self.versions.pop(row, None)
        self.groups.pop(row, None)
        self.chunks = {key: value for key, value in self.chunks.items() if key[0] != row}

    def open_rows(self) -> list[int]:
        return sorted(self.versions.keys() - self.groups.keys())

    @precondition(lambda self: self.open_rows())
    @rule(data=st.data(), sample=st.integers(0, 1), count=st.integers(0, 4))
    def generate(self, data: st.DataObject, sample: int, count: int) -> None:
        row = data.draw(st.sampled_from(self.open_rows()))
        whole = self.chunks.setdefault((row, sample), Completion([], [], "length", []))
        start = len(whole.output_ids)
        self.add(Chunk(row, sample, start, tokens(count, version=len(self.took), first=start)))
        whole.extend(tokens(count, version=len(self.took), first=start))

    @precondition(lambda self: self.open_rows())
    @rule(data=st.data(), size=st.integers(0, 20))
    def accept(self, data: st.DataObject, size: int) -> None:
        row = data.draw(st.sampled_from(self.open_rows()))
        self.add(Accepted(row, group(row, size)))
        version = self.versions[row]
        self.forget(row)
        self.versions[row], self.groups[row] = version, group(row, size)

    @precondition(lambda self: self.open_rows() or self.untaken(len(self.took)))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.open_rows() + self.untaken(len(self.took))))
        self.add(Dropped(row))
        self.forget(row)

    @precondition(lambda self: self.untaken(len(self.took)))
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.sampled_from(self.untaken(len(self.took))), unique=True, max_size=3))
        self.add(Took(len(self.took), rows))
        self.took.append(rows)

    @precondition(lambda self: len(self.took) > self.checkpoints[-1])
    @rule(data=st.data())
    def take_again(self, data: st.DataObject) -> None:
        """As a run does that fell back: the same, or others."""
        step = data.draw(st.integers(self.checkpoints[-1], len(self.took) - 1))
        rows = data.draw(st.just(self.took[step]) | st.lists(st.sampled_from(self.untaken(step)), unique=True))
        self.add(Took(step, rows))
        if rows != self.took[step]:
            self.took[step:] = [rows]

    @precondition(lambda self: len(self.took) > self.checkpoints[-1])
    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        step = data.draw(st.integers(self.checkpoints[-1] + 1, len(self.took)))
        self.add(Trained(step))
        self.checkpoints = [self.checkpoints[-1], step]

    @rule(back=st.integers(0, 1), torn=st.binary(max_size=30))
    def die(self, back: int, torn: bytes) -> None:
        """And go on from the newest checkpoint, or the one before."""
        self.checkpoints = self.checkpoints[: max(len(self.checkpoints) - back, 1)]
        self.runner.run(self.journal.close())
        with segment_path(self.directory, segment_numbers(self.directory)[-1]).open("ab") as file:
            file.write(torn)
        self.journal = self.open(self.checkpoints[-1])

    @invariant()
    def what_is_recovered_is_what_was_recorded(self) -> None:
        for step in self.checkpoints:
            found = recover(self.directory, step)
            trained = {row for rows in self.took[:step] for row in rows}
            assert found.admitted == {row: at for row, at in self.versions.items() if row not in trained}
            assert found.groups == {row: one for row, one in self.groups.items() if row not in trained}
            assert found.chunks == self.chunks
            assert list(found.took.items()) == list(enumerate(self.took))[step:]
            assert range(found.lowest_row, found.next_row) == self.rows


def test_any_life_is_recovered() -> None:
    run_state_machine_as_test(
        Lives, settings=settings(derandomize=True, deadline=None, max_examples=60, stateful_step_count=40)
    )


CHILD = """
import asyncio, sys
from pathlib import Path
import msgspec
from megarl.transfer_queue.journal import Journal, recover
from megarl.transfer_queue.records import Accepted, Admitted, Chunk, Took, Trained
from tests.unit.test_journal import group, tokens

async def run(directory, step):
    recovered = recover(directory, step)
    journal = Journal(directory, recovered, sync="group", segment_bytes=5000)
    print(recovered.reports, file=sys.stderr, flush=True)

    async def add(record):
        await journal.add(record)
        print(msgspec.json.encode(record).decode(), flush=True)

    async def generate(row, done):
        for start in range(done, 100, 25):
            await add(Chunk(row, 0, start, tokens(25, first=start)))
        await add(Accepted(row, group(row, size=30)))
        ready.append(row)

    taken = {row for rows in recovered.took.values() for row in rows}
    ready = [row for row in recovered.groups if row not in taken]
    for row in sorted(recovered.admitted.keys() - recovered.groups.keys()):
        chunks = recovered.chunks.get((row, 0))
        await generate(row, len(chunks.output_ids) if chunks else 0)
    row = recovered.next_row
    while True:
        while len(ready) < 2:
            await add(Admitted(row, step))
            await generate(row, 0)
            row += 1
        rows = recovered.took.get(step) or [ready.pop(0), ready.pop(0)]
        await add(Took(step, rows))
        step += 1
        if step % 3 == 0:
            print(step, flush=True)  # the checkpoint is there
            await add(Trained(step))

asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2])))
"""


def test_what_a_killed_process_said_is_durable_is_there(tmp_path: Path) -> None:
    chance, decode = random.Random(0), msgspec.json.Decoder(Record).decode
    step, said = 0, list[Record]()
    for _ in range(6):
        command = [sys.executable, "-c", CHILD, str(tmp_path), str(step)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            assert child.stderr is not None
            lines = [child.stdout.readline() for _ in range(chance.randint(1, 120))]
            child.kill()
            lines += child.stdout.readlines()
            errors = child.stderr.read()
        assert child.returncode == -9, errors
        for line in lines if lines[-1].endswith("\n") else lines[:-1]:
            if line.strip().isdigit():
                step = int(line)
            else:
                said.append(decode(line))
        found = recover(tmp_path, step)
        assert_kept(found, said, len(said), step)
        for late, rows in found.took.items():  # no row was trained, nor is trained by two steps
            others = [record.rows for record in said if isinstance(record, Took) and record.step != late]
            assert not set(rows) & {row for other in others for row in other}
    assert step > 0
    assert segment_numbers(tmp_path)[0] > 1, "nothing was cleaned"

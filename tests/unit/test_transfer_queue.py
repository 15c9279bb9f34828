"""The queue: a group goes in once and comes out once, never too old, and no step waits for ever."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megarl.transfer_queue import TransferQueue
from megarl.transfer_queue.admission import Admission
from megarl.types import Completion, Group, Prompt, Trajectory, VersionSpan


def group(row: int, *versions: int) -> Group:
    """The group of `row`, whose trajectories were sampled by these versions."""
    trajectories = [
        Trajectory(
            output_ids=[1],
            engine_logprobs=[-0.5],
            versions=[VersionSpan(version, 0, 1)],
            finish_reason="stop",
            text="",
            scores={"answer": 0.0},
        )
        for version in versions
    ]
    return Group(Prompt(index=row, text="", input_ids=[1], answer=""), trajectories)


async def queue_at(path: Path, step: int, groups: int = 1, *, max_lag: int = 0) -> TransferQueue:
    """One whose steps before `step` took their groups, and whose rows of this step were admitted."""
    queue = TransferQueue(groups, max_lag=max_lag, ask=groups, steps=9, directory=path, sync="group")
    for earlier in range(step):
        queue.publish(earlier)
        for row in queue.admit():
            await queue.put(row, group(row, earlier))
        queue.take(earlier)
    queue.publish(step)
    queue.admit()
    return queue


def test_a_step_comes_out_in_order_however_its_groups_finished(tmp_path: Path) -> None:
    async def run() -> None:
        queue = await queue_at(tmp_path, 1, 3)
        for row in (5, 3, 4):
            assert queue.take(1) is None
            await queue.put(row, group(row, 1))
        groups = queue.take(1)
        assert groups is not None
        assert [one.prompt.index for one in groups] == [3, 4, 5]

    asyncio.run(run())


@pytest.mark.parametrize("row", [1, 0, 2], ids=["still there", "taken already", "never asked for"])
def test_a_group_goes_in_once(tmp_path: Path, row: int) -> None:
    async def run() -> None:
        queue = await queue_at(tmp_path, 1)
        await queue.put(1, group(1, 1))
        with pytest.raises(ValueError, match=f"group of row {row} was put into the queue before, or never asked for"):
            await queue.put(row, group(row, 1))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("max_lag", "versions", "allowed"),
    [(0, (3,), True), (0, (2,), False), (0, (3, 2), False), (2, (3, 1), True), (2, (3, 0), False)],
)
def test_tokens_may_lag_behind_as_far_as_allowed(
    tmp_path: Path, max_lag: int, versions: tuple[int, ...], allowed: bool
) -> None:
    async def run() -> None:
        queue = await queue_at(tmp_path, 3, max_lag=max_lag)
        await queue.put(3, group(3, *versions))
        stale = rf"rows \[3\] of step 3 .* {max_lag} version"
        with nullcontext() if allowed else pytest.raises(AssertionError, match=stale):
            queue.take(3)

    asyncio.run(run())


def tokens(*ids: int) -> Completion:
    return Completion(list(ids), [-1.0] * len(ids), "length", [VersionSpan(0, 0, len(ids))])


def test_a_run_goes_on_from_its_journal(tmp_path: Path) -> None:
    """Nothing that was finished is asked again, what had begun goes on, and steps train on what they trained on."""

    def queue() -> TransferQueue:
        return TransferQueue(2, max_lag=1, ask=4, steps=3, directory=tmp_path, sync="group")

    async def before() -> None:
        one = queue()
        one.publish(0)
        assert one.admit() == [0, 1, 2, 3]
        for row in (3, 1):
            await one.put(row, group(row, 0))
        assert [g.prompt.index for g in one.take(0) or []] == [1, 3]
        one.extend(0, 1, 0, tokens(7, 8))
        one.extend(0, 1, 2, tokens(9))
        one.publish(1)
        assert one.admit() == [4, 5]
        await one.put(2, group(2, 0))  # and the process is killed

    async def after() -> None:
        one = queue()
        one.publish(0)
        assert one.admit() == [0]  # 4 and 5 were asked under version 1
        assert [g.prompt.index for g in one.take(0) or []] == [1, 3]
        assert one.begun(0) == {1: tokens(7, 8, 9)}
        one.publish(1)
        assert one.admit() == [4, 5]
        assert one.begun(4) == {}
        await one.put(5, group(5, 1))
        assert one.take(1) is None  # row 0 is due
        one.extend(0, 1, 3, tokens(1))
        await one.put(0, group(0, 0, 1))
        assert [g.prompt.index for g in one.take(1) or []] == [0, 2]
        await one.saved(2)
        await one.close()

    async def later() -> None:
        one = queue()
        one.publish(2)
        assert one.admit() == [4]
        await one.put(4, group(4, 2))
        assert [g.prompt.index for g in one.take(2) or []] == [4, 5]

    for part in (before, after, later):
        asyncio.run(part())


def test_a_step_waits_for_a_group_that_it_took_and_damage_lost() -> None:
    admission = Admission(2, max_lag=0, ask=2, steps=1)
    admission.restore(0, {0: 0, 1: 0}, [0], {0: [0, 1]})
    admission.publish(0)
    assert admission.admit() == [1]
    assert admission.take() is None
    admission.finish(1)
    assert admission.take() == [0, 1]


def test_a_run_that_falls_back_further_than_is_kept_trains_on_no_newer_tokens(tmp_path: Path) -> None:
    async def before() -> None:
        queue = await queue_at(tmp_path, 3, 2)
        await queue.saved(1)
        await queue.saved(2)
        await queue.saved(3)
        await queue.close()

    async def after() -> None:
        queue = TransferQueue(2, max_lag=0, ask=2, steps=9, directory=tmp_path, sync="group")
        for step in range(4):
            queue.publish(step)
            assert queue.admit() == [2 * step, 2 * step + 1]
            for row in (2 * step, 2 * step + 1):
                await queue.put(row, group(row, step))
            assert queue.take(step) is not None
        await queue.close()

    asyncio.run(before())
    asyncio.run(after())


class Loop(RuleBasedStateMachine):
    """A run as admission sees it. Groups finish in any order; the trainer takes, learns and publishes when it can.

    A crash forgets all but what a journal and a checkpoint hold, and goes on from there.
    """

    @initialize(groups=st.integers(1, 4), max_lag=st.integers(0, 3), steps=st.integers(1, 8), data=st.data())
    def begin(self, groups: int, max_lag: int, steps: int, data: st.DataObject) -> None:
        self.groups, self.max_lag, self.steps = groups, max_lag, steps
        self.ask = data.draw(st.integers(groups, (max_lag + 1) * groups))
        self.admitted: dict[int, int] = {}  # all that ever were: what a journal holds
        self.oldest: dict[int, int] = {}  # version of its tokens
        self.asked: set[int] = set()  # since the last crash
        self.finished: set[int] = set()
        self.took: dict[int, list[int]] = {}
        self.version = self.saved = 0
        self.admission = self.fresh()
        self.publish()

    def fresh(self) -> Admission:
        return Admission(self.groups, max_lag=self.max_lag, ask=self.ask, steps=self.steps)

    def publish(self) -> None:
        self.admission.publish(self.version)
        for row in self.admission.admit():
            assert row not in self.asked, "asked twice"
            self.asked.add(row)
            self.oldest[row] = min(self.oldest.get(row, self.version), self.version)
            if row not in self.admitted:
                self.admitted[row] = self.version
                assert len(self.admitted) <= self.version * self.groups + self.ask, "more at once than asked for"

    @precondition(lambda self: self.asked - self.finished)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.asked - self.finished)))
        self.admission.finish(row)
        self.finished.add(row)

    @precondition(lambda self: self.admission.step == self.version < self.steps)
    @rule()
    def take(self) -> None:
        step = self.admission.step
        rows = self.admission.take()
        if rows is None:
            assert step not in self.took, "a step that took its groups before the crash waits"
            waiting = self.asked - self.finished
            assert waiting, f"step {step} waits for nothing"
            return
        assert self.took.setdefault(step, rows) == rows, "other groups than before the crash"
        assert len(set(rows)) == self.groups
        assert set(rows) <= self.finished
        assert all(step - self.oldest[row] <= self.max_lag for row in rows), "too old"

    @precondition(lambda self: self.admission.step == self.version + 1)
    @rule(save=st.booleans())
    def learn(self, save: bool) -> None:
        self.version += 1
        self.saved = self.version if save else self.saved
        self.publish()

    @rule()
    def crash(self) -> None:
        trained = {row for step in range(self.saved) for row in self.took[step]}
        left = {row: version for row, version in self.admitted.items() if row not in trained}
        later = {step: rows for step, rows in self.took.items() if step >= self.saved}
        self.admission, self.version, self.asked = self.fresh(), self.saved, set()
        self.admission.restore(self.saved, left, sorted(self.finished - trained), later)
        self.publish()

    @invariant()
    def each_once(self) -> None:
        if hasattr(self, "took"):
            rows = [row for taken in self.took.values() for row in taken]
            assert len(rows) == len(set(rows)), "trained twice"

    def teardown(self) -> None:
        """From wherever it is, the run comes to its end when all groups finish."""
        while hasattr(self, "took") and self.version < self.steps:
            for row in sorted(self.asked - self.finished, reverse=True):
                self.admission.finish(row)
                self.finished.add(row)
            if self.admission.step == self.version:
                before = self.admission.step
                self.take()
                assert self.admission.step == before + 1, "a step waits though all groups are there"
            self.learn(save=False)
        assert not hasattr(self, "took") or sorted(self.admitted) == list(range(self.steps * self.groups))


Loop.TestCase.settings = settings(derandomize=True, deadline=None, max_examples=150, stateful_step_count=40)
TestLoop = Loop.TestCase


def test_rows_of_which_nothing_is_known_are_passed_over() -> None:
    admission = Admission(2, max_lag=1, ask=4, steps=3)
    admission.restore(1, {5: 1}, [], {})  # rows 2 to 4 were admitted, and the journal is damaged
    admission.publish(1)
    assert admission.admit() == [5, 6, 7, 8]
    admission.publish(2)
    assert admission.admit() == []  # four rows are what two steps need

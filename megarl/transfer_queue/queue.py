"""The transfer queue: groups go in as they finish, and come out as whole steps; the journal knows of everything."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path

from megarl.transfer_queue.admission import Admission
from megarl.transfer_queue.counters import Counters
from megarl.transfer_queue.journal import Journal, SyncPolicy, recover
from megarl.transfer_queue.records import Accepted, Admitted, Chunk, Took, Trained
from megarl.types import Completion, Group, WeightVersion


class TransferQueue:
    """Groups by their row; what is admitted is put once and taken once, also across restarts of the run.

    The first `publish` begins, from what the journal has of an earlier process. Call it in an event loop.
    """

    def __init__(
        self, groups_per_step: int, *, max_lag: int, ask: int, steps: int, directory: Path, sync: SyncPolicy
    ) -> None:
        """`max_lag` versions of the weights is the most that a token may lag behind the step that trains on it.

        `ask` groups are under way, waiting or in training at most, and `steps` steps in all take groups. The journal
        lies in `directory`; `sync` says what is on disk before it counts (see `Journal`).
        """
        self._admission = Admission(groups_per_step, max_lag=max_lag, ask=ask, steps=steps)
        self._max_lag, self._directory, self._sync = max_lag, directory, sync
        self.counters = Counters()
        self._version: WeightVersion = -1
        self._journal: Journal | None = None
        self._syncing: asyncio.Task[None] | None = None
        self._groups: dict[int, Group] = {}
        self._begun: dict[int, dict[int, Completion]] = defaultdict(dict)

    def publish(self, version: WeightVersion) -> None:
        """The engines have `version`. Raises JournalError: the journal cannot be read or written."""
        if self._journal is None:
            self._begin(version)
        self._version = version
        self._admission.publish(version)

    def _begin(self, step: int) -> None:
        """`step` steps are in the checkpoint from which the run goes on."""
        found = recover(self._directory, step)
        for report in found.reports:
            print(f"journal: {report}")
        self._journal = Journal(self._directory, found, sync=self._sync)
        self._groups = found.groups
        for row in found.groups:
            self.counters.put(row)
        for (row, sample), completion in found.chunks.items():
            self._begun[row][sample] = completion
        self._admission.restore(step, found.admitted, sorted(found.groups), found.took)
        if found.admitted:
            tokens = sum(len(one.output_ids) for samples in self._begun.values() for one in samples.values())
            print(
                f"journal: {len(found.groups)} groups are finished, of which {sum(map(len, found.took.values()))} train"
                f" in the same steps as before; {len(found.admitted) - len(found.groups)} go on, from {tokens} tokens"
            )

    @property
    def _open_journal(self) -> Journal:
        assert self._journal is not None, "nothing was published yet"
        return self._journal

    def admit(self) -> list[int]:
        """Rows that may be asked from now on; more come with the next version."""
        known = set(self._admission.admitted)
        rows = self._admission.admit()
        for row in rows:
            if row not in known:
                self._open_journal.append(Admitted(row, self._version))
        return rows

    def begun(self, row: int) -> dict[int, Completion]:
        """What samples of the row's group have from an earlier process."""
        return self._begun.pop(row, {})

    def extend(self, row: int, sample: int, start: int, tokens: Completion) -> None:
        """New tokens of a sample of the row's group, from its token `start` on."""
        self._open_journal.append(Chunk(row, sample, start, tokens))
        if self._sync == "always":
            self._sync_soon()

    async def put(self, row: int, group: Group) -> None:
        """Accept a finished group; it counts when the journal has it.

        Raises ValueError: the row was put before, or never admitted; JournalError.
        """
        self._admission.check_unfinished(row)
        await self._open_journal.add(Accepted(row, group))
        self._groups[row] = group
        self.counters.put(row)
        self._admission.finish(row)

    def prompts(self) -> set[int]:
        """Places in the data of the groups that wait to be taken."""
        return {group.prompt.index for group in self._groups.values()}

    def take(self, step: int) -> list[Group] | None:
        """The groups of `step`, in order of their rows; None: it has to wait. A token that is too old is a mistake."""
        assert step == self._admission.step, (step, self._admission.step)
        rows = self._admission.take()
        if rows is None:
            return None
        groups = {row: self._groups.pop(row) for row in rows}
        stale = [row for row, group in groups.items() if step - group.oldest_version > self._max_lag]
        assert not stale, f"rows {stale} of step {step} have tokens that lag by more than {self._max_lag} versions"
        self._open_journal.append(Took(step, rows))
        if self._sync != "never":
            self._sync_soon()
        self.counters.taken(step, groups)
        return list(groups.values())

    async def saved(self, step: int) -> None:
        """A checkpoint has `step` finished steps: what they and those before them took is not needed any more."""
        await self._open_journal.add(Trained(step))

    async def close(self) -> None:
        """Have everything on disk."""
        if self._journal is not None:
            await self._journal.close()

    def _sync_soon(self) -> None:
        if self._syncing is None or self._syncing.done():
            self._syncing = asyncio.create_task(self._open_journal.sync())

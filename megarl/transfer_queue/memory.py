"""The transfer queue in one process's memory."""

from __future__ import annotations

import asyncio

from megarl.types import Group


class TransferQueue:
    """Groups by the index of their prompt; step s owns indices s * groups_per_step up to the next step's.

    Each group goes in once and comes out once. `take` returns a step's groups in order of their index, whatever the
    order in which they finished, so that a batch does not depend on timing.
    """

    def __init__(self, groups_per_step: int, *, max_lag: int) -> None:
        """`max_lag` versions of the weights is the most that a token may lag behind the step that trains on it."""
        self._groups_per_step, self._max_lag = groups_per_step, max_lag
        self._groups: dict[int, Group] = {}
        self._taken = 0
        self._changed = asyncio.Condition()

    async def put(self, group: Group) -> None:
        """Accept a finished group. Raises ValueError: its prompt was put or taken before."""
        index = group.prompt.index
        if index in self._groups or index < self._taken:
            raise ValueError(f"the group of prompt {index} was put into the queue before")
        async with self._changed:
            self._groups[index] = group
            self._changed.notify_all()

    async def take(self, step: int) -> list[Group]:
        """Wait for all groups of `step` and remove them; a token that is too old for them is a mistake."""
        wanted = range(step * self._groups_per_step, (step + 1) * self._groups_per_step)
        async with self._changed:
            await self._changed.wait_for(lambda: all(index in self._groups for index in wanted))
            groups = [self._groups.pop(index) for index in wanted]
            self._taken = wanted.stop
        allowed = range(step - self._max_lag, step + 1)
        stale = [group.prompt.index for group in groups if group.oldest_version not in allowed]
        assert not stale, f"prompts {stale} of step {step} were answered by weights of other versions than {allowed}"
        return groups

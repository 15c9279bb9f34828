"""The queue: each group goes in once, comes out once, in its step, in order, and never too old."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.transfer_queue import TransferQueue
from megarl.types import Group, Prompt, Trajectory, VersionSpan

fixed = settings(derandomize=True, deadline=None)  # the same examples each time; the machine may be busy


def group(index: int, *versions: int) -> Group:
    """The group of prompt `index`, whose trajectories were sampled by these versions."""
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
    return Group(Prompt(index=index, text="", input_ids=[1], answer=""), trajectories)


@fixed
@given(st.permutations(range(6)))
def test_a_step_comes_out_in_order_however_its_groups_finished(order: list[int]) -> None:
    async def run() -> None:
        queue = TransferQueue(3, max_lag=0)
        for index in order:
            await queue.put(group(index, index // 3))
        for step in range(2):
            assert [g.prompt.index for g in await queue.take(step)] == [3 * step, 3 * step + 1, 3 * step + 2]

    asyncio.run(run())


def test_take_waits_for_the_last_group_of_its_step() -> None:
    async def run() -> None:
        queue = TransferQueue(2, max_lag=0)
        taking = asyncio.create_task(queue.take(0))
        for index in (1, 2, 3):  # not the one that is missing
            await queue.put(group(index, index // 2))
            await asyncio.sleep(0)
            assert not taking.done()
        await queue.put(group(0, 0))
        assert [g.prompt.index for g in await asyncio.wait_for(taking, 5)] == [0, 1]

    asyncio.run(run())


@pytest.mark.parametrize("taken", [False, True], ids=["still there", "taken already"])
def test_a_group_goes_in_once(taken: bool) -> None:
    async def run() -> None:
        queue = TransferQueue(1, max_lag=0)
        await queue.put(group(0, 0))
        if taken:
            await queue.take(0)
        with pytest.raises(ValueError, match="the group of prompt 0 was put into the queue before"):
            await queue.put(group(0, 0))

    asyncio.run(run())


@pytest.mark.parametrize("versions", [(0,), (1, 0), (2,)], ids=["older", "one older", "newer"])
def test_other_weights_than_the_steps_are_a_mistake(versions: tuple[int, ...]) -> None:
    async def run() -> None:
        queue = TransferQueue(1, max_lag=0)
        await queue.put(group(1, *versions))
        with pytest.raises(AssertionError, match=r"prompts \[1\] of step 1 were answered by weights of other versions"):
            await queue.take(1)

    asyncio.run(run())


@pytest.mark.parametrize(("oldest", "allowed"), [(3, True), (1, True), (0, False)])
def test_tokens_may_lag_behind_as_far_as_allowed(oldest: int, allowed: bool) -> None:
    async def run() -> None:
        queue = TransferQueue(1, max_lag=2)
        await queue.put(group(3, 3, oldest))
        with nullcontext() if allowed else pytest.raises(AssertionError, match="other versions than range"):
            await queue.take(3)

    asyncio.run(run())

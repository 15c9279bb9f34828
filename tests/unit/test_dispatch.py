"""Responses come out once and whole, whatever engines do; the engines are fakes that count.

A response to a prompt [n, k] is k+1 tokens: n, n + 1, ... and its engine's log-probabilities are their negatives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from megarl.rollout_engine import Dispatcher, EngineAddress, EngineError, EngineLost, PoisonedError, idle
from megarl.rollout_engine.client import Chunk, Load
from megarl.rollout_engine.scheduler import POLICIES
from megarl.types import Completion, VersionSpan

STALL_S = 0.4


class Engine:
    """Dies or hangs after so many requests, or refuses; a prompt that begins with `poison` kills it."""

    def __init__(self, number: int, *, version: int = 0, kv_tokens: int = 100_000, max_running: int = 64) -> None:
        self.name, self.address = f"engine {number}", EngineAddress(f"engine {number}", "localhost", number)
        self.version, self.owed, self.asked = version, 0, 0
        self.room = kv_tokens, max_running
        self.dead = self.refuses = self.paused = False
        self.first: list[int] = []  # tokens of the prompts, in the order in which they came
        self.hangs_after = self.dies_after = 1 << 60
        self.poison = -1
        self.most_at_once = self.tokens = 0

    async def generate(self, input_ids: list[int], *, max_new_tokens: int, **_: Any) -> Chunk:
        self.asked, self.owed = self.asked + 1, self.owed + 1
        self.first.append(input_ids[0])
        self.most_at_once = max(self.most_at_once, self.owed)
        try:
            if self.asked > self.hangs_after:
                await asyncio.Event().wait()
            for _ in range(3):
                await asyncio.sleep(0)
                self.dead |= input_ids[0] == self.poison or self.asked > self.dies_after
                if self.dead:
                    raise EngineLost(f"{self.name} hung up")
            if self.refuses:
                raise EngineError(f"{self.name} refuses")
        finally:
            self.owed -= 1
        n, last, done = input_ids[0], input_ids[1], len(input_ids) - 2
        whole = list(range(n, n + last + 1))
        new = whole[done : done + max_new_tokens]
        self.tokens += len(new)
        reason = "stop" if done + len(new) == len(whole) else "length"
        logprobs = [-float(token) for token in new]
        return Chunk(Completion(new, logprobs, reason, [VersionSpan(self.version, 0, len(new))]), done, 0)  # type: ignore[arg-type]

    async def load(self, *, timeout_s: float) -> Load:
        if self.dead:
            raise EngineLost(f"{self.name} does not listen")
        return Load(*self.room, self.tokens, 0, 0, 0, None)

    async def check_health(self, *, timeout_s: float) -> None:
        await self.load(timeout_s=timeout_s)
        if self.asked > self.hangs_after:
            raise EngineError(f"{self.name} hangs")

    async def pause(self) -> None:
        if self.asked > self.hangs_after:
            await asyncio.Event().wait()
        self.paused = True


def make(policy: str = "context", chunk_tokens: int = 4, needed_tokens: int = 0) -> Dispatcher:
    options = {} if policy in ("least_loaded", "group_round_robin") else {"chunk_tokens": chunk_tokens}
    return Dispatcher(POLICIES[policy](**options), stall_s=STALL_S, needed_tokens=needed_tokens)


async def respond(dispatcher: Dispatcher, n: int, last: int, *, samples: int = 1, limit: int = 100) -> list[Completion]:
    return await dispatcher.respond([n, last], samples=samples, temperature=1.0, max_new_tokens=limit, stop_token=-1)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the fakes have no events
        await asyncio.sleep(0)


def clients(*engines: Engine) -> dict[int, Any]:
    return dict(enumerate(engines))


@pytest.mark.parametrize("policy", ["group_round_robin", "least_loaded", "divided", "context"])
def test_responses_are_whole_under_each_policy(policy: str) -> None:
    async def run() -> None:
        dispatcher, engines = make(policy), [Engine(0), Engine(1)]
        await dispatcher.serve(clients(*engines))
        groups = await asyncio.gather(*(respond(dispatcher, 1000 * i, 3 * i, samples=4) for i in range(1, 9)))
        for i, group in enumerate(groups, start=1):
            whole = list(range(1000 * i, 1000 * i + 3 * i + 1))
            logprobs = [-float(token) for token in whole]
            assert group == [Completion(whole, logprobs, "stop", [VersionSpan(0, 0, len(whole))])] * 4
        assert sum(engine.tokens for engine in engines) == sum(4 * (3 * i + 1) for i in range(1, 9))
        assert dispatcher.tally.chunks == sum(engine.asked for engine in engines)
        assert (dispatcher.scheduler.waiting, dispatcher.scheduler.running) == (0, 0)
        await dispatcher.close()

    asyncio.run(run())


def test_groups_that_come_together_are_all_known_before_the_first_is_served() -> None:
    """So each group's probe goes before the others of any."""

    async def run() -> None:
        dispatcher, engine = make(), Engine(0, max_running=4)
        await dispatcher.serve(clients(engine))
        await asyncio.gather(*(respond(dispatcher, 1000 * i, 2, samples=4) for i in range(4)))
        assert engine.first[:4] == [0, 1000, 2000, 3000]
        await dispatcher.close()

    asyncio.run(run())


def test_a_response_is_cut_at_its_limit() -> None:
    async def run() -> None:
        dispatcher = make()
        await dispatcher.serve(clients(Engine(0)))
        (one,) = await respond(dispatcher, 7, 50, limit=10)
        assert (one.output_ids, one.finish_reason) == (list(range(7, 17)), "length")
        await dispatcher.close()

    asyncio.run(run())


def test_versions_of_chunks_are_put_together() -> None:
    """Held between two versions, a response goes on with the new one."""

    async def run() -> None:
        dispatcher, engine = make(chunk_tokens=3), Engine(0, max_running=2)  # so that something waits
        task = asyncio.create_task(respond(dispatcher, 0, 9, samples=6))
        await dispatcher.serve(clients(engine))
        await until(lambda: engine.asked >= 4)
        await dispatcher.hold([0, 1])
        assert engine.paused
        await until(lambda: not engine.owed)
        asked = engine.asked
        await asyncio.sleep(0.05)
        assert engine.asked == asked, "asked while it is held"
        engine.version = 1
        await dispatcher.serve(clients(engine))
        spans = [one.versions for one in await task]
        assert [0, 1] in [[span.version for span in each] for each in spans]
        for each in spans:
            edges = [0, *(span.end for span in each)]
            assert [span.start for span in each] == edges[:-1]
            assert edges[-1] == 10
        await dispatcher.close()

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_what_an_engine_leaves_is_finished_by_others(fault: str) -> None:
    async def run() -> None:
        dispatcher, engines = make(), [Engine(0), Engine(1)]
        setattr(engines[0], f"{fault}_after", 10)
        await dispatcher.serve(clients(*engines))
        tasks = [asyncio.create_task(respond(dispatcher, 1000 * i, 20, samples=4)) for i in range(1, 9)]
        await dispatcher.something_lost.wait()
        (lost,) = dispatcher.take_lost()
        assert (lost.number, lost.address) == (0, engines[0].address)
        assert lost.cause == (
            "engine 0 hung up" if fault == "dies" else f"engine 0 made no progress for {STALL_S:.0f} s"
        )
        new = Engine(2)
        await dispatcher.serve({0: new, 1: engines[1]})  # type: ignore[dict-item]
        for i, group in enumerate(await asyncio.gather(*tasks), start=1):
            assert [one.output_ids for one in group] == [list(range(1000 * i, 1000 * i + 21))] * 4
        assert dispatcher.tally.lost == 1
        await dispatcher.close()

    asyncio.run(run())


def test_without_engines_requests_wait_for_one() -> None:
    async def run() -> None:
        dispatcher, dead = make(), Engine(0)
        dead.dead = True
        task = asyncio.create_task(respond(dispatcher, 5, 5))
        await dispatcher.serve(clients(dead))
        assert [lost.cause for lost in dispatcher.take_lost()] == ["engine 0 does not listen"]
        await asyncio.sleep(0.05)
        assert not task.done()
        await dispatcher.serve(clients(Engine(1)))
        assert (await task)[0].output_ids == [5, 6, 7, 8, 9, 10]
        await dispatcher.close()

    asyncio.run(run())


def test_a_request_that_kills_two_engines_fails_alone() -> None:
    async def run() -> None:
        dispatcher, started = make(), 0
        engines: dict[int, Any] = {}

        async def replace() -> None:
            """As ranks do; each new engine dies of the poison, too."""
            nonlocal started
            while True:
                await dispatcher.something_lost.wait()
                for lost in dispatcher.take_lost():
                    started += 1
                    engines[lost.number] = Engine(10 + started)
                    engines[lost.number].poison = 666
                await dispatcher.serve(engines)

        for number in range(2):
            engines[number] = Engine(number)
            engines[number].poison = 666
        await dispatcher.serve(engines)
        replacing = asyncio.create_task(replace())
        good = [asyncio.create_task(respond(dispatcher, 1000 * i, 20, samples=4)) for i in range(1, 9)]
        poisoned = asyncio.create_task(respond(dispatcher, 666, 20))
        with pytest.raises(
            PoisonedError, match="was with two engines when they failed, the last time: engine"
        ) as caught:
            await poisoned
        assert caught.value.token_ids == [666, 20]
        for i, group in enumerate(await asyncio.gather(*good), start=1):
            assert [one.output_ids for one in group] == [list(range(1000 * i, 1000 * i + 21))] * 4
        assert started == 2
        replacing.cancel()
        await dispatcher.close()

    asyncio.run(run())


def test_a_refusal_is_the_callers() -> None:
    async def run() -> None:
        dispatcher, engine = make(), Engine(0)
        engine.refuses = True
        await dispatcher.serve(clients(engine))
        with pytest.raises(EngineError, match="engine 0 refuses"):
            await respond(dispatcher, 5, 5, samples=3)
        await asyncio.sleep(0.05)
        assert dispatcher.take_lost() == []
        assert dispatcher.scheduler.running == 0
        await dispatcher.close()

    asyncio.run(run())


def test_what_is_not_wanted_any_more_is_not_generated() -> None:
    async def run() -> None:
        dispatcher, engine = make(), Engine(0, max_running=2)
        await dispatcher.serve(clients(engine))
        task = asyncio.create_task(respond(dispatcher, 5, 80, samples=4))
        await until(lambda: engine.asked >= 6)
        task.cancel()
        await asyncio.sleep(0.05)
        assert (dispatcher.scheduler.waiting, dispatcher.scheduler.running) == (0, 0)
        assert engine.tokens < 4 * 81
        await dispatcher.close()

    asyncio.run(run())


def test_what_comes_after_one_of_a_group_failed_is_not_reported() -> None:
    """Its row may have another group by then, and its journal refuse what comes."""

    class Late(Engine):
        async def generate(self, input_ids: list[int], **options: Any) -> Chunk:
            number, chunk = self.asked, await super().generate(input_ids, **options)
            if number == 4:
                raise EngineError("engine 0 refuses")
            await asyncio.sleep(0.02 if number > 4 else 0)
            return chunk

    async def run() -> None:
        dispatcher, engine, failed = make("divided"), Late(0, max_running=8), False

        def report(*_: object) -> None:
            assert not failed

        await dispatcher.serve(clients(engine))
        with pytest.raises(EngineError, match="engine 0 refuses"):
            await dispatcher.respond(
                [5, 80], samples=4, temperature=1.0, max_new_tokens=100, stop_token=-1, report=report
            )
        failed = True
        assert dispatcher.scheduler.running > 0
        await asyncio.sleep(0.1)
        assert (dispatcher.scheduler.waiting, dispatcher.scheduler.running) == (0, 0)
        await dispatcher.close()

    asyncio.run(run())


def test_an_engine_must_hold_the_longest_response() -> None:
    async def run() -> None:
        dispatcher = make(needed_tokens=1000)
        with pytest.raises(EngineError, match=r"engine 0 has room for 999 tokens .* have 1000: lower rollout\.max_new"):
            await dispatcher.serve(clients(Engine(0, kv_tokens=999)))
        await dispatcher.close()

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_engines_that_fail_together_poison_nothing(fault: str) -> None:
    """What one of them ran is not tried on another that has not shown since that it lives."""

    async def run() -> None:
        dispatcher, engines = make(), [Engine(0), Engine(1)]
        for engine in engines:
            setattr(engine, f"{fault}_after", 10)
        await dispatcher.serve(clients(*engines))
        tasks = [asyncio.create_task(respond(dispatcher, 1000 * i, 20, samples=4)) for i in range(1, 9)]
        lost: list[int] = []
        while len(lost) < 2:
            await dispatcher.something_lost.wait()
            lost += [one.number for one in dispatcher.take_lost()]
        assert sorted(lost) == [0, 1]
        await dispatcher.serve(clients(Engine(2), Engine(3)))
        for i, group in enumerate(await asyncio.gather(*tasks), start=1):
            assert [one.output_ids for one in group] == [list(range(1000 * i, 1000 * i + 21))] * 4
        await dispatcher.close()

    asyncio.run(run())


def test_an_engine_that_cannot_be_paused_is_given_up() -> None:
    async def run() -> None:
        dispatcher, engine = make(), Engine(0)
        engine.hangs_after = 2
        await dispatcher.serve(clients(engine))
        task = asyncio.create_task(respond(dispatcher, 5, 20, samples=8))
        await until(lambda: engine.asked > 2)
        await asyncio.wait_for(dispatcher.hold([0]), 3 * STALL_S)
        assert [lost.cause for lost in dispatcher.take_lost()] == ["engine 0 could not be paused: TimeoutError()"]
        await dispatcher.serve(clients(Engine(1)))
        assert [one.output_ids for one in await task] == [list(range(5, 26))] * 8
        await dispatcher.close()

    asyncio.run(run())


def test_what_runs_where_the_model_trains_goes_on_elsewhere() -> None:
    async def run() -> None:
        dispatcher, engines = make(), [Engine(0), Engine(1)]
        await dispatcher.serve(clients(*engines))
        task = asyncio.create_task(respond(dispatcher, 5, 60, samples=8))
        await until(lambda: engines[0].asked > 2 and engines[0].owed > 0)
        await dispatcher.hold([0])
        asked = engines[0].asked
        assert engines[0].paused
        assert not engines[1].paused
        assert [one.output_ids for one in await task] == [list(range(5, 66))] * 8
        assert engines[0].asked == asked
        assert dispatcher.tally.lost == 0
        await dispatcher.serve(clients(*engines), resume=True)
        await respond(dispatcher, 7, 3, samples=8)
        assert engines[0].asked > asked
        await dispatcher.close()

    asyncio.run(run())


def test_one_that_was_given_up_is_not_taken_back() -> None:
    async def run() -> None:
        dispatcher, engines = make(), [Engine(0), Engine(1)]
        engines[0].dies_after = 0
        await dispatcher.serve(clients(*engines))
        task = asyncio.create_task(respond(dispatcher, 5, 20, samples=8))
        await dispatcher.something_lost.wait()
        engines[0].dead, engines[0].dies_after, asked = False, 1 << 60, engines[0].asked
        await dispatcher.serve(clients(*engines))
        assert [one.output_ids for one in await task] == [list(range(5, 26))] * 8
        assert engines[0].asked == asked
        await dispatcher.close()

    asyncio.run(run())


def test_what_runs_on_an_engine_that_is_not_served_any_more_goes_on_elsewhere() -> None:
    """Nobody is suspected of it. A hold is ended by new weights only."""

    async def run() -> None:
        dispatcher, engines = make(), [Engine(0), Engine(1)]
        engines[0].hangs_after = 2
        await dispatcher.serve(clients(*engines))
        task = asyncio.create_task(respond(dispatcher, 5, 20, samples=8))
        await until(lambda: engines[0].asked > 2)
        dispatcher._held = True
        await dispatcher.serve({1: engines[1], 2: Engine(2)}, resume=False)  # type: ignore[dict-item]
        await asyncio.sleep(0.05)
        assert not task.done()
        await dispatcher.serve({1: engines[1], 2: dispatcher._clients[2]}, resume=True)  # type: ignore[dict-item]
        responses = await task
        assert [one.output_ids for one in responses] == [list(range(5, 26))] * 8
        assert dispatcher.tally.lost == 0
        await dispatcher.close()

    asyncio.run(run())


def test_an_engine_that_hangs_while_new_requests_come_is_given_up() -> None:
    async def run() -> None:
        dispatcher, engine = make("least_loaded"), Engine(0)
        engine.hangs_after = 0
        await dispatcher.serve(clients(engine))
        tasks = []
        while not dispatcher.something_lost.is_set():
            tasks.append(asyncio.create_task(respond(dispatcher, 5, 5)))
            await asyncio.sleep(STALL_S / 10)
            assert len(tasks) < 50
        await dispatcher.serve(clients(Engine(1)))
        assert all(one.output_ids == [5, 6, 7, 8, 9, 10] for (one,) in await asyncio.gather(*tasks))
        await dispatcher.close()

    asyncio.run(run())


def test_an_answer_that_makes_no_sense_is_not_waited_for() -> None:
    async def run() -> None:
        dispatcher, engine = make(), Engine(0)

        async def nonsense(*_: Any, **__: Any) -> Any:
            raise ValueError("nonsense")

        engine.generate = nonsense  # type: ignore[method-assign]
        await dispatcher.serve(clients(engine))
        with pytest.raises(ValueError, match="nonsense"):
            await respond(dispatcher, 5, 5)
        await dispatcher.close()

    asyncio.run(run())


def test_idle_time_is_what_no_request_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 4.0, 6.0, 10.0, 12.0])  # of those calls that look at the clock
    monkeypatch.setattr(idle.time, "monotonic", lambda: next(now))
    times = idle.IdleTime()
    times.begun(0)
    times.begun(0)
    times.ended(0)
    times.ended(0)
    times.begun(1)
    assert times.take(2) == pytest.approx(1 - (3 + 4) / 20)
    assert times.take(2) == pytest.approx(0.5)

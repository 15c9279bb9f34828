"""Divided rollouts on two real engines with little cache: responses as undivided ones are, none of them preempted."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.config import Model, Rollout
from megarl.rollout_engine import Dispatcher, Engine, EngineClient
from megarl.rollout_engine.scheduler import POLICIES, Divided
from megarl.runtime import Guard
from megarl.runtime.network import LOOPBACK
from megarl.types import Completion
from tests.jobs import wait_until

pytestmark = pytest.mark.engine

CACHE_TOKENS, LIMIT, CHUNK, STOP_TOKEN, GROUP_SIZE = 768, 96, 16, 2, 4
PROMPTS = [[random.Random(i).randrange(3, 274) for _ in range(6 + i)] for i in range(12)]
LOGPROB_LIMIT = 1e-4


@pytest.fixture(scope="module")
def engines(addition: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    guard, logs = Guard(0), tmp_path_factory.mktemp("logs")
    started = [
        Engine(
            Model(path=addition / "model"),
            Rollout(max_new_tokens=LIMIT, server_args={"max_total_tokens": CACHE_TOKENS}),
            name=f"engine {number}",
            host=LOOPBACK,
            key="key",
            device="cpu",
            seed=number,
            log=logs / f"{number}.log",
            guard=guard,
            answer_timeout_s=60.0,
        )
        for number in range(2)
    ]
    try:
        for engine in started:
            engine.wait_healthy()
        yield started
    finally:
        guard.stop_children()


def rollouts(
    engines: list[Engine], policy: str, temperature: float, *, meanwhile: Any = None
) -> tuple[list[list[Completion]], Dispatcher]:
    """All prompts at once, and the dispatcher after them."""

    async def run() -> tuple[list[list[Completion]], Dispatcher]:
        kind = POLICIES[policy]
        scheduler = kind(chunk_tokens=CHUNK) if issubclass(kind, Divided) else kind()
        dispatcher = Dispatcher(scheduler, stall_s=5.0, needed_tokens=0)
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(EngineClient(engine.address, "key")) for engine in engines]
            await dispatcher.serve(dict(enumerate(clients)))
            asked = [
                dispatcher.respond(
                    prompt,
                    samples=GROUP_SIZE,
                    temperature=temperature,
                    max_new_tokens=LIMIT,
                    stop_token=STOP_TOKEN,
                )
                for prompt in PROMPTS
            ]
            everything: list[Coroutine[Any, Any, Any]] = [*asked, *([meanwhile(dispatcher)] if meanwhile else [])]
            found = await asyncio.gather(*everything)
            await dispatcher.close()
        return found[: len(PROMPTS)], dispatcher

    return asyncio.run(run())


def test_greedy_responses_are_those_of_whole_requests(engines: list[Engine]) -> None:
    whole, _ = rollouts(engines, "least_loaded", 0.0)
    divided, dispatcher = rollouts(engines, "context", 0.0)
    assert dispatcher.tally.chunks > 3 * len(PROMPTS) * GROUP_SIZE
    for prompt, some, others in zip(PROMPTS, whole, divided, strict=True):
        assert [one.output_ids for one in others] == [one.output_ids for one in some], prompt


def test_sampled_responses_have_the_models_logprobs(engines: list[Engine], addition: Path) -> None:
    """Each token's, by transformers, however its response was divided."""
    groups, dispatcher = rollouts(engines, "context", 1.0)
    assert dispatcher.tally.chunks > 3 * len(PROMPTS) * GROUP_SIZE
    model = AutoModelForCausalLM.from_pretrained(addition / "model", dtype=torch.float32)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for one in group:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + one.output_ids])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(one.output_ids)[:, None])[:, 0]
            assert (expected - torch.tensor(one.logprobs)).abs().max() <= LOGPROB_LIMIT
            assert one.finish_reason == ("stop" if one.output_ids[-1] == STOP_TOKEN else "length")
            assert len(one.output_ids) == LIMIT or one.finish_reason == "stop"


def test_an_engine_never_preempts_what_was_divided(engines: list[Engine]) -> None:
    """Its cache holds a seventh of the phase; what takes no notice of that is preempted, now and then."""
    for policy in ("divided", "context"):
        assert rollouts(engines, policy, 1.0)[1].tally.preemptions == 0
    assert any(rollouts(engines, "group_round_robin", 1.0)[1].tally.preemptions for _ in range(6))


def test_an_engine_that_dies_takes_no_response_along(engines: list[Engine]) -> None:
    """The last test of these engines."""

    async def kill(dispatcher: Dispatcher) -> None:
        while dispatcher.tally.chunks < 30:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
        engines[1].child.process.kill()

    groups, dispatcher = rollouts(engines, "context", 0.0, meanwhile=kill)
    assert [lost.number for lost in dispatcher.take_lost()] == [1]
    wait_until(lambda: engines[1].child.process.poll() is not None, 10.0, lambda: "engine 1 lives")
    whole, _ = rollouts(engines[:1], "least_loaded", 0.0)
    assert [[one.output_ids for one in group] for group in groups] == [[x.output_ids for x in g] for g in whole]

"""Rollouts of a real model on real engines with little cache, by each policy: seconds, tokens/s and reward.

    python tools/bench/rollout_live.py             some minutes
    python tools/bench/rollout_live.py --quick     within a minute on 2 quiet cores

Two SGLang engines on the CPU answer sums of 1 to 24 digits, whose worked solutions have a long tail; the model is the
quickstart's after fine-tuning. All policies get the same prompts and take turns in each round; a first, short one is
not counted, and of the others the medians are printed. One round says little: a single long response can end it late.

Columns:
  seconds      until all responses are there;  tail: of them, after nine in ten were
  tokens/s     of all engines;  speed: as a ratio to group_round_robin
  preempted    times that an engine threw a request out of its cache;  cached: share of prompt tokens found there
  reward       share of right answers;  length, longest: tokens of a response
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import statistics
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config import Model, Rollout
from megarl.data import carry_addition, load_tokenizer, prompt_ids
from megarl.rewards import exact_match
from megarl.rollout_engine import Dispatcher, Engine, EngineClient
from megarl.rollout_engine.scheduler import POLICIES
from megarl.runtime import Guard, node_address
from megarl.types import Completion

BASELINE, ENGINES, GROUP_SIZE, MAX_DIGITS = "group_round_robin", 2, 8, 24
LIVE = ("group_round_robin", "least_loaded", "divided", "context")
WARM_UP = 4  # prompts of the round that is not counted
PATTERN = r"<answer>(.*?)</answer>"


class Measured(NamedTuple):
    seconds: float
    tail: float
    tokens_per_s: float
    preempted: float
    cached: float
    reward: float
    length: float
    longest: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one counted round of few prompts, two policies")
    parser.add_argument("--model", type=Path, default=Path("runs/carry_addition_sft/hf"), help="a Hugging Face model")
    parser.add_argument("--prompts", type=int, help="prompts of a round, of 8 samples each (default 64, quick 24)")
    parser.add_argument("--rounds", type=int, help="counted rounds (default 3, quick 1)")
    parser.add_argument("--cache", type=int, default=3072, help="tokens that an engine's cache holds (default 3072)")
    parser.add_argument("--max-new-tokens", type=int, default=1024, help="of a response (default 1024)")
    arguments = parser.parse_args()
    quick = arguments.quick
    prompts, rounds = arguments.prompts or (24 if quick else 64), arguments.rounds or (1 if quick else 3)
    policies = (BASELINE, "context") if quick else LIVE
    with running(arguments.model, arguments.cache, arguments.max_new_tokens) as fleet:
        rows = asyncio.run(measure(fleet, policies, prompts, rounds))
    print(
        f"{prompts} prompts x {GROUP_SIZE} responses of at most {arguments.max_new_tokens} tokens, {ENGINES} engines"
        f" with caches of {arguments.cache}, {rounds} rounds; load average {os.getloadavg()[0]:.1f}"
    )
    print(f"{'':18}" + "".join(f"{name:>13}" for name in (*Measured._fields, "speed")))
    base = rows[BASELINE].tokens_per_s
    for policy, row in rows.items():
        print(f"{policy:18}" + "".join(f"{value:13.2f}" for value in (*row, row.tokens_per_s / base)))
    context, baseline = rows["context"], rows[BASELINE]
    print(
        f"context_over_round_robin={context.tokens_per_s / base:.3f} tail_over={context.tail / baseline.tail:.3f}"
        f" seconds_over={context.seconds / baseline.seconds:.3f} context_tokens_per_s={context.tokens_per_s:.0f}"
        f" context_preempted={context.preempted:.0f} reward_difference={context.reward - baseline.reward:.3f}"
    )


async def measure(fleet: Fleet, policies: tuple[str, ...], prompts: int, rounds: int) -> dict[str, Measured]:
    """Medians by policy."""
    found: dict[str, list[Measured]] = {policy: [] for policy in policies}
    for number in range(rounds + 1):
        problems = carry_addition.problems(number, prompts if number else WARM_UP, MAX_DIGITS)
        for policy in policies:
            row = measured(fleet, problems, await phase(fleet, policy, problems))
            if number:
                found[policy].append(row)
    return {policy: Measured(*map(statistics.median, zip(*rows, strict=True))) for policy, rows in found.items()}


class Fleet(NamedTuple):
    """Engines that answer, and what they are asked for."""

    engines: list[Engine]
    key: str
    tokenizer: Any
    max_new_tokens: int


@contextlib.contextmanager
def running(model: Path, cache: int, max_new_tokens: int) -> Iterator[Fleet]:
    guard, key = Guard(0), secrets.token_hex(16)
    rollout = Rollout(max_new_tokens=max_new_tokens, server_args={"max_total_tokens": cache})
    with tempfile.TemporaryDirectory() as logs:
        try:
            engines = [
                Engine(
                    Model(path=model),
                    rollout,
                    name=f"engine {number}",
                    host=node_address([""]),
                    key=key,
                    device="cpu",
                    seed=number,
                    log=Path(logs) / f"{number}.log",
                    guard=guard,
                    answer_timeout_s=60.0,
                )
                for number in range(ENGINES)
            ]
            for engine in engines:
                engine.wait_healthy()
            yield Fleet(engines, key, load_tokenizer(model), max_new_tokens)
        finally:
            guard.stop_children()


class Phase(NamedTuple):
    """A rollout: until all responses were there, what the dispatcher logs of it, and each prompt's responses."""

    seconds: float
    metrics: dict[str, float]
    groups: list[list[Completion]]


async def phase(fleet: Fleet, policy: str, problems: list[carry_addition.Problem]) -> Phase:
    """All prompts at once, on engines whose caches are empty."""
    for engine in fleet.engines:
        await asyncio.to_thread(flush_cache, engine, fleet.key)
    dispatcher = Dispatcher(POLICIES[policy](), stall_s=60.0, needed_tokens=0)
    clients = {number: EngineClient(engine.address, fleet.key) for number, engine in enumerate(fleet.engines)}
    await dispatcher.serve(clients)
    prompts = [prompt_ids(fleet.tokenizer, problem.prompt) for problem in problems]
    started = time.monotonic()
    groups = await asyncio.gather(
        *(
            dispatcher.respond(
                prompt,
                samples=GROUP_SIZE,
                temperature=1.0,
                max_new_tokens=fleet.max_new_tokens,
                stop_token=fleet.tokenizer.eos_token_id,
            )
            for prompt in prompts
        )
    )
    seconds = time.monotonic() - started
    await dispatcher.close()
    for client in clients.values():
        await client.__aexit__()
    return Phase(seconds, dispatcher.metrics(), groups)


def measured(fleet: Fleet, problems: list[carry_addition.Problem], ended: Phase) -> Measured:
    lengths = [len(one.output_ids) for group in ended.groups for one in group]
    rewards = [
        exact_match(fleet.tokenizer.decode(one.output_ids, skip_special_tokens=True), problem.answer, PATTERN)
        for problem, group in zip(problems, ended.groups, strict=True)
        for one in group
    ]
    return Measured(
        ended.seconds,
        ended.metrics["rollout/tail_s"],
        sum(lengths) / ended.seconds,
        ended.metrics["rollout/preemptions"],
        ended.metrics["rollout/cached_fraction"],
        statistics.fmean(rewards),
        statistics.fmean(lengths),
        float(max(lengths)),
    )


def flush_cache(engine: Engine, key: str) -> None:
    """Forget all prefixes; the engine refuses until it is idle."""
    request = urllib.request.Request(
        f"{engine.address.url}/flush_cache", method="POST", headers={"Authorization": f"Bearer {key}"}
    )
    while True:
        try:
            urllib.request.urlopen(request, timeout=60.0).close()
            return
        except urllib.error.HTTPError:
            time.sleep(0.05)


if __name__ == "__main__":
    main()

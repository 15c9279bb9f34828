"""Rollouts of a real model on real engines with little cache, by each policy: seconds, tokens/s and reward.

    python tools/bench/rollout_live.py             some minutes
    python tools/bench/rollout_live.py --quick     within a minute on 2 quiet cores

Two SGLang engines on the CPU answer sums of 1 to 24 digits, whose worked solutions have a long tail; the model is the
quickstart's after fine-tuning. All policies get the same prompts and take turns in each round; the first round is not
counted, and of the others the medians are printed.

Columns:
  seconds      until all responses are there;  tail: of them, after nine in ten were
  tokens/s     of all engines;  speed: as a ratio to group_round_robin
  preempted    times that an engine threw a request out of its cache;  cached: share of prompt tokens found there
  reward       share of right answers;  length, longest: tokens of a response
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import statistics
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import NamedTuple

from megarl.config import Model, Rollout
from megarl.data import carry_addition, load_tokenizer, prompt_ids
from megarl.rewards import exact_match
from megarl.rollout_engine import Dispatcher, Engine, EngineClient
from megarl.rollout_engine.scheduler import POLICIES
from megarl.runtime import Guard, node_address

BASELINE, ENGINES, GROUP_SIZE, MAX_DIGITS, MAX_NEW_TOKENS = "group_round_robin", 2, 8, 24, 512
LIVE = ("group_round_robin", "least_loaded", "divided", "context")
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
    parser.add_argument("--cache", type=int, default=4096, help="tokens that an engine's cache holds (default 4096)")
    arguments = parser.parse_args()
    quick = arguments.quick
    prompts, rounds = arguments.prompts or (24 if quick else 64), arguments.rounds or (1 if quick else 3)
    policies = (BASELINE, "context") if quick else LIVE
    rows = asyncio.run(measure(arguments.model, policies, prompts, rounds, arguments.cache))
    print(f"{prompts} prompts x {GROUP_SIZE}, {ENGINES} engines, caches of {arguments.cache} tokens, {rounds} rounds")
    print(f"{'':18}" + "".join(f"{name:>12}" for name in (*Measured._fields, "speed")))
    base = rows[BASELINE].tokens_per_s
    for policy, row in rows.items():
        print(f"{policy:18}" + "".join(f"{value:12.2f}" for value in (*row, row.tokens_per_s / base)))
    context, baseline = rows["context"], rows[BASELINE]
    print(
        f"context_over_round_robin={context.tokens_per_s / base:.3f} tail_over={context.tail / baseline.tail:.3f}"
        f" seconds_over={context.seconds / baseline.seconds:.3f} context_tokens_per_s={context.tokens_per_s:.0f}"
        f" context_preempted={context.preempted:.0f} reward_difference={context.reward - baseline.reward:.3f}"
    )


async def measure(model: Path, policies: tuple[str, ...], prompts: int, rounds: int, cache: int) -> dict[str, Measured]:
    """Medians by policy."""
    guard, key = Guard(0), secrets.token_hex(16)
    found: dict[str, list[Measured]] = {policy: [] for policy in policies}
    with tempfile.TemporaryDirectory() as logs:
        try:
            engines = [start(model, number, cache, key, Path(logs), guard) for number in range(ENGINES)]
            for engine in engines:
                engine.wait_healthy()
            for number in range(rounds + 1):
                problems = carry_addition.problems(number, prompts, MAX_DIGITS)
                for policy in policies:
                    row = await phase(engines, key, model, policy, problems)
                    if number:
                        found[policy].append(row)
        finally:
            guard.stop_children()
    return {policy: Measured(*map(statistics.median, zip(*rows, strict=True))) for policy, rows in found.items()}


def start(model: Path, number: int, cache: int, key: str, logs: Path, guard: Guard) -> Engine:
    rollout = Rollout(max_new_tokens=MAX_NEW_TOKENS, server_args={"max_total_tokens": cache})
    return Engine(
        Model(path=model),
        rollout,
        name=f"engine {number}",
        host=node_address([""]),
        key=key,
        device="cpu",
        seed=number,
        log=logs / f"{number}.log",
        guard=guard,
        answer_timeout_s=60.0,
    )


async def phase(
    engines: list[Engine], key: str, model: Path, policy: str, problems: list[carry_addition.Problem]
) -> Measured:
    """All prompts at once, on engines whose caches are empty."""
    tokenizer = load_tokenizer(model)
    for engine in engines:
        await asyncio.to_thread(flush_cache, engine, key)
    dispatcher = Dispatcher(POLICIES[policy](), stall_s=60.0, needed_tokens=0)
    clients = {number: EngineClient(engine.address, key) for number, engine in enumerate(engines)}
    await dispatcher.serve(clients)
    started = time.monotonic()
    completions = await asyncio.gather(
        *(
            dispatcher.respond(
                prompt_ids(tokenizer, problem.prompt),
                samples=GROUP_SIZE,
                temperature=1.0,
                max_new_tokens=MAX_NEW_TOKENS,
                stop_token=tokenizer.eos_token_id,
            )
            for problem in problems
        )
    )
    seconds = time.monotonic() - started
    metrics = dispatcher.metrics()
    await dispatcher.close()
    for client in clients.values():
        await client.__aexit__()
    lengths = [len(one.output_ids) for group in completions for one in group]
    rewards = [
        exact_match(tokenizer.decode(one.output_ids, skip_special_tokens=True), problem.answer, PATTERN)
        for problem, group in zip(problems, completions, strict=True)
        for one in group
    ]
    return Measured(
        seconds,
        metrics["rollout/tail_s"],
        sum(lengths) / seconds,
        metrics["rollout/preemptions"],
        metrics["rollout/cached_fraction"],
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

#!/usr/bin/env python
"""How many decisions a second each scheduling policy makes, on one core.

    python tools/bench/scheduler.py             100,000 requests over 1,000 engines
    python tools/bench/scheduler.py --quick     10,000 over 100: a few seconds

A decision is what `next` returns, with the `finished` that the chunk ends with. Groups of 8 with log-normal lengths are
queued at once; chunks end in the order of their tokens, as on engines of equal speed, and each end is told at once.
Nothing else is done, so that this is what the scheduler costs. An engine runs 32 requests, and its cache holds fewer
long ones, so that requests wait and lose their places; real fleets of this size make some thousand decisions a second.

Columns:
  start      decisions a second while the empty engines are filled
  steady     decisions a second from then on, until so many as there are requests have been made (of policies that queue
             nothing: until all has finished)
  decisions  how many both are
  waiting    requests that wait at the end of the start

The last line has the least of all, and each policy's over start and steady.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megarl.rollout_engine.scheduler import POLICIES, Assignment, Request, Scheduler

GROUP, PROMPT, LIMIT, MEAN = 8, 512, 32_768, 4_000
KV_TOKENS, MAX_RUNNING = 100_000, 32


class Fleet:
    """Engines that generate a token of each request in each step, and cost nothing to ask."""

    def __init__(self, scheduler: Scheduler, requests: int, engines: int) -> None:
        draw = random.Random(0)
        self.scheduler, self.step, self.decisions = scheduler, 0, 0
        self.ends: list[tuple[int, int, Assignment]] = []
        for number in range(engines):
            scheduler.join(number, kv_tokens=KV_TOKENS, max_running=MAX_RUNNING)
        for _ in range(requests // GROUP):
            typical = MEAN * draw.lognormvariate(0, 0.7)
            lengths = [min(int(typical * draw.lognormvariate(0, 0.25)) + 1, LIMIT) for _ in range(GROUP)]
            scheduler.add([Request(PROMPT, LIMIT, length) for length in lengths])

    def pump(self) -> None:
        while assignment := self.scheduler.next():
            request = assignment.request
            end = self.step + min(assignment.tokens, request.length - request.generated)
            self.decisions += 1
            heapq.heappush(self.ends, (end, self.decisions, assignment))

    def end_one(self) -> None:
        self.step, _, assignment = heapq.heappop(self.ends)
        request = assignment.request
        tokens = min(assignment.tokens, request.length - request.generated)
        self.scheduler.finished(request, tokens, done=request.generated + tokens == request.length)


def measure(policy: str, requests: int, engines: int) -> float:
    scheduler = POLICIES[policy]()
    fleet = Fleet(scheduler, requests, engines)
    begun = time.process_time()
    fleet.pump()
    filled = time.process_time()
    start, waiting = fleet.decisions, scheduler.waiting
    while fleet.ends and fleet.decisions < start + requests:
        fleet.end_one()
        fleet.pump()
    ended = time.process_time()
    steady = fleet.decisions - start
    rate = fleet.decisions / (ended - begun)
    steady_rate = f"{steady / (ended - filled):10,.0f}" if steady else f"{'-':>10}"
    print(
        f"{policy:18} {start / (filled - begun):10,.0f} {steady_rate} {fleet.decisions:10,} {waiting:8,}",
        flush=True,
    )
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10,000 requests over 100 engines")
    requests, engines = (10_000, 100) if parser.parse_args().quick else (100_000, 1_000)
    print(f"{'policy':18} {'start':>10} {'steady':>10} {'decisions':>10} {'waiting':>8}")
    rates = {policy: measure(policy, requests, engines) for policy in POLICIES}
    rates = {"decisions_per_s_least": min(rates.values())} | rates
    print(" ".join(f"{name}={value:.0f}" for name, value in rates.items()))


if __name__ == "__main__":
    main()

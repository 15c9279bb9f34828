"""What every policy promises, whatever happens to engines; then what single policies do."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from megarl.rollout_engine.scheduler import (
    POLICIES,
    TRIAL_TOKENS,
    Assignment,
    Context,
    Group,
    Request,
    Scheduler,
)
from megarl.rollout_engine.scheduler.lengths import Correlation, Moments

LIMIT, PROMPT, KV, MAX_RUNNING = 256, 8, 400, 6
CHUNKED = ("divided", "context", "oracle")


class Fleet:
    """Carries out what a scheduler decides, in an order drawn at random, and checks every decision."""

    def __init__(self, scheduler: Scheduler, seed: int = 0, *, planned: bool = True) -> None:
        self.scheduler, self.draw, self.planned = scheduler, random.Random(seed), planned
        self.engines = 0
        self.running: list[Assignment] = []
        self.ended: Counter[Request] = Counter()
        self.poisoned: list[Request] = []
        self.requests: list[Request] = []
        self.log: list[tuple[int, int, int]] = []

    def join(self) -> None:
        self.scheduler.join(self.engines, kv_tokens=KV, max_running=MAX_RUNNING)
        self.engines += 1

    def add(self, size: int = 4) -> Group:
        typical = self.draw.choice([4, 20, 120])
        lengths = [min(int(typical * self.draw.uniform(0.7, 1.5)) + 1, LIMIT) for _ in range(size)]
        requests = [Request(self.draw.choice([PROMPT, 3 * PROMPT]), LIMIT, length) for length in lengths]
        for request in requests:
            request.prompt = requests[0].prompt
        self.requests += requests
        return self.scheduler.add(requests)

    def pump(self) -> None:
        while assignment := self.scheduler.next():
            request = assignment.request
            assert all(one.request is not request for one in self.running), "it runs already"
            assert request not in self.ended, "it is finished"
            assert 0 < assignment.tokens <= LIMIT - request.generated
            assert assignment.engine in self.scheduler.engines
            self.running.append(assignment)
            self.log.append((self.requests.index(request), assignment.engine, assignment.tokens))
            self.check(assignment.engine)
        assert self.scheduler.running == len(self.running)

    def check(self, number: int) -> None:
        here = [one for one in self.running if one.engine == number]
        assert sum(one.request.suspect for one in here) <= 1, "two suspects on one engine"
        if self.planned:
            prompts = {one.request.group: one.request.prompt for one in here}
            assert sum(prompts.values()) + sum(one.request.generated + one.tokens for one in here) <= KV
            assert len(here) <= MAX_RUNNING

    def end_one(self, place: int | None = None) -> None:
        assignment = self.running.pop(self.draw.randrange(len(self.running)) if place is None else place)
        request = assignment.request
        tokens = min(assignment.tokens, request.length - request.generated)
        if self.draw.random() < 0.1:  # an engine may end a chunk before its time
            tokens = self.draw.randint(0, tokens)
        done = request.generated + tokens == request.length
        self.scheduler.finished(request, tokens, done=done)
        if done:
            self.ended[request] += 1

    def lose(self, number: int) -> None:
        self.poisoned += self.scheduler.lost(number)
        for other in self.scheduler.engines:
            self.scheduler.alive(other)
        self.running = [one for one in self.running if one.engine != number]

    def drain(self) -> None:
        self.pump()
        while self.running:
            self.end_one()
            self.pump()


def live(fleet: Fleet) -> list[int]:
    return list(fleet.scheduler.engines)


def storm(policy: str, seed: int) -> Fleet:
    """Engines come and die, groups come and are withdrawn, chunks end early; then all that is left finishes."""
    fleet = Fleet(POLICIES[policy](), seed, planned=policy in CHUNKED)
    draw, groups, unwanted = random.Random(seed), [], set()
    for _ in range(3):
        fleet.join()
    for _ in range(250):
        event = draw.random()
        if event < 0.12:
            groups.append(fleet.add())
        elif event < 0.14 and groups:
            unwanted.add(group := draw.choice(groups))
            fleet.scheduler.withdraw(group)
        elif event < 0.16 and live(fleet):
            fleet.lose(draw.choice(live(fleet)))
        elif event < 0.19 and len(live(fleet)) < 5:
            fleet.join()
        elif fleet.running:
            fleet.end_one()
        if draw.random() < 0.8:  # or nothing may start for a while
            fleet.pump()
    fleet.join()
    fleet.drain()
    wanted = [one for one in fleet.requests if one.group not in unwanted and one not in fleet.poisoned]
    assert all(fleet.ended[request] == 1 for request in wanted)
    assert max(fleet.ended.values()) == 1
    assert (fleet.scheduler.waiting, fleet.scheduler.running) == (0, 0)
    return fleet


@pytest.mark.parametrize("policy", POLICIES)
def test_each_request_finishes_once_whatever_happens(policy: str) -> None:
    for seed in range(6):
        storm(policy, seed)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_events_give_the_same_decisions(policy: str) -> None:
    assert storm(policy, 7).log == storm(policy, 7).log


@pytest.mark.parametrize("policy", POLICIES)
def test_a_poisoned_request_kills_two_engines_and_all_others_finish(policy: str) -> None:
    fleet = Fleet(POLICIES[policy](), planned=policy in CHUNKED)
    for _ in range(4):
        fleet.join()
    for _ in range(6):
        fleet.add()
    poison, deaths = fleet.requests[9], 0
    fleet.pump()
    while fleet.running:
        killer = next((one for one in fleet.running if one.request is poison), None)
        if killer is not None:
            fleet.lose(killer.engine)
            deaths += 1
        else:
            fleet.end_one()
        fleet.pump()
    assert deaths == 2
    assert fleet.poisoned == [poison]
    assert set(fleet.ended) - {poison} == set(fleet.requests) - {poison}


@pytest.mark.parametrize("policy", POLICIES)
def test_trials_do_not_hold_up_other_requests(policy: str) -> None:
    fleet = Fleet(POLICIES[policy](), planned=policy in CHUNKED)
    fleet.join()
    fleet.add()
    fleet.pump()
    fleet.lose(0)
    fleet.join()
    others = fleet.add(2).requests
    fleet.pump()
    assert sum(one.request.suspect for one in fleet.running) == 1
    assert {one.request for one in fleet.running} > set(others)


@pytest.mark.parametrize("policy", CHUNKED)
def test_with_patience_no_group_starves_while_new_ones_keep_coming(policy: str) -> None:
    """Unless it may wait, a group is finished soon after `patience` later ones are."""
    fleet = Fleet(POLICIES[policy](patience=10))
    fleet.join()
    open_groups: dict[Group, int] = {}
    done, waited = 0, []
    for _ in range(1500):
        while len(open_groups) < 12:
            open_groups[fleet.add(2)] = done
        fleet.pump()
        fleet.end_one(0)
        for group in [one for one in open_groups if not one.unfinished]:
            done += 1
            waited.append(done - open_groups.pop(group))
    assert max(waited + [done - since for since in open_groups.values()]) <= 10 + 2 * 12


@pytest.mark.parametrize("policy", CHUNKED)
def test_no_chunk_has_more_tokens_than_were_chosen(policy: str) -> None:
    fleet = Fleet(POLICIES[policy](chunk_tokens=5))
    fleet.join()
    fleet.add()
    fleet.drain()
    assert max(tokens for *_, tokens in fleet.log) == 5


def test_what_has_begun_goes_on_where_it_is() -> None:
    scheduler = POLICIES["divided"](chunk_tokens=20)
    for number in range(3):
        scheduler.join(number, kv_tokens=KV, max_running=MAX_RUNNING)
    scheduler.add([Request(PROMPT, LIMIT) for _ in range(6)])
    while assignment := scheduler.next():
        last = assignment
    scheduler.finished(last.request, 20, done=False)
    assert scheduler.next() == last


def test_when_nothing_queues_what_runs_moves_to_an_emptier_engine() -> None:
    scheduler = POLICIES["divided"](chunk_tokens=20)
    scheduler.join(0, kv_tokens=KV, max_running=MAX_RUNNING)
    requests = scheduler.add([Request(PROMPT, LIMIT, generated=40) for _ in range(4)]).requests
    while scheduler.next():
        pass
    scheduler.join(1, kv_tokens=KV, max_running=MAX_RUNNING)
    scheduler.finished(requests[0], 20, done=False)
    assert scheduler.next() == Assignment(requests[0], 1, 20)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_has_just_ended_its_chunk_survives_its_engine_and_can_be_withdrawn(policy: str) -> None:
    scheduler = POLICIES[policy]()
    scheduler.join(0, kv_tokens=KV, max_running=MAX_RUNNING)
    requests = scheduler.add([Request(PROMPT, LIMIT, 100) for _ in range(2)]).requests
    while scheduler.next():
        pass
    for request in requests:
        scheduler.finished(request, 5, done=False)
    scheduler.lost(0)
    assert scheduler.next() is None
    scheduler.join(1, kv_tokens=KV, max_running=MAX_RUNNING)
    assignment = scheduler.next()
    assert assignment is not None
    assert assignment.engine == 1
    scheduler.finished(assignment.request, 5, done=False)
    scheduler.withdraw(requests[0].group)
    assert scheduler.next() is None
    assert (scheduler.waiting, scheduler.running) == (0, 0)


def lengths_of(between: float, within: float) -> list[list[int]]:
    draw = np.random.default_rng(0)
    logs = 3 + between * draw.standard_normal((40, 1)) + within * draw.standard_normal((40, 6))
    return np.exp(logs).astype(int).clip(1, LIMIT).tolist()


@pytest.mark.parametrize(("between", "within"), [(0.8, 0.2), (0.5, 0.5), (0.1, 0.9)])
def test_correlation_is_that_of_an_analysis_of_variance(between: float, within: float) -> None:
    measured, groups = Correlation(), lengths_of(between, within)
    for group in groups:
        known: Moments | None = None
        for length in group:
            new = (known or Moments()).with_length(length)
            measured.replace(known, new)
            known = new
    logs = np.log(groups)
    count, size = logs.shape
    among = size * ((logs.mean(1) - logs.mean()) ** 2).sum() / (count - 1)
    inside = ((logs - logs.mean(1, keepdims=True)) ** 2).sum() / (count * (size - 1))
    assert measured.value == pytest.approx(max((among - inside) / (among + (size - 1) * inside), 0.0))


def run_lengths(groups: list[list[int]]) -> Context:
    scheduler = Context()
    fleet = Fleet(scheduler)
    fleet.join()
    for group in groups:
        fleet.requests += (requests := [Request(PROMPT, LIMIT, length) for length in group])
        scheduler.add(requests)
    fleet.drain()
    return scheduler


def test_context_trusts_groups_only_where_their_lengths_go_together() -> None:
    assert run_lengths(lengths_of(0.8, 0.2)).trusts_groups
    assert not run_lengths(lengths_of(0.1, 0.9)).trusts_groups


def first_of_each(policy: Callable[[], Scheduler], lengths: list[int], *, expected: list[int | None]) -> list[int]:
    """In which order single requests start on an engine that runs one at a time."""
    scheduler = policy()
    scheduler.join(0, kv_tokens=KV, max_running=1)
    groups = [
        scheduler.add([Request(PROMPT, LIMIT, length)], expected=known)
        for length, known in zip(lengths, expected, strict=True)
    ]
    order = []
    while assignment := scheduler.next():
        request = assignment.request
        if request.group not in order:
            order.append(request.group)
        tokens = min(assignment.tokens, request.length - request.generated)
        scheduler.finished(request, tokens, done=request.generated + tokens == request.length)
    return [groups.index(group) for group in order]


def test_what_is_expected_to_be_long_starts_first() -> None:
    assert first_of_each(POLICIES["oracle"], [3, 9, 6], expected=[None] * 3) == [1, 2, 0]
    assert first_of_each(POLICIES["context"], [3, 3, 3], expected=[5, 90, 40]) == [1, 2, 0]
    assert first_of_each(POLICIES["context"], [3, 3, 3], expected=[5, 90, None]) == [2, 1, 0], "a probe is first"
    assert first_of_each(POLICIES["divided"], [3, 9, 6], expected=[None] * 3) == [0, 1, 2]


def test_a_suspect_is_tried_where_an_engine_is_known_to_live() -> None:
    """Else it would be blamed for two engines that died together."""
    scheduler = POLICIES["context"]()
    for number in range(3):
        scheduler.join(number, kv_tokens=KV, max_running=MAX_RUNNING)
    scheduler.add([Request(PROMPT, LIMIT, 100)])
    assignment = scheduler.next()
    assert assignment is not None
    first = assignment.engine
    others = [number for number in range(3) if number != first]
    assert scheduler.lost(first) == []
    assert scheduler.next() is None
    assert scheduler.lost(others[0]) == []
    scheduler.alive(others[1])
    assignment = scheduler.next()
    assert assignment is not None
    assert (assignment.engine, assignment.tokens) == (others[1], TRIAL_TOKENS[0])
    assert scheduler.lost(others[1]) == [assignment.request]


def test_groups_take_turns_on_engines_that_were_replaced() -> None:
    scheduler = POLICIES["group_round_robin"]()
    for number in range(2):
        scheduler.join(number, kv_tokens=KV, max_running=100)
    for _ in range(3):
        scheduler.lost(1)
        scheduler.join(1, kv_tokens=KV, max_running=100)
    for _ in range(20):
        scheduler.add([Request(PROMPT, LIMIT, 10)])
    engines = [assignment.engine for assignment in iter(scheduler.next, None)]
    assert engines.count(0) == engines.count(1) == 10

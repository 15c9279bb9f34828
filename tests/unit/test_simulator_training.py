"""Simulated runs of many steps against closed forms, bounds, and what the modes promise."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rollout_engine.scheduler import POLICIES
from megarl.simulator import (
    GPUS,
    MODELS,
    EngineModel,
    GroupLengths,
    LengthModel,
    Mode,
    Steps,
    Trainer,
    Workload,
    make_scheduler,
    simulate,
    simulate_training,
    trainer,
)

ENGINE = EngineModel(
    name="small",
    kv_tokens=10**6,
    max_running=64,
    decode_s=tuple(0.01 + 0.0002 * batch for batch in range(65)),
    cached_s=1e-7,
    pass_s=0.01,
    prefill_s=1e-5,
    request_s=0.01,
)
GROUPS, SIZE, ENGINES = 6, 4, 3
PUBLISH_S = 0.5


def train_for(seconds: float, *, takes_turns: bool = False) -> Trainer:
    return Trainer(0.0, seconds, PUBLISH_S, takes_turns=takes_turns)


def run(
    work: Workload,
    trains: Trainer,
    mode: Mode,
    *,
    engine: EngineModel = ENGINE,
    policy: str = "divided",
    warm_up: int = 3,
) -> Steps:
    scheduler = make_scheduler(policy)
    return simulate_training(work, engine, ENGINES, scheduler, trains, mode, groups_per_step=GROUPS, warm_up=warm_up)


def equal(steps: int, length: int = 300) -> Workload:
    return Workload((GroupLengths(20, (length,) * SIZE),) * (GROUPS * steps), length)


def drawn(seed: int, steps: int) -> Workload:
    return LengthModel(150, 1000, 0.6, 0.5, GROUPS * steps, SIZE, prompt=20).draw(seed)


def one_phase(engine: EngineModel = ENGINE) -> float:
    return simulate(equal(1), engine, ENGINES, make_scheduler("least_loaded")).makespan


@pytest.mark.parametrize("train_s", [0.7, 9.0])
def test_equal_lengths_take_what_the_formulas_say(train_s: float) -> None:
    rollout_s = one_phase()
    options = {"policy": "least_loaded"}
    in_turns = run(equal(8), train_for(train_s, takes_turns=True), Mode(), **options)
    assert in_turns.seconds == pytest.approx(rollout_s + train_s + PUBLISH_S, rel=1e-9)
    assert in_turns.samples_s == pytest.approx(GROUPS * SIZE / in_turns.seconds)
    assert in_turns.rollout_idle == pytest.approx((PUBLISH_S + ENGINE.request_s) / in_turns.seconds, rel=1e-6)
    split = run(equal(8), train_for(train_s), Mode(), **options)
    assert split.seconds == pytest.approx(in_turns.seconds, rel=1e-9)
    assert split.train_idle == pytest.approx(1 - train_s / split.seconds, rel=1e-9)
    one_off = run(equal(9), train_for(train_s), Mode(1), **options)
    assert one_off.seconds == pytest.approx(max(rollout_s, train_s) + PUBLISH_S, rel=1e-9)
    assert (one_off.lag_mean, one_off.lag_max, one_off.stale) == (1.0, 1, 1.0)
    assert in_turns.lag_max == split.lag_max == in_turns.stale == split.stale == 0


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([name for name in POLICIES if name != "oracle"]),
    st.floats(0.1, 10),
    st.sampled_from([1500, 10**6]),
)
def test_every_step_takes_its_rows_once_and_none_too_old(
    seed: int, max_lag: int, interrupt: bool, takes_turns: bool, policy: str, train_s: float, kv_tokens: int
) -> None:
    work, engine = drawn(seed, 6 + max_lag), replace(ENGINE, kv_tokens=kv_tokens)
    trains = train_for(train_s, takes_turns=takes_turns)
    steps = run(work, trains, Mode(max_lag, interrupt), engine=engine, policy=policy, warm_up=2)
    taken = [row for rows in steps.rows for row in rows]
    assert len(steps.rows) == 6
    assert all(len(rows) == GROUPS for rows in steps.rows)
    assert len(set(taken)) == len(taken)
    assert steps.lag_max <= max_lag
    assert 0 <= steps.stale <= 1
    assert steps.stale <= steps.lag_mean <= steps.lag_max
    assert steps.seconds >= train_s + PUBLISH_S
    assert 0 <= steps.rollout_idle <= 1
    assert 0 <= steps.train_idle <= 1


@pytest.mark.parametrize("seed", range(4))
def test_without_lag_there_is_nothing_to_interrupt(seed: int) -> None:
    sync, other = (run(drawn(seed, 8), train_for(2.0), Mode(0, interrupt)) for interrupt in (False, True))
    assert sync == other


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("train_s", [1.0, 3.0, 9.0])
def test_more_lag_is_never_slower(seed: int, train_s: float) -> None:
    modes = [Mode(), Mode(1), Mode(1, True), Mode(2, True), Mode(3, True)]
    samples = [run(drawn(seed, 43), train_for(train_s), mode, warm_up=8).samples_s for mode in modes]
    for less, more in pairwise(samples):
        assert more > 0.97 * less  # the last steps are other ones, and larger batches are slower
    assert samples[-1] > 1.2 * samples[0]


def test_what_is_interrupted_is_prefilled_again() -> None:
    work = Workload((*((GroupLengths(100, (50,)),) * 4), GroupLengths(100, (900,)), GroupLengths(100, (900,))) * 8, 900)
    trains, scheduler = train_for(1.0), "least_loaded"
    finished_first = run(work, trains, Mode(2), policy=scheduler)
    assert finished_first.again == 0
    interrupted = run(work, trains, Mode(2, True), policy=scheduler)
    assert interrupted.again > 0.1
    assert interrupted.seconds < finished_first.seconds
    dear = run(work, trains, Mode(2, True), policy=scheduler, engine=replace(ENGINE, prefill_s=5e-3))
    assert dear.seconds > interrupted.seconds


def test_a_training_step_takes_what_its_tokens_cost() -> None:
    model, gpu = MODELS["qwen3-8b"], GPUS["H800"]
    trains = trainer(model, gpu, 16, takes_turns=True, mfu=0.4)
    assert trains.token_s == pytest.approx(6 * 8.19e9 / (16 * 989e12 * 0.4))
    assert 0.2 < trains.publish_s < 0.3
    trains = Trainer(1e-3, 2.0, PUBLISH_S, takes_turns=True)
    steps = run(equal(8), trains, Mode(), policy="least_loaded")
    tokens = GROUPS * SIZE * (20 + 300)
    assert steps.seconds == pytest.approx(one_phase() + 2.0 + 1e-3 * tokens + PUBLISH_S, rel=1e-9)


def test_too_few_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="24 groups are 4 steps, use more: 3 are warm-up, and max_lag 1 leaves"):
        run(equal(4), train_for(1.0), Mode(1))

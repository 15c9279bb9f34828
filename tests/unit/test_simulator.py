"""The simulated rollout against closed forms, bounds, a simulation by single steps, and published measurements."""

from __future__ import annotations

import csv
import heapq
import json
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.rollout_engine.scheduler import POLICIES, Request, Scheduler
from megarl.simulator import (
    GPUS,
    MODELS,
    PRESETS,
    EngineModel,
    GroupLengths,
    LengthModel,
    Placement,
    Run,
    Workload,
    bounds,
    draw_timeline,
    make_scheduler,
    measured,
    read_lengths,
    roofline,
    simulate,
    summarize,
)
from megarl.simulator.engine import CLIP_TOKENS, LEAST_SHARE, SHARE_FALL, SPARE_STEPS
from megarl.simulator.timeline import BINS, binned
from tools import simulate_rollout

SMALL = EngineModel(
    name="small",
    kv_tokens=600,
    max_running=8,
    decode_s=tuple(0.01 + 0.003 * batch for batch in range(9)),
    cached_s=1.7e-5,
    pass_s=0.011,
    prefill_s=0.0013,
    pair_s=1e-7,
    admit_s=0.0031,
    request_s=0.0173,
    pass_tokens=64,
)
PUBLISHED = Path(__file__).with_name("published_generation.csv")


def run_policy(policy: str, work: Workload, model: EngineModel, engines: int, enough: int | None = None) -> Run:
    scheduler = make_scheduler(policy)
    return simulate(work, model, engines, scheduler, know_lengths=policy == "oracle", enough_groups=enough)


def equal(groups: int, size: int, *, prompt: int, length: int) -> Workload:
    return Workload((GroupLengths(prompt, (length,) * size),) * groups, length)


def drawn(seed: int, groups: int = 6, size: int = 4, mean: float = 60) -> Workload:
    return LengthModel(mean, 250, 0.6, 0.5, groups, size, prompt=23, runaway=0.05).draw(seed)


# --- closed forms ---


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_lengths_on_one_engine_take_what_the_formula_says(policy: str) -> None:
    roomy = replace(SMALL, kv_tokens=10**9, request_s=0.0)
    run = run_policy(policy, equal(5, 1, prompt=40, length=200), roomy, 1)
    prefill = roomy.prefill_seconds(5 * 40, 5 * 40 * 20, 5)
    assert run.makespan == pytest.approx(prefill + roomy.steps_s(199, 5, 5 * 41), rel=1e-9)


def test_an_equal_group_on_each_of_several_engines_takes_as_long_as_one_on_one() -> None:
    roomy = replace(SMALL, kv_tokens=10**9)
    one = run_policy("group_round_robin", equal(1, 4, prompt=40, length=100), roomy, 1)
    run = run_policy("group_round_robin", equal(3, 4, prompt=40, length=100), roomy, 3)
    assert run.makespan == one.makespan
    assert one.makespan == pytest.approx(
        roomy.request_s + roomy.prefill_seconds(43, 40 * 20 + 3 * 39.5, 4) + roomy.steps_s(99, 4, 4 * 41), rel=1e-9
    )
    assert summarize("", run).reprefilled == 3 * 3  # the last token of a cached prompt is always computed


def test_a_full_cache_preempts_and_prefills_again() -> None:
    work = equal(60, 1, prompt=10, length=240)
    model = replace(SMALL, kv_tokens=2500, max_running=64, decode_s=(0.1,) * 65)
    summary = summarize("", run_policy("group_round_robin", work, model, 1))
    assert summary.preemptions > 0
    assert summary.reprefilled > 0
    assert summarize("", run_policy("divided", work, model, 1)).preemptions == 0
    bolder = replace(model, first_share=LEAST_SHARE)
    assert summarize("", run_policy("group_round_robin", work, bolder, 1)).preemptions > summary.preemptions


def test_steps_until_is_the_inverse_of_steps() -> None:
    for steps in (1, 2, 17, 4000):
        seconds = SMALL.steps_s(steps, 3, 200)
        assert SMALL.steps_until(seconds, 3, 200) == steps
        assert SMALL.steps_until(seconds * (1 + 1e-9), 3, 200) == steps + 1


# --- bounds, conservation, determinism ---


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from(list(POLICIES)), st.sampled_from([600, 1500, 10**6]))
def test_no_policy_beats_the_bounds_and_every_token_is_generated_once(
    seed: int, engines: int, policy: str, kv_tokens: int
) -> None:
    work, model = drawn(seed), replace(SMALL, kv_tokens=kv_tokens)
    run = run_policy(policy, work, model, engines)
    assert run.makespan >= bounds(work, model, engines).seconds * (1 - 1e-9)
    assert sorted(run.finish) == list(range(work.requests))
    assert [job.generated for job in run.jobs] == [length for group in work.groups for length in group.lengths]
    assert sum(engine.counts.generated for engine in run.engines) == work.tokens
    assert all(held <= kv_tokens for timeline in run.timelines for _, _, held, _ in timeline)
    assert summarize(policy, run).reprefilled >= 0


def test_the_same_workload_gives_the_same_run() -> None:
    first, second = (run_policy("context", drawn(3), SMALL, 2) for _ in range(2))
    assert first.finish == second.finish
    assert first.timelines == second.timelines


def test_enough_groups_end_the_phase_and_the_rest_is_reported() -> None:
    whole = run_policy("divided", drawn(1), SMALL, 2)
    run = run_policy("divided", drawn(1), SMALL, 2, enough=4)
    summary = summarize("divided", run)
    assert run.makespan < whole.makespan
    assert summary.groups == 4
    assert summary.leftover_requests == drawn(1).requests - len(run.finish)
    assert 0 < summary.leftover_tokens < drawn(1).tokens
    assert summary.tokens == sum(engine.counts.generated for engine in run.engines)


def test_a_response_that_fits_no_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="a prompt with the longest response needs 640"):
        run_policy("divided", equal(1, 1, prompt=40, length=600), SMALL, 1)


# --- single steps ---


class Stepwise:
    """An engine that takes one step at a time and counts everything anew at each."""

    def __init__(self, model: EngineModel) -> None:
        self.model, self.clock, self.busy, self.next_arrival = model, 0.0, False, 0.0
        self.queue: list[int] = []
        self.running: list[int] = []
        self.cache: list[list[int]] = []  # [key, tokens], the least recently used first
        self.share, self.full = model.first_share, False


class StepwiseCluster:
    """The rules of `megarl/simulator/engine.py` written down a second time, as plainly as possible."""

    def __init__(self, work: Workload, model: EngineModel, engines: int, scheduler: Scheduler) -> None:
        self.model, self.scheduler = model, scheduler
        self.engines = [Stepwise(model) for _ in range(engines)]
        for number in range(engines):
            scheduler.join(number, kv_tokens=model.kv_tokens, max_running=model.max_running)
        self.requests: list[Request] = []
        self.length, self.group, self.made, self.asked, self.begun = [], [], [], [], []
        for number, group in enumerate(work.groups):
            requests = [Request(group.prompt, work.cap) for _ in group.lengths]
            self.requests += requests
            self.length += group.lengths
            self.group += [number] * len(requests)
            scheduler.add(requests)
        self.made, self.asked, self.begun = ([0] * len(self.requests) for _ in range(3))
        self.order: dict[int, int] = {}  # of admission
        self.events: list[tuple[float, int, int, int]] = []
        self.count = self.admitted = 0
        self.finish: dict[int, float] = {}

    def push(self, at: float, engine: int, job: int) -> None:
        heapq.heappush(self.events, (at, self.count, engine, job))
        self.count += 1

    def run(self) -> dict[int, float]:
        self.dispatch(0.0)
        while self.events:
            now, _, number, job = heapq.heappop(self.events)
            engine = self.engines[number]
            if job < 0:
                self.boundary(engine, number, now)
                self.dispatch(now)
                continue
            engine.queue.append(job)
            if not engine.busy:
                engine.busy, engine.share = True, self.model.first_share
                self.push(now, number, -1)
        return self.finish

    def dispatch(self, now: float) -> None:
        while assignment := self.scheduler.next():
            job = next(index for index, one in enumerate(self.requests) if one is assignment.request)
            self.asked[job], self.begun[job] = assignment.tokens, self.made[job]
            engine = self.engines[assignment.engine]
            arrival = max(now + self.model.request_s, engine.next_arrival)
            engine.next_arrival = arrival + self.model.call_s
            self.push(arrival, assignment.engine, job)

    def locked(self, engine: Stepwise) -> int:
        prompts = {self.group[job]: self.requests[job].prompt for job in engine.running}
        return sum(self.made[job] for job in engine.running) + sum(prompts.values())

    def keep(self, engine: Stepwise, key: int, tokens: int) -> None:
        engine.cache = [[one, held] for one, held in engine.cache if one != key] + [[key, tokens]]

    def evict(self, engine: Stepwise) -> None:
        excess = self.locked(engine) + sum(held for _, held in engine.cache) - self.model.kv_tokens
        while excess > 0 and engine.cache:
            gone = min(excess, engine.cache[0][1])
            engine.cache[0][1] -= gone
            excess -= gone
            engine.cache = [entry for entry in engine.cache if entry[1]]

    def leave(self, engine: Stepwise, job: int, keep: bool) -> None:
        engine.running.remove(job)
        engine.full &= not keep
        if keep:
            self.keep(engine, job, self.made[job])
        if all(self.group[other] != self.group[job] for other in engine.running):
            self.keep(engine, ~self.group[job], self.requests[job].prompt)

    def boundary(self, engine: Stepwise, number: int, now: float) -> None:
        self.evict(engine)
        ended = [job for job in engine.running if self.made[job] == self.stop(job)]
        for job in sorted(ended, key=self.order.__getitem__):
            self.leave(engine, job, keep=True)
            done = self.made[job] == self.length[job]
            if done:
                self.finish[job] = now
            self.scheduler.finished(self.requests[job], self.made[job] - self.begun[job], done=done)
        prefill = self.admit(engine)
        while self.locked(engine) + len(engine.running) > self.model.kv_tokens and len(engine.running) > 1:
            job = min(engine.running, key=lambda one: (self.made[one] - self.begun[one], -self.order[one]))
            self.leave(engine, job, keep=False)
            engine.queue.append(job)
            made = sum(self.made[one] - self.begun[one] + SPARE_STEPS for one in engine.running)
            engine.share = min(made / (sum(self.asked[one] for one in engine.running) + 1), 1.0)
        engine.busy = bool(engine.running)
        if not engine.running:
            return
        if prefill:
            self.push(now + prefill, number, -1)  # what came meanwhile is prefilled before the next step
            return
        context = sum(self.requests[job].prompt + self.made[job] for job in engine.running)
        step = self.model.decode_s[len(engine.running)] + self.model.cached_s * context
        for job in engine.running:
            self.made[job] += 1
        engine.share = max(engine.share - SHARE_FALL, LEAST_SHARE)
        self.push(now + step, number, -1)

    def stop(self, job: int) -> int:
        return min(self.begun[job] + self.asked[job], self.length[job])

    def left(self, job: int) -> int:
        return min(self.asked[job] - (self.made[job] - self.begun[job]), CLIP_TOKENS)

    def admit(self, engine: Stepwise) -> float:
        tokens, pairs, before, running = 0, 0.0, set(engine.running), len(engine.running)
        while engine.queue and not engine.full and len(engine.running) < self.model.max_running:
            job, cache = engine.queue[0], dict(engine.cache)
            prompt = self.requests[job].prompt
            shared = any(self.group[other] == self.group[job] for other in engine.running)
            need = self.made[job] + (0 if shared else prompt) + self.left(job)
            reserve = sum(self.left(one) * (engine.share if one in before else 1) for one in engine.running)
            if engine.running and self.model.kv_tokens - self.locked(engine) - need < reserve:
                engine.full = True
                break
            engine.queue.pop(0)
            cached = (prompt if shared else cache.get(~self.group[job], 0)) + cache.get(job, 0)
            missing = max(prompt + self.made[job] - cached, 1)
            held = prompt + self.made[job] - missing
            if (tokens + missing) // self.model.pass_tokens > tokens // self.model.pass_tokens:
                before = set(engine.running)
            tokens, pairs = tokens + missing, pairs + missing * (held + missing / 2)
            gone = {job} if shared else {job, ~self.group[job]}
            engine.cache = [entry for entry in engine.cache if entry[0] not in gone]
            self.made[job] += 1
            self.admitted += 1
            self.order[job] = self.admitted
            engine.running.append(job)
            self.evict(engine)
        return self.model.prefill_seconds(tokens, pairs, len(engine.running) - running)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "oracle"])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("first_share", "call_s"), [(0.7, 0.0), (LEAST_SHARE, 0.0071)])
def test_jumping_gives_what_single_steps_give(policy: str, seed: int, first_share: float, call_s: float) -> None:
    work = drawn(seed, groups=5)
    model = replace(SMALL, kv_tokens=400, first_share=first_share, call_s=call_s)
    slow = StepwiseCluster(work, model, 2, make_scheduler(policy)).run()
    fast = run_policy(policy, work, model, 2).finish
    assert fast == pytest.approx(slow, rel=1e-9)


# --- workloads ---


@pytest.mark.parametrize(
    ("name", "mean", "cap", "requests", "gpus"),
    [
        ("reasoning", 9_400, 16_384, 1_024, 16),
        ("early_rl", 580, 10_000, 4_096, 8),
        ("middle", 4_000, 16_384, 2_048, 16),
        ("moonlight", 22_386, 65_536, 3_200, 32),
        ("qwen2_vl_72b", 7_615, 40_960, 9_600, 128),
        ("kimi_k2", 38_959, 98_304, 6_400, 256),
    ],
)
def test_presets_have_the_published_sizes(name: str, mean: float, cap: int, requests: int, gpus: int) -> None:
    preset = PRESETS[name]
    work = preset.lengths.draw(seed=7)
    assert work.tokens / work.requests == pytest.approx(mean, rel=0.005)
    assert work.cap == cap >= max(max(group.lengths) for group in work.groups)
    assert work.requests == requests
    assert preset.engines * preset.place.gpus == gpus


def test_spreads_and_the_runaway_mass_are_as_asked() -> None:
    work = LengthModel(580, 10_000, 0.23, 0.89, groups=2000, group_size=16).draw(0)
    logs = np.log([group.lengths for group in work.groups])
    assert np.sqrt(logs.var(axis=1, ddof=1).mean()) == pytest.approx(0.89, rel=0.02)
    assert np.sqrt(logs.mean(axis=1).var() - 0.89**2 / 16) == pytest.approx(0.23, rel=0.1)
    # 2,700 is published; these spreads and this mean make it more
    assert np.quantile(np.exp(logs), 0.99) == pytest.approx(2_700, rel=0.25)
    assert (logs > math.log(9_999)).mean() < 1e-3
    runaway = replace(PRESETS["early_rl"].lengths, runaway=0.01).draw(0)
    lengths = [length for group in runaway.groups for length in group.lengths]
    assert np.mean(np.array(lengths) == 10_000) == pytest.approx(0.01, abs=0.004)
    assert np.mean(lengths) == pytest.approx(580, rel=0.005)


def test_a_mean_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="no log-normal clipped at 100 tokens has a mean of 200"):
        LengthModel(200, 100, 0.5, 0.5, 4, 4).draw()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no line"),
        ("[3, 4]\nnothing", "2: no JSON"),
        ("[3, 0]", "1: expected a list of lengths"),
        ('{"prompt": 4}', "1: expected a list of lengths"),
        ("[5, true]", "1: expected a list of lengths"),
        ("[]", "1: expected a list of lengths"),
        ("7", "1: expected a list of lengths"),
        ("[30]", "a length of 30 tokens, above the cap of 20"),
    ],
)
def test_a_bad_file_of_lengths_is_named_by_line(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "lengths.jsonl").write_text(text)
    with pytest.raises(ValueError, match=expected):
        read_lengths(tmp_path / "lengths.jsonl", cap=20)


# --- engines ---


def published() -> list[dict[str, str]]:
    with PUBLISHED.open() as file:
        return list(csv.DictReader(file))


def speed_over_published(row: dict[str, str]) -> float:
    """How many times as fast as published ours is: in tokens a second, or in steps where there is a batch."""
    served = replace(MODELS[row["model"]], weight_bytes=1.0, kv_bytes=float(row["kv_bytes"]))
    place = Placement(int(row["gpus"]), memory_fraction=0.9, max_running=2048, request_s=0.0)
    model = roofline(row["model"], served, GPUS[row["gpu"]], place)
    prompt, length = int(row["input_tokens"]), int(row["output_tokens"])
    if row["batch"]:
        batch = int(row["batch"])
        step = model.decode_s[batch] + model.cached_s * batch * (prompt + length / 2)
        # while one response is generated, each of the others stands still for one prefill of another
        step += (batch - 1) / length * model.prefill_seconds(prompt, prompt**2 / 2, 1)
        return float(row["step_ms"]) / 1e3 / step
    waves = 2 * min(model.kv_tokens // (prompt + length), model.max_running)
    work = Workload((GroupLengths(prompt, (length,)),) * min(waves, 2000), length)
    run = run_policy("least_loaded", work, replace(model, first_share=LEAST_SHARE), 1)  # busy for long
    return work.tokens / run.makespan / float(row["tokens_s"])


def test_the_roofline_is_near_published_measurements() -> None:
    ratios = [speed_over_published(row) for row in published()]
    errors = [abs(math.log(ratio)) for ratio in ratios]
    assert len(errors) == 23
    assert statistics.median(errors) < 0.10
    assert max(errors) < 0.30


def test_a_measured_engine_is_fitted(tmp_path: Path) -> None:
    points = [
        [batch, context, 0.02 + 0.004 * batch + 1e-5 * batch * context]
        for batch, context in ((1, 100), (1, 400), (4, 100), (4, 800), (8, 300))
    ]
    table = {"kv_tokens": 4096, "max_running": 16, "decode": points, "prefill_token_s": 0.001, "request_s": 0.004}
    file = tmp_path / "engine.json"
    file.write_text(json.dumps(table))
    model = measured(file)
    assert model.cached_s == pytest.approx(1e-5)
    assert model.decode_s[2] == pytest.approx(0.028)
    assert model.decode_s[16] == pytest.approx(0.084)
    assert (model.prefill_s, model.request_s, model.name) == (0.001, 0.004, "engine")
    file.write_text("{}")
    with pytest.raises(ValueError, match="no table of an engine"):
        measured(file)


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="1 GPUs have 68 GB for weights and cache, the weights alone are 147 GB"):
        roofline("", MODELS["qwen2-vl-72b"], GPUS["H800"], Placement(1))


# --- the command ---


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate_rollout", *words])
    simulate_rollout.main()


def test_the_command_prints_a_row_a_policy_and_writes_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lengths, numbers, png = (str(tmp_path / name) for name in ("lengths.jsonl", "numbers.json", "timeline.png"))
    command(monkeypatch, "middle", "--groups", "8", "--engines", "2", "--write-lengths", lengths, "--policy", "divided")
    first = capsys.readouterr().out.splitlines()[-1]
    engine = ("--model", "qwen3-8b", "--gpu", "H800", "--engines", "2", "--cap", "16384")
    command(monkeypatch, "--lengths", lengths, *engine, "--policy", "divided", "--json", numbers, "--png", png)
    assert capsys.readouterr().out.splitlines()[-1] == first
    assert json.loads(Path(numbers).read_text())[0]["policy"] == "divided"
    assert Path(png).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["middle", "--kv-tokens", "5000"], "a prompt with the longest response needs 16,896"),
        (["--lengths", "nowhere.jsonl", "--model", "qwen3-8b"], "nowhere.jsonl"),
        (["middle", "--gpus", "1", "--model", "kimi-k2"], "the weights alone are 1026 GB"),
    ],
)
def test_the_command_refuses_in_one_line(monkeypatch: pytest.MonkeyPatch, words: list[str], expected: str) -> None:
    with pytest.raises(SystemExit, match=expected):
        command(monkeypatch, *words)


def test_a_timeline_is_binned_by_time(tmp_path: Path) -> None:
    run = run_policy("group_round_robin", drawn(0), SMALL, 2)
    grid = binned(run, 1, run.makespan)
    assert grid.shape == (2, BINS)
    seconds = sum(engine.counts.decode_s + engine.counts.prefill_s for engine in run.engines)
    assert 0 < grid.max() < SMALL.max_running + 1e-9
    assert (grid > 0).mean() == pytest.approx(seconds / run.makespan / 2, abs=0.05)
    draw_timeline({"one": run}, tmp_path / "one.png")

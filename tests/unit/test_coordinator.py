"""Which groups a step takes, with engines and rewards that answer at once."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megarl.config import RlRecipe, load_recipe
from megarl.data import Problem, write_rows
from megarl.rollout_engine import Coordinator, EngineAddress, EngineTimeout
from megarl.rollout_engine.channel import Taken, Waiting
from megarl.rollout_engine.client import Chunk, Load
from megarl.rollout_engine.dispatch import PoisonedError
from megarl.transfer_queue import TransferQueue
from megarl.types import Completion, Group, Offer, Prompt, Trajectory, VersionSpan
from tests.small_job import write_small_job

PROMPTS, SAMPLES = 2, 4


class Engine:
    """Says its version, which is the step; scores all alike or, if it `hangs`, never."""

    name = "reward engine taste"

    address = EngineAddress(name, "localhost", 1)

    def __init__(self, hangs: bool) -> None:
        self.late: set[int] = set()  # prompts that are answered when the next version is there
        self.poison: set[int] = set()  # prompts that engines die of
        self.prompts: dict[tuple[int, ...], int] = {}
        self.next_version = asyncio.Event()
        self.paused = 0
        self.version, self.hangs, self.owed = 0, hangs, 0
        self.temperatures: list[float] = []
        self.scored: list[list[int]] = []

    async def generate(self, input_ids: list[int], *, temperature: float, **_: Any) -> Chunk:
        self.temperatures.append(temperature)
        self.prompts.setdefault(tuple(input_ids), len(self.prompts))
        if self.prompts[tuple(input_ids)] in self.poison:
            raise PoisonedError("engines died of it", input_ids)
        if self.prompts[tuple(input_ids)] in self.late:
            await self.next_version.wait()
        return Chunk(Completion([1, 2], [-1.0, -1.0], "stop", [VersionSpan(self.version, 0, 2)]), 0, 0)

    async def load(self, *, timeout_s: float) -> Load:
        return Load(4096, 64, 0, 0, 0, 0, None)

    async def pause(self) -> None:
        self.paused += 1

    async def score(self, sequences: list[list[int]]) -> list[float]:
        self.scored += sequences
        if self.hangs:
            self.owed += 1
            await asyncio.Event().wait()
        return [len(self.scored) / 10] * len(sequences)


class Rewards:
    """Rows with an even answer are always right, others every other time or, if they are `hopeless`, never."""

    timeouts = crashes = 0

    def __init__(self, hopeless: bool) -> None:
        self._hopeless = hopeless

    async def score_many(self, items: list[tuple[str, str, str]]) -> list[float]:
        return [float(int(answer) % 2 == 0 or (not self._hopeless and i % 2)) for i, (*_, answer) in enumerate(items)]


@dataclass(frozen=True)
class Step:
    groups: list[Group]
    asked: int
    metrics: dict[str, float]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_small_job(tmp_path_factory.mktemp("job"))
    write_rows(path / "train.jsonl", [Problem(f"{i}+0=", str(i)) for i in range(20)])
    return path


def take(
    job: Path,
    *overrides: str,
    steps: int = 1,
    begin: int = 0,
    journal: Path | None = None,
    hopeless: bool = False,
    hangs: bool = False,
    late: Collection[int] = (),
    poison: Collection[int] = (),
) -> tuple[list[Step], Engine]:
    before = Path.cwd()
    os.chdir(job)
    try:
        recipe = load_recipe(job / "rl.yaml", [f"batch.prompts={PROMPTS}", f"batch.group_size={SAMPLES}", *overrides])
        assert isinstance(recipe, RlRecipe)
        engine, scorer = Engine(False), Engine(hangs)
        journal = journal or Path(tempfile.mkdtemp(dir=job))
        queue = queue_of(recipe, begin + steps, journal)
        engine.scored = scorer.scored
        engine.late.update(late)
        engine.poison.update(poison)
        rewards: Any = Rewards(hopeless)
        client: Any = engine
        connect: Any = None
        scorers: Any = dict.fromkeys(recipe.reward.engines, scorer)
        offered: list[list[Group]] = []

        async def offer(step: int, groups: list[Group]) -> Offer:
            assert step == begin + len(offered)
            offered.append(groups)
            return Offer(step, [], "", "", {})

        async def run() -> list[Taken]:
            failed = journal / "failed.jsonl"
            coordinator = Coordinator(
                recipe, connect, rewards, scorers, queue, offer, max_positions=64, failed_requests=failed
            )
            await coordinator.dispatcher.serve({0: client})
            taken = []
            for step in range(begin, begin + steps):
                engine.version = step
                if step:
                    engine.next_version.set()
                queue.publish(step)
                await coordinator.dispatcher.serve({0: client})  # ends a hold
                coordinator.generate()
                taken.append(await finished(coordinator, step))
            await coordinator.dispatcher.close()
            return taken

        taken = asyncio.run(run())
        return [Step(groups, t.asked, t.metrics) for groups, t in zip(offered, taken, strict=True)], engine
    finally:
        os.chdir(before)


@pytest.mark.parametrize("placement", ["{type: colocated}", "{type: disaggregated, train_ranks: 1}"])
def test_a_steps_speed_does_not_count_the_time_between_steps(
    job: Path, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = Coordinator.generate

    def later(self: Coordinator) -> None:
        time.sleep(0.3)
        generate(self)

    monkeypatch.setattr(Coordinator, "generate", later)
    for taken in take(job, f"placement={placement}", steps=2)[0]:
        assert taken.metrics["rollout/tokens_per_s"] > 2 * PROMPTS * SAMPLES / 0.25


def queue_of(recipe: RlRecipe, steps: int, journal: Path) -> TransferQueue:
    lag, ask = recipe.mode.max_lag, recipe.most_groups
    return TransferQueue(PROMPTS, max_lag=lag, ask=ask, steps=steps, directory=journal, sync="group")


async def finished(coordinator: Coordinator, step: int) -> Taken:
    """As rank 0 asks: again and again."""
    while not isinstance(reply := await coordinator.within(0.05, lambda: coordinator.take(step)), Taken):
        pass
    return reply


def rows(taken: Step) -> list[int]:
    return [int(group.prompt.answer) for group in taken.groups]


def test_all_groups_are_the_next_rows(job: Path) -> None:
    taken, _ = take(job, steps=2)
    assert [(rows(t), t.asked) for t in taken] == [([0, 1], 2), ([2, 3], 2)]
    assert [group.prompt.index for t in taken for group in t.groups] == [0, 1, 2, 3]
    assert all(group.greedy_scores is None for t in taken for group in t.groups)


def test_what_is_finished_first_is_taken_first_until_the_rest_is_due(job: Path) -> None:
    """Rows 0 and 1 are late: they wait on a paused engine, and are of the step that must have them."""
    partial = ("mode={max_lag: 1, interrupt: true, ask: 4}",)
    taken, engine = take(job, *partial, steps=3, late=[0, 1])
    assert [rows(t) for t in taken] == [[2, 3], [0, 1], [4, 5]]
    assert [t.asked for t in taken] == [4, 2, 0]  # no more than three steps need
    assert engine.paused == 1
    lags = [t.metrics["rollout/lag_max"] for t in taken]
    assert lags == [0.0, 0.0, 1.0]


def test_uninformative_groups_are_replaced(job: Path) -> None:
    """Each step from rows of its own, three waves of two; asking ends when enough are found."""
    taken, _ = take(job, "batch.sampling={type: informative, waves: 3}", steps=2)
    assert [(rows(t), t.asked) for t in taken] == [([1, 3], 4), ([7, 9], 4)]


def test_a_step_of_which_some_were_put_before_takes_others_than_these(job: Path) -> None:
    """The process ended between the puts of the step."""
    recipe = load_recipe(job / "rl.yaml", [f"batch.prompts={PROMPTS}", "batch.sampling={type: informative}"])
    assert isinstance(recipe, RlRecipe)
    journal = Path(tempfile.mkdtemp(dir=job))

    async def before() -> None:
        queue = queue_of(recipe, 2, journal)
        for step in range(2):
            queue.publish(step)
            for row in queue.admit()[: PROMPTS - step]:
                index = {0: 1, 1: 3, 2: 9}[row]
                prompt = Prompt(index, text="", input_ids=[1], answer=str(index))
                trajectory = Trajectory([1], [-1.0], [VersionSpan(step, 0, 1)], "stop", "", {"answer": 1.0})
                await queue.put(row, Group(prompt, [trajectory]))
            assert (queue.take(step) is None) == (step == 1)
        await queue.saved(1)
        await queue.close()

    asyncio.run(before())
    taken, _ = take(job, "batch.sampling={type: informative, waves: 3}", steps=1, journal=journal, begin=1)
    assert [(rows(t), t.asked) for t in taken] == [([9, 7], 2)]


def test_where_too_few_are_informative_the_first_others_fill_the_step(job: Path) -> None:
    (taken,), _ = take(job, "batch.sampling={type: informative, waves: 2}", hopeless=True)
    assert (rows(taken), taken.asked) == ([0, 1], 4)


def test_bounds_are_on_the_share_of_right_samples(job: Path) -> None:
    (taken,), _ = take(job, "batch.sampling={type: informative, high: 0.5, waves: 2}")  # half is not less than a half
    assert (rows(taken), taken.asked) == ([0, 1], 4)


def test_remax_asks_for_greedy_answers(job: Path) -> None:
    (taken,), engine = take(job, "algorithm.advantage.type=remax")
    assert [group.greedy_scores for group in taken.groups] == [{"answer": 1.0}, {"answer": 0.0}]
    assert sorted(engine.temperatures) == [0.0, 0.0] + [1.0] * 2 * SAMPLES


def test_more_prompts_than_needed_in_one_wave(job: Path) -> None:
    taken, _ = take(job, "batch.sampling={type: informative, waves: 2, ask: 5}", steps=2)
    assert [(rows(t), t.asked) for t in taken] == [([1, 3], 5), ([11, 13], 5)]


def test_a_row_is_scored_by_the_sources_of_its_dataset(job: Path) -> None:
    """The first rule that scores it says what is right."""
    write_rows(job / "routed.jsonl", [Problem(f"{i}+0=", str(i), "even" if i % 2 == 0 else "odd") for i in range(20)])
    sources = (
        "{taste: {type: engine, model: {path: m}, datasets: [odd]}, all: {type: math_verify, datasets: [odd]},"
        " answer: {type: exact_match}}"
    )
    (taken,), engine = take(job, "data.train=routed.jsonl", f"reward={{sources: {sources}}}", "batch.sampling.type=all")
    even, odd = taken.groups
    assert [trajectory.scores for trajectory in even.trajectories] == [{"answer": 1.0}] * SAMPLES
    assert [list(trajectory.scores) for trajectory in odd.trajectories] == [["all", "answer", "taste"]] * SAMPLES
    assert engine.scored == [[*odd.prompt.input_ids, 1, 2]] * SAMPLES


def test_an_engine_that_hangs_is_named(job: Path) -> None:
    hung = r"no answer for 0 s \(0\.8 of runtime\.deadline_s\) from .*reward engine taste \(2 requests\)"
    with pytest.raises(EngineTimeout, match=hung):
        take(job, "reward.sources.taste={type: engine, model: {path: m}}", "runtime.deadline_s=0.3", hangs=True)


def begun(job: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Coordinator, Any]:
    """One that has begun a step, and an engine that answers nothing of it."""
    monkeypatch.chdir(job)
    recipe = load_recipe(job / "rl.yaml", [f"batch.prompts={PROMPTS}"])
    assert isinstance(recipe, RlRecipe)
    journal, engine = Path(tempfile.mkdtemp(dir=job)), Engine(False)
    engine.late.update(range(PROMPTS))
    rewards: Any = Rewards(False)
    unused: Any = None
    queue = queue_of(recipe, 1, journal)
    coordinator = Coordinator(
        recipe, unused, rewards, {}, queue, unused, max_positions=64, failed_requests=journal / "failed.jsonl"
    )
    queue.publish(0)
    coordinator.generate()
    return coordinator, engine


def test_an_engine_that_comes_back_has_all_of_the_deadline(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long none was there."""

    async def run() -> None:
        coordinator, engine = begun(job, monkeypatch)
        assert isinstance(await coordinator.within(0.01, lambda: coordinator.take(0)), Waiting)
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 1e6)
        assert isinstance(await coordinator.within(0.0, lambda: coordinator.take(0)), Waiting)
        await coordinator.dispatcher.serve({0: engine})
        assert isinstance(await coordinator.within(0.0, lambda: coordinator.take(0)), Waiting)
        await coordinator.dispatcher.close()

    asyncio.run(run())


def test_prompts_that_engines_die_of_are_replaced_each_by_another(job: Path) -> None:
    """Also in a resumed run."""
    journal = Path(tempfile.mkdtemp(dir=job))
    (first,), _ = take(job, journal=journal, poison=[1])
    (second,), _ = take(job, journal=journal, poison=[0, 1], begin=1)
    assert [rows(first), sorted(rows(second))] == [[0, 19], [17, 18]]
    assert len((journal / "failed.jsonl").read_text().splitlines()) == 3


def test_when_rank_0_hangs_up_nothing_goes_on(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is late comes to no queue that is closed."""

    async def run() -> None:
        coordinator, engine = begun(job, monkeypatch)
        await coordinator.dispatcher.serve({0: engine})
        await coordinator.within(0.05, lambda: coordinator.take(0))
        assert len(engine.prompts) == PROMPTS
        reader = asyncio.StreamReader()
        unused: Any = None
        reader.feed_eof()
        await coordinator.serve(reader, unused)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())

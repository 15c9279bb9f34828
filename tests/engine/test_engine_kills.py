"""Engines that die at random moments of a job: each group is trained once, and of no response are two chunks lost.

What the engines themselves say that they answered is held against what the journal has.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.data import PromptSet, load_tokenizer
from megarl.transfer_queue.records import Accepted, Admitted, Base, Chunk, Record, Took, Trained
from megarl.transfer_queue.segment import scan, segment_numbers, segment_path
from megarl.types import Completion, Group
from tests.jobs import START_LIMIT_S, Job, alive, local_job, wait_until

pytestmark = pytest.mark.engine

RECIPE = "launch/recipes/carry_addition_rl.yaml"
PROMPTS, SAMPLES, MAX_LAG = 4, 4, 2
MISMATCH_LIMIT = 1e-4
STARTING_S, SERVING_S = 12.0, 15.0  # kills are spread over so much of an engine's life
STOPPED_SHARE = 0.2

Answer = tuple[tuple[int, ...], tuple[int, ...]]
"""What was asked, and what came of it."""


def test_engines_that_are_killed_again_and_again_lose_nothing(tmp_path: Path, rl_overrides: list[str]) -> None:
    print(kill_again_and_again(tmp_path / "run", rl_overrides, kills=4, seed=3))


def kill_again_and_again(run: Path, overrides: list[str], *, kills: int, seed: int, ranks: int = 2) -> str:
    """Of a job with one rank that trains and engines on the others; says what was killed when."""
    own = [
        "layout.tensor=1",
        "placement={type: disaggregated, train_ranks: 1}",
        f"mode={{max_lag: {MAX_LAG}, interrupt: true}}",
        "algorithm.entropy_coefficient=0.1",  # all answers are wrong, and versions should differ
        "optimizer.learning_rate=1e-3",
        "steps=100000",
        f"batch.prompts={PROMPTS}",
        f"batch.group_size={SAMPLES}",
        "rollout.max_new_tokens=64",
        "rollout.chunk_tokens=8",
        "rollout.stall_s=6",
        f"rollout.restarts={2 * kills}",
        "rollout.server_args={log_requests: true, log_requests_level: 3, log_requests_format: json}",
        "evaluation.problems=0",
        "runtime.deadline_s=60",
    ]
    with local_job(run, RECIPE, *overrides, *own, ranks=ranks) as job:
        job.wait_for_step(1)
        hunt = Hunt(job, random.Random(seed))
        while hunt.struck.total() < kills:
            hunt.strike()
        hunt.wait(lambda: all(map(hunt.serves, hunt.leaders())))
        job.wait_for_step(len(job.metrics()) + MAX_LAG + 1)
        job.processes()["rank 0"].send_signal(signal.SIGUSR1)
        assert job.wait() == 0, job.output()[-3000:]
    causes = said_of_ends(job.output())
    assert sum(causes.values()) >= kills
    found = Findings(run, prompts_of(overrides))
    found.check(job.metrics())
    return f"seed {seed}: {hunt.struck.total()} kills: {dict(hunt.struck)}; engines {dict(causes)}; {found}"


@dataclass
class Hunt:
    job: Job
    draw: random.Random
    struck: Counter[str] = field(default_factory=Counter)
    _hit: set[int] = field(default_factory=set)
    _joined: Counter[str] = field(default_factory=Counter)

    def wait(self, condition: Any) -> None:
        process = self.job.process
        wait_until(lambda: condition() or process.poll() is not None, START_LIMIT_S, self.job.output)
        assert process.poll() is None, self.job.output()[-3000:]

    def leaders(self) -> dict[str, psutil.Process]:
        """The servers of engines that were not hit yet, by engine."""
        found = {}
        for kind, process in self.job.processes().items():
            if kind.startswith("engine") and process.pid not in self._hit:
                with contextlib.suppress(FileNotFoundError):
                    log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
                    found[log.stem.replace("_", " ")] = process
        return found

    def joins(self, engine: str) -> int:
        """How often it was ready to be asked."""
        return (self.job.run_dir / "logs/coordinator.log").read_text().count(f"{engine} has room")

    def serves(self, engine: str) -> bool:
        """Again, after it was hit."""
        return self.joins(engine) > self._joined[engine]

    def strike(self) -> None:
        """At a random moment of the life of an engine; in vain if it has ended by then."""
        self.wait(self.leaders)
        engine, leader = self.draw.choice(sorted(self.leaders().items()))
        if self.draw.random() < 0.5:
            time.sleep(self.draw.uniform(0.0, STARTING_S))
        else:
            self.wait(lambda: self.serves(engine))
            time.sleep(self.draw.uniform(0.0, SERVING_S))
        if not alive(leader):
            return  # it was slow, and was taken for one that hangs
        what, when = "engine", "serving" if self.serves(engine) else "starting"
        victims = [leader, *leader.children(recursive=True)]
        number = signal.SIGKILL
        if when == "serving" and self.draw.random() < STOPPED_SHARE:
            number = signal.SIGSTOP
        elif self.draw.random() < 0.5:
            workers = {kind.split()[0]: p for kind, p in self.job.processes().items() if p in victims}
            what = self.draw.choice(sorted(workers.keys() & {"engine", "scheduler", "detokenizer"}))
            victims = [workers[what]]
            what = f"{what} alone"
        self._hit.add(leader.pid)
        self._joined[engine] = self.joins(engine)
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(number)
        self.struck[f"{what} {'killed' if number == signal.SIGKILL else 'stopped'} {when}"] += 1


def said_of_ends(output: str) -> Counter[str]:
    """By what engines were found to have failed."""
    kinds = {
        "lost in a rollout": "was asked",
        "stalled": "made no progress",
        "lost in a publication": "did not answer /|refused /|failed at /",
        "ended while starting": r"was killed by signal|ended with exit code",
    }
    causes = re.findall(r"engine \d+ is started anew: (.*)", output)
    return Counter(next((kind for kind, mark in kinds.items() if re.search(mark, cause)), cause) for cause in causes)


def prompts_of(overrides: list[str]) -> PromptSet:
    given = dict(override.partition("=")[::2] for override in overrides)
    tokenizer = load_tokenizer(Path(given["model.path"]))
    return PromptSet(Path(given["data.train"]), tokenizer, max_positions=512, max_new_tokens=64)


class Findings:
    """What the journal of a run has, all of it, and what its engines wrote down."""

    def __init__(self, run: Path, prompts: PromptSet) -> None:
        self.prompts = prompts
        self.admitted: list[int] = []
        self.begun: dict[tuple[int, int], Completion] = {}
        self.groups: dict[int, Group] = {}
        self.took: list[list[int]] = []
        self.chunks: Counter[Answer] = Counter()
        for record in records(run):
            self._add(record)
        self.replaced = [row for row, group in self.groups.items() if group.prompt.index != row]
        self.failed = (run / "failed_requests.jsonl").read_text().count("\n") if self.replaced else 0
        self.answers = Counter(answers(run))
        self.again = self.answers - self.chunks

    def _add(self, record: Base | Record) -> None:
        match record:
            case Base(first=first):
                assert first == 1, "the journal was cleaned"
            case Admitted(row=row):
                self.admitted.append(row)
            case Chunk(row=row, sample=sample, start=start, completion=tokens):
                so_far = self.begun.setdefault((row, sample), Completion([], [], "length", []))
                assert start == len(so_far.output_ids), "a chunk is missing, or there twice"
                self.chunks[tuple(self.prompts[row].input_ids + so_far.output_ids), tuple(tokens.output_ids)] += 1
                so_far.extend(tokens)
            case Accepted(row=row, group=group):
                assert row not in self.groups, "a group came twice"
                self.groups[row] = group
            case Took(step=step, rows=rows):
                assert step == len(self.took), "a step took groups twice"
                self.took.append(rows)
            case Trained(step=step):
                assert step == len(self.took), "groups were taken and not trained"

    def check(self, metrics: list[dict[str, Any]]) -> None:
        assert [row["step"] for row in metrics] == list(range(1, len(self.took) + 1))
        taken = sorted(row for rows in self.took for row in rows)
        assert taken == list(range(len(self.took) * PROMPTS)), "a group was lost, or trained twice"
        assert sorted(self.admitted) == list(range(len(self.admitted))), "a row was admitted twice"
        for rows, row in zip(self.took, metrics, strict=True):
            trained = [trajectory for one in rows for trajectory in self.groups[one].trajectories]
            assert row["tokens"] == sum(len(trajectory.output_ids) for trajectory in trained)
            assert row["rollout/lag_max"] <= MAX_LAG
            assert row.get("mismatch/logprob_max", 0.0) <= MISMATCH_LIMIT
        for row, group in self.groups.items():
            if row not in self.replaced:
                self._check_whole(row, group)
        assert self.failed >= len(self.replaced)
        self._check_answers()

    def _check_whole(self, row: int, group: Group) -> None:
        """The group is what the journal had of it before, chunk by chunk."""
        assert len(group.trajectories) == SAMPLES
        for sample, trajectory in enumerate(group.trajectories):
            chunks = self.begun[row, sample]
            assert trajectory.output_ids == chunks.output_ids
            assert trajectory.engine_logprobs == chunks.logprobs
            assert trajectory.versions == chunks.versions
            versions = [span.version for span in chunks.versions]
            assert versions == sorted(versions), "older weights went on with newer ones' tokens"
            assert [span.start for span in chunks.versions[1:]] == [span.end for span in chunks.versions[:-1]]

    def _check_answers(self) -> None:
        """What was asked again was only the chunk that the engine was at: it was asked from where the journal is.

        Of a prompt that another replaces, the rest of the group is not wanted any more; and the journal has only the
        group of that other one.
        """
        assert not self.chunks - self.answers, "the journal has what no engine answered"
        others = [*self.replaced, *(self.groups[row].prompt.index for row in self.replaced)]
        unknown = [tuple(self.prompts[row].input_ids) for row in others]
        places = {asked for asked, _ in self.chunks}
        under_way = {tuple(self.prompts[row].input_ids + c.output_ids) for (row, _), c in self.begun.items()}
        for asked, _ in list(self.again):
            if any(asked[: len(prompt)] == prompt for prompt in unknown):
                del self.again[asked, _]
            else:
                assert asked in places | under_way, "more than the last chunk of a response was generated again"

    def __str__(self) -> str:
        tokens = sum(len(c.output_ids) for c in self.begun.values())
        return (
            f"{len(self.took)} steps took {len(self.took) * PROMPTS} groups once each, {len(self.replaced)} of them"
            f" with another prompt; {self.chunks.total()} chunks of {tokens} tokens in the journal, and"
            f" {self.again.total()} answers that were generated again"
        )


def records(run: Path) -> Iterator[Base | Record]:
    (directory,) = (run / "journal").iterdir()
    for number in segment_numbers(directory):
        for _, _, record in scan(segment_path(directory, number)):
            yield record


def answers(run: Path) -> Iterator[Answer]:
    """Of all engines, what they finished, whether anyone heard of it or not."""
    for log in (run / "logs").glob("engine_*.log"):
        with log.open(errors="replace") as lines:
            for line in lines:
                if '"event": "request.finished"' not in line:
                    continue
                said = json.loads(line[line.index("{") :])
                if not said["rid"].startswith("HEALTH_CHECK"):
                    yield tuple(said["obj"]["input_ids"]), tuple(said["out"]["output_ids"])

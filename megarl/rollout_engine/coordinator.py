"""The coordinator: prompts in, scored groups out.

It asks the engines for responses, has them scored, and puts whole groups into the queue that it is given. Each
step's are offered to the ranks. It imports neither torch nor megatron nor sglang, so its process starts in a second.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

from megarl.config import InformativeGroups, RemaxAdvantage, RlRecipe
from megarl.data import PromptSet, load_tokenizer
from megarl.rewards import RewardPool
from megarl.rollout_engine import channel
from megarl.rollout_engine.client import EngineClient, ScoreClient
from megarl.rollout_engine.dispatch import Dispatcher, PoisonedError, Tally, length_metrics
from megarl.rollout_engine.engine import EngineAddress, EngineTimeout
from megarl.rollout_engine.handle import ENGINE_SHARE
from megarl.rollout_engine.scheduler import POLICIES, Divided, Scheduler
from megarl.types import Completion, Group, Offer, Prompt, Trajectory, WeightVersion

_SAMPLES_SHOWN = 16
_PATIENCE_STEPS = 4


class Queue(Protocol):
    """Where finished groups go, and whole steps come out."""

    def publish(self, version: WeightVersion) -> None: ...
    def admit(self) -> list[int]: ...
    def begun(self, row: int) -> dict[int, Completion]: ...
    def extend(self, row: int, sample: int, start: int, tokens: Completion) -> None: ...
    async def put(self, row: int, group: Group) -> None: ...
    def prompts(self) -> set[int]: ...
    def take(self, step: int) -> list[Group] | None: ...
    async def saved(self, step: int) -> None: ...


class Coordinator:
    """Has responses generated and scored, and queues whole groups."""

    def __init__(
        self,
        recipe: RlRecipe,
        connect: Callable[[EngineAddress], Awaitable[EngineClient]],
        rewards: RewardPool,
        scorers: dict[str, ScoreClient],
        queue: Queue,
        offer: Callable[[int, list[Group]], Awaitable[Offer]],
        *,
        max_positions: int,
        failed_requests: Path,
    ) -> None:
        """`connect` gives the client of an engine; `scorers` are those of reward models' engines, by reward source.

        `offer` makes a step's groups ready for the ranks that train. Requests with which engines died are written to
        the file `failed_requests`.
        """
        self._recipe, self._rewards, self._scorers, self._queue, self._offer = recipe, rewards, scorers, queue, offer
        self._tokenizer = load_tokenizer(recipe.model.path)
        rollout = recipe.rollout
        room = {"max_positions": max_positions, "max_new_tokens": rollout.max_new_tokens}
        self._train = PromptSet(recipe.data.train, self._tokenizer, **room)
        self._test = PromptSet(recipe.data.test, self._tokenizer, count=recipe.evaluation.problems, **room)
        self._connect, self._failed_requests = connect, failed_requests
        self._deadline_s = recipe.runtime.deadline_s * ENGINE_SHARE
        longest = max(self._train.longest, self._test.longest) + rollout.max_new_tokens
        stall_s = min(rollout.stall_s, recipe.runtime.deadline_s / 2)
        self.dispatcher = Dispatcher(make_scheduler(recipe), stall_s=stall_s, needed_tokens=longest)
        self._under_way: set[asyncio.Task[None]] = set()
        self._work: asyncio.Task[channel.Reply] | None = None
        self._progress_at = time.monotonic()
        self._lengths: dict[int, int] = {}  # of the longest response, by row of the data
        self._asked = 0
        self._replaced = _lines(failed_requests)  # so that a resumed run goes on with other prompts

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer rank 0's requests, one after the other, until it hangs up; what is under way ends then."""
        try:
            while (request := await channel.read_request(reader)) is not None:
                await self._answer(request, writer)
                await writer.drain()
        finally:
            tasks = [*self._under_way, *([self._work] if self._work else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.dispatcher.close()

    async def _answer(self, request: channel.Request, writer: asyncio.StreamWriter) -> None:
        match request:
            case channel.Serve(engines=engines, published=published):
                clients = {number: await self._connect(address) for number, address in engines.items()}
                if published is not None:
                    self._queue.publish(published)
                await self.dispatcher.serve(clients, resume=published is not None)
            case channel.Generate():
                self.generate()
            case channel.Saved(step=step):
                await self._queue.saved(step)
            case channel.Look():
                writer.write(channel.frame(channel.Waiting(self.dispatcher.take_lost())))
            case channel.Drain(wait_s=wait_s):
                writer.write(channel.frame(await self.within(wait_s, self._drain)))
            case channel.Take(step=step, wait_s=wait_s):
                writer.write(channel.frame(await self.within(wait_s, functools.partial(self.take, step))))
            case channel.Evaluate(wait_s=wait_s):
                writer.write(channel.frame(await self.within(wait_s, self._evaluate)))

    async def within(self, wait_s: float, start: Callable[[], Coroutine[Any, Any, channel.Reply]]) -> channel.Reply:
        """The result of what goes on, or is started now; or Waiting, after `wait_s` or when an engine is lost.

        Raises EngineTimeout: there has been no progress for too long.
        """
        if self._work is None:
            self._work, self._progress_at = asyncio.create_task(start()), time.monotonic()
        lost = asyncio.create_task(self.dispatcher.something_lost.wait())
        await asyncio.wait({self._work, lost}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        if self._work.done():
            work, self._work = self._work, None
            return work.result()  # here an engine's failure surfaces
        idle_s = time.monotonic() - max(self._progress_at, self.dispatcher.progress_at)
        if idle_s > self._deadline_s and self.dispatcher.scheduler.engines:  # else they are being started
            scorers = [f"{client.name} ({client.owed} requests)" for client in self._scorers.values() if client.owed]
            raise EngineTimeout(
                f"no answer for {idle_s:.0f} s ({ENGINE_SHARE} of runtime.deadline_s) from"
                f" {', '.join([*self.dispatcher.owing, *scorers]) or 'the reward workers'}"
            )
        return channel.Waiting(self.dispatcher.take_lost())

    def generate(self) -> None:
        """Begin the groups that may be asked now."""
        rows = self._queue.admit()
        if self._recipe.takes_turns or (rows and not self._going_on):
            self.dispatcher.begin_step(going_on=self._going_on)
        if rows and isinstance(self._recipe.batch.sampling, InformativeGroups):
            self._under_way.add(asyncio.create_task(self._fill_informative(rows, self._recipe.batch.sampling)))
        else:
            self._asked += len(rows)
            self._under_way.update(asyncio.create_task(self._fill(row)) for row in rows)

    async def take(self, step: int) -> channel.Taken:
        """The groups of `step`, when enough are there."""
        while (groups := self._queue.take(step)) is None:
            await self._settle()
        if self._going_on and self._recipe.takes_turns:
            await self.dispatcher.hold(self._recipe.engines_that_wait(self.dispatcher.scheduler.engines))
        asked, self._asked = self._asked, 0
        metrics = self.dispatcher.metrics()
        if self._recipe.mode.max_lag:
            trajectories = [trajectory for group in groups for trajectory in group.trajectories]
            lengths = [len(trajectory.output_ids) for trajectory in trajectories]
            metrics |= length_metrics("trained", lengths) | length_metrics("generated", self.dispatcher.lengths())
            metrics |= staleness_metrics(trajectories, step)
        self.dispatcher.tally = Tally()  # what comes until the next step begins is the next one's
        offer = await self._offer(step, groups)
        return channel.Taken(offer, asked, metrics, self._rewards.timeouts, self._rewards.crashes)

    @property
    def _going_on(self) -> bool:
        """Whether any group is under way."""
        return not all(task.done() for task in self._under_way)

    async def _drain(self) -> channel.Drained:
        while self._under_way:
            await self._settle()
        return channel.Drained()

    async def _settle(self) -> None:
        """Wait until something that is under way ends; an engine's failure surfaces here."""
        assert self._under_way, "a step waits for groups, and none is under way"
        done, _ = await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
        self._under_way -= done
        for task in done:
            task.result()

    async def _fill(self, row: int) -> None:
        extend = functools.partial(self._queue.extend, row)
        await self._queue.put(row, await self._group(row, begun=self._queue.begun(row), report=extend))

    async def _fill_informative(self, rows: list[int], sampling: InformativeGroups) -> None:
        """All groups of a step; it has data of its own, whatever others needed, so that a resumed run asks the same."""
        prompts = self._recipe.batch.prompts
        waves, ask, asked = sampling.waves, sampling.ask or prompts, 0
        first = rows[0] // prompts * waves * ask
        there = self._queue.prompts()  # a process that ended may have put some of the step's
        taken: list[Group] = []
        passed_over: list[Group] = []
        while len(taken) < len(rows) and asked < waves * ask:
            for group in await self._groups({*range(first + asked, first + asked + ask)} - there):
                (taken if self._is_informative(group, sampling) else passed_over).append(group)
            asked += ask
        self._asked += asked
        chosen = sorted([*taken, *passed_over][: len(rows)], key=lambda group: group.prompt.index)
        for row, group in zip(rows, chosen, strict=True):
            await self._queue.put(row, group)

    async def _groups(self, rows: set[int]) -> list[Group]:
        return await _all(self._group(row) for row in sorted(rows))

    async def _group(self, row: int, **going_on: Any) -> Group:
        """That of a row of the data; or, where engines die of it, of another, from the data's end."""
        while True:
            try:
                return await self._answered(self._train[row], **going_on)
            except PoisonedError as error:
                await asyncio.to_thread(self._save_failed, self._train[row], error)
                self._replaced += 1
                row, going_on = -self._replaced, {}

    def _save_failed(self, prompt: Prompt, error: PoisonedError) -> None:
        text = self._tokenizer.decode(error.token_ids)
        row = {"prompt": prompt.text, "text": text, "token_ids": error.token_ids, "error": str(error)}
        with self._failed_requests.open("a") as file:
            file.write(json.dumps(row) + "\n")

    async def _answered(self, prompt: Prompt, **going_on: Any) -> Group:
        size, temperature = self._recipe.batch.group_size, self._recipe.rollout.temperature
        row = prompt.index % len(self._train)
        expected = self._lengths.get(row)
        asked = [self._sample(prompt, samples=size, temperature=temperature, expected=expected, **going_on)]
        if isinstance(self._recipe.algorithm.advantage, RemaxAdvantage):
            asked.append(self._sample(prompt, samples=1, temperature=0.0))
        sampled, *greedy = await _all(asked)
        self._lengths[row] = max(len(completion.output_ids) for completion in sampled)
        group = Group(prompt, await self._score(prompt, sampled))
        if greedy:
            group.greedy_scores = (await self._score(prompt, greedy[0]))[0].scores
        return group

    def _is_informative(self, group: Group, sampling: InformativeGroups) -> bool:
        """Whether a step takes the group while it has others to choose from."""
        right = sum(self._judged(group.prompt, t) > 0 for t in group.trajectories) / len(group.trajectories)
        return sampling.low < right < sampling.high

    def _judged(self, prompt: Prompt, trajectory: Trajectory) -> float:
        """What the rule says that decides whether an answer to `prompt` is right."""
        judge = self._recipe.reward.judge(prompt.dataset)
        assert judge is not None, "a row without a rule"
        return trajectory.scores[judge]

    async def _evaluate(self) -> channel.Evaluation:
        async def answer(prompt: Prompt, temperature: float) -> tuple[Trajectory, float]:
            try:
                completions = await self._sample(prompt, samples=1, temperature=temperature)
            except PoisonedError as error:
                await asyncio.to_thread(self._save_failed, prompt, error)
                return Trajectory([], [], [], "length", "", {}), 0.0
            (trajectory,) = await self._score(prompt, completions, rules_alone=True)
            return trajectory, self._judged(prompt, trajectory)

        problems = [self._test[i] for i in range(len(self._test))]
        sampled = await _all(answer(prompt, 1.0) for prompt in problems)
        greedy = await _all(answer(prompt, 0.0) for prompt in problems)
        return channel.Evaluation(
            accuracy=_mean([score > 0 for _, score in sampled]),
            accuracy_greedy=_mean([score > 0 for _, score in greedy]),
            mean_length=_mean([len(trajectory.output_ids) for trajectory, _ in sampled]),
            samples=[
                channel.Sample(prompt.text, prompt.answer, trajectory.text, score)
                for prompt, (trajectory, score) in zip(problems[:_SAMPLES_SHOWN], sampled, strict=False)
            ],
        )

    async def _sample(self, prompt: Prompt, *, samples: int, temperature: float, **options: Any) -> list[Completion]:
        """Options are those of `Dispatcher.respond`."""
        return await self.dispatcher.respond(
            prompt.input_ids,
            samples=samples,
            temperature=temperature,
            max_new_tokens=self._recipe.rollout.max_new_tokens,
            stop_token=self._tokenizer.eos_token_id,
            **options,
        )

    async def _score(
        self, prompt: Prompt, completions: list[Completion], *, rules_alone: bool = False
    ) -> list[Trajectory]:
        """By each source that scores the prompt's dataset and is no model on the ranks that train."""
        texts = self._tokenizer.batch_decode([c.output_ids for c in completions], skip_special_tokens=True)
        reward = self._recipe.reward
        rules = [name for name, rule in reward.rules.items() if rule.scores(prompt.dataset)]
        engines = [name for name, engine in reward.engines.items() if engine.scores(prompt.dataset) and not rules_alone]
        whole = [prompt.input_ids + completion.output_ids for completion in completions]
        judged, *scored = await _all(
            [
                self._rewards.score_many([(name, text, prompt.answer) for name in rules for text in texts]),
                *(self._scorers[name].score(whole) for name in engines),
            ]
        )
        self._progress_at = time.monotonic()
        count = len(texts)
        by_source = {name: judged[i * count : (i + 1) * count] for i, name in enumerate(rules)}
        by_source |= dict(zip(engines, scored, strict=True))
        return [
            Trajectory(
                output_ids=completion.output_ids,
                engine_logprobs=completion.logprobs,
                versions=completion.versions,
                finish_reason=completion.finish_reason,
                text=text,
                scores={name: scores[i] for name, scores in by_source.items()},
            )
            for i, (completion, text) in enumerate(zip(completions, texts, strict=True))
        ]


async def _all(coroutines: Any) -> list[Any]:
    """Results in order; the first failure cancels the rest and is raised as it is."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def staleness_metrics(trajectories: list[Trajectory], step: WeightVersion) -> dict[str, float]:
    """How far behind `step`'s weights those are that sampled the tokens: in versions, and as a share of tokens."""
    spans = [span for trajectory in trajectories for span in trajectory.versions]
    stale = sum(span.end - span.start for span in spans if span.version < step)
    return {
        "rollout/stale_fraction": stale / max(sum(span.end - span.start for span in spans), 1),
        "rollout/lag_max": float(max((step - span.version for span in spans), default=0)),
    }


def make_scheduler(recipe: RlRecipe) -> Scheduler:
    """The recipe's policy, which lets no group be passed over by more than some steps of others."""
    policy, patience = POLICIES[recipe.rollout.policy], _PATIENCE_STEPS * recipe.batch.prompts
    if issubclass(policy, Divided):
        return policy(chunk_tokens=recipe.rollout.chunk_tokens, patience=patience)
    return policy(patience=patience)

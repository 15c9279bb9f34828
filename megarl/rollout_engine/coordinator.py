"""The coordinator: prompts in, scored groups out.

It asks the engines for responses, has them scored, and puts whole groups into the queue that it is given, from which
rank 0 takes them. It imports neither torch nor megatron nor sglang, so its process starts in a second.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec

from megarl.config import AllGroups, InformativeGroups, RemaxAdvantage, RlRecipe
from megarl.data import PromptSet, load_tokenizer
from megarl.rewards import RewardPool
from megarl.rollout_engine import channel
from megarl.rollout_engine.client import EngineClient, ScoreClient
from megarl.rollout_engine.engine import EngineAddress, EngineTimeout
from megarl.rollout_engine.handle import ENGINE_SHARE
from megarl.types import Completion, Group, Prompt, Trajectory, VersionSpan

T = TypeVar("T")

_SAMPLES_SHOWN = 16


class Queue(Protocol):
    """Where finished groups go, and whole steps come out."""

    async def put(self, group: Group) -> None: ...
    async def take(self, step: int) -> list[Group]: ...


class Coordinator:
    """Generates, scores and queues. Whole responses: one request for all samples of a prompt, engines in turn."""

    def __init__(
        self,
        recipe: RlRecipe,
        connect: Callable[[EngineAddress], Awaitable[EngineClient]],
        rewards: RewardPool,
        scorers: dict[str, ScoreClient],
        queue: Queue,
        *,
        max_positions: int,
    ) -> None:
        """`connect` gives the client of an engine; `scorers` are those of reward models' engines, by reward source."""
        self._recipe, self._rewards, self._scorers, self._queue = recipe, rewards, scorers, queue
        self._tokenizer = load_tokenizer(recipe.model.path)
        room = {"max_positions": max_positions, "max_new_tokens": recipe.rollout.max_new_tokens}
        self._train = PromptSet(recipe.data.train, self._tokenizer, **room)
        self._test = PromptSet(recipe.data.test, self._tokenizer, count=recipe.evaluation.problems, **room)
        self._connect = connect
        self._deadline_s = recipe.runtime.deadline_s * ENGINE_SHARE
        self.use([])
        self._generation: asyncio.Task[tuple[float, int]] | None = None

    def use(self, engines: list[EngineClient]) -> None:
        """Ask these from now on, in turn."""
        self._next_engine = itertools.cycle(engines).__next__
        self._clients = [*engines, *self._scorers.values()]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer rank 0's requests, one after the other, until it hangs up."""
        while True:
            try:
                header = await reader.readexactly(channel.HEADER.size)
            except asyncio.IncompleteReadError:
                return
            request = channel.decode_request(await reader.readexactly(channel.HEADER.unpack(header)[0]))
            match request:
                case channel.Serve(engines=engines):
                    self.use([await self._connect(address) for address in engines])
                case channel.Generate(version=version):
                    self._generation = asyncio.create_task(self._generate(version))
                case channel.Take(step=step):
                    writer.write(channel.frame(await self._take(step)))
                case channel.Evaluate():
                    writer.write(channel.frame(await self._in_time(asyncio.create_task(self._evaluate()))))
            await writer.drain()

    async def _generate(self, version: int) -> tuple[float, int]:
        """All groups of the step that trains `version`; returns the seconds it took and the prompts that were asked."""
        start, prompts, sampling = time.monotonic(), self._recipe.batch.prompts, self._recipe.batch.sampling
        waves, ask = 1, prompts
        if isinstance(sampling, InformativeGroups):
            waves, ask = sampling.waves, sampling.ask or prompts
        taken: list[Group] = []
        passed_over: list[Group] = []
        asked = 0
        while len(taken) < prompts and asked < waves * ask:
            # a step has rows of its own, whatever others needed: so a resumed run asks what it would have asked
            first = version * waves * ask + asked
            for group in await _all(self._group(self._train[i]) for i in range(first, first + ask)):
                (taken if self._is_informative(group) else passed_over).append(group)
            asked += ask
        chosen = [*taken, *passed_over][:prompts]
        for place, group in enumerate(sorted(chosen, key=lambda group: group.prompt.index)):
            group.prompt = msgspec.structs.replace(group.prompt, index=version * prompts + place)
            await self._queue.put(group)
        return time.monotonic() - start, asked

    async def _group(self, prompt: Prompt) -> Group:
        size, temperature = self._recipe.batch.group_size, self._recipe.rollout.temperature
        asked = [self._sample(prompt, samples=size, temperature=temperature)]
        if isinstance(self._recipe.algorithm.advantage, RemaxAdvantage):
            asked.append(self._sample(prompt, samples=1, temperature=0.0))
        sampled, *greedy = await _all(asked)
        group = Group(prompt, await self._score(prompt, sampled))
        if greedy:
            group.greedy_scores = (await self._score(prompt, greedy[0]))[0].scores
        return group

    def _is_informative(self, group: Group) -> bool:
        """Whether a step takes the group while it has others to choose from."""
        sampling = self._recipe.batch.sampling
        if isinstance(sampling, AllGroups):
            return True
        right = sum(self._judged(group.prompt, t) > 0 for t in group.trajectories) / len(group.trajectories)
        return sampling.low < right < sampling.high

    def _judged(self, prompt: Prompt, trajectory: Trajectory) -> float:
        """What the rule says that decides whether an answer to `prompt` is right."""
        judge = self._recipe.reward.judge(prompt.dataset)
        assert judge is not None, "a row without a rule"
        return trajectory.scores[judge]

    async def _take(self, step: int) -> channel.Taken:
        assert self._generation is not None, "take before generate"
        seconds, asked = await self._in_time(self._generation)  # here an engine's failure surfaces
        groups = await self._queue.take(step)
        return channel.Taken(groups, asked, seconds, self._rewards.timeouts, self._rewards.crashes)

    async def _in_time(self, work: asyncio.Task[T]) -> T:
        """The result of `work`. Raises EngineTimeout with the engines that owe an answer: it is not there in time."""
        done, _ = await asyncio.wait({work}, timeout=self._deadline_s)
        if not done:
            owing = [f"{client.name} ({client.owed} requests)" for client in self._clients if client.owed]
            work.cancel()
            raise EngineTimeout(
                f"no answer for {self._deadline_s:.0f} s ({ENGINE_SHARE} of runtime.deadline_s) from"
                f" {', '.join(owing) or 'the reward workers'}"
            )
        return await work

    async def _evaluate(self) -> channel.Evaluation:
        async def answer(prompt: Prompt, temperature: float) -> tuple[Trajectory, float]:
            completions = await self._sample(prompt, samples=1, temperature=temperature)
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

    async def _sample(self, prompt: Prompt, *, samples: int, temperature: float) -> list[Completion]:
        return await self._next_engine().generate(
            prompt.input_ids,
            samples=samples,
            temperature=temperature,
            max_new_tokens=self._recipe.rollout.max_new_tokens,
            stop_token=self._tokenizer.eos_token_id,
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
        count = len(texts)
        by_source = {name: judged[i * count : (i + 1) * count] for i, name in enumerate(rules)}
        by_source |= dict(zip(engines, scored, strict=True))
        return [
            Trajectory(
                output_ids=completion.output_ids,
                engine_logprobs=completion.logprobs,
                versions=[VersionSpan(completion.version, 0, len(completion.output_ids))],
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


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)

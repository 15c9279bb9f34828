"""The coordinator: prompts in, scored groups out.

It asks the engines for responses, has them scored, and puts whole groups into the queue that it is given, from which
rank 0 takes them. It imports neither torch nor megatron nor sglang, so its process starts in a second.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any, Protocol

import msgspec

from megarl.config import AllGroups, InformativeGroups, RemaxAdvantage, RlRecipe
from megarl.data import PromptSet, load_tokenizer
from megarl.rewards import RewardPool
from megarl.rollout_engine import channel
from megarl.rollout_engine.client import EngineClient
from megarl.types import Completion, Group, Prompt, Trajectory, VersionSpan

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
        engines: list[EngineClient],
        rewards: RewardPool,
        queue: Queue,
        *,
        max_positions: int,
    ) -> None:
        self._recipe, self._rewards, self._queue = recipe, rewards, queue
        self._tokenizer = load_tokenizer(recipe.model.path)
        room = {"max_positions": max_positions, "max_new_tokens": recipe.rollout.max_new_tokens}
        self._train = PromptSet(recipe.data.train, self._tokenizer, **room)
        self._test = PromptSet(recipe.data.test, self._tokenizer, count=recipe.evaluation.problems, **room)
        self._next_engine = itertools.cycle(engines).__next__
        self._generation: asyncio.Task[tuple[float, int]] | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer rank 0's requests, one after the other, until it hangs up."""
        while True:
            try:
                header = await reader.readexactly(channel.HEADER.size)
            except asyncio.IncompleteReadError:
                return
            request = channel.decode_request(await reader.readexactly(channel.HEADER.unpack(header)[0]))
            match request:
                case channel.Generate(version=version):
                    self._generation = asyncio.create_task(self._generate(version))
                case channel.Take(step=step):
                    writer.write(channel.frame(await self._take(step)))
                case channel.Evaluate():
                    writer.write(channel.frame(await self._evaluate()))
            await writer.drain()

    async def _generate(self, version: int) -> tuple[float, int]:
        """All groups of the step that trains `version`; returns the seconds it took and the prompts that were asked."""
        start, prompts, sampling = time.monotonic(), self._recipe.batch.prompts, self._recipe.batch.sampling
        waves = sampling.waves if isinstance(sampling, InformativeGroups) else 1
        taken: list[Group] = []
        passed_over: list[Group] = []
        asked = 0
        while len(taken) < prompts and asked < waves * prompts:
            # a step has rows of its own, whatever others needed: so a resumed run asks what it would have asked
            first = version * waves * prompts + asked
            for group in await _all(self._group(self._train[i]) for i in range(first, first + prompts)):
                (taken if is_informative(group, sampling) else passed_over).append(group)
            asked += prompts
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
            group.greedy_reward = (await self._score(prompt, greedy[0]))[0].reward
        return group

    async def _take(self, step: int) -> channel.Taken:
        assert self._generation is not None, "take before generate"
        seconds, asked = await self._generation  # here an engine's failure surfaces
        groups = await self._queue.take(step)
        return channel.Taken(groups, asked, seconds, self._rewards.timeouts, self._rewards.crashes)

    async def _evaluate(self) -> channel.Evaluation:
        async def answer(prompt: Prompt, temperature: float) -> Trajectory:
            completions = await self._sample(prompt, samples=1, temperature=temperature)
            return (await self._score(prompt, completions))[0]

        problems = [self._test[i] for i in range(len(self._test))]
        sampled = await _all(answer(prompt, 1.0) for prompt in problems)
        greedy = await _all(answer(prompt, 0.0) for prompt in problems)
        return channel.Evaluation(
            accuracy=_mean([t.reward for t in sampled]),
            accuracy_greedy=_mean([t.reward for t in greedy]),
            mean_length=_mean([len(t.output_ids) for t in sampled]),
            samples=[
                channel.Sample(prompt.text, prompt.answer, t.text, t.reward)
                for prompt, t in zip(problems[:_SAMPLES_SHOWN], sampled, strict=False)
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

    async def _score(self, prompt: Prompt, completions: list[Completion]) -> list[Trajectory]:
        texts = self._tokenizer.batch_decode([c.output_ids for c in completions], skip_special_tokens=True)
        rewards = await self._rewards.score_many([(text, prompt.answer) for text in texts])
        return [
            Trajectory(
                output_ids=completion.output_ids,
                engine_logprobs=completion.logprobs,
                versions=[VersionSpan(completion.version, 0, len(completion.output_ids))],
                finish_reason=completion.finish_reason,
                text=text,
                reward=reward,
            )
            for completion, text, reward in zip(completions, texts, rewards, strict=True)
        ]


def is_informative(group: Group, sampling: AllGroups | InformativeGroups) -> bool:
    """Whether a step takes the group while it has others to choose from."""
    if isinstance(sampling, AllGroups):
        return True
    right = sum(trajectory.reward > 0 for trajectory in group.trajectories) / len(group.trajectories)
    return sampling.low < right < sampling.high


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

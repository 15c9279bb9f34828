"""Carries out what a scheduler decides: chunks as requests to engines, and responses put together from chunks.

A response comes out exactly once, whatever happens to engines: a chunk whose engine dies or makes no progress runs
again elsewhere, after the last that was finished.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from megarl.rollout_engine.channel import Lost
from megarl.rollout_engine.client import Chunk, EngineClient, EngineLost, Load
from megarl.rollout_engine.engine import EngineAddress, EngineError
from megarl.rollout_engine.idle import IdleTime
from megarl.rollout_engine.scheduler import Context, Request, Scheduler
from megarl.types import Completion

_TAIL = 0.9
_LOOKS_PER_STALL = 8


class PoisonedError(EngineError):
    """A request was with two engines when they died; it is not tried again."""

    def __init__(self, message: str, token_ids: list[int]) -> None:
        super().__init__(message)
        self.token_ids = token_ids


@dataclass(slots=True, eq=False, kw_only=True)
class Response(Request):
    """A request with what it asks and what has come of it."""

    input_ids: list[int]
    temperature: float
    stop_token: int
    report: Callable[[int, Completion], None]
    so_far: Completion = field(default_factory=lambda: Completion([], [], "length", []))
    done: asyncio.Future[Completion] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def ended(self) -> bool:
        return self.so_far.finish_reason == "stop" or len(self.so_far.output_ids) >= self.limit


@dataclass
class Tally:
    """What happened since the last step; times in seconds of a monotonic clock."""

    started: float = field(default_factory=time.monotonic)
    finished: list[tuple[float, int]] = field(default_factory=list)
    """When each response ended, and its tokens."""
    tokens: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    chunks: int = 0
    asked: int = 0
    cached: int = 0
    preemptions: int = 0
    lost: int = 0

    def add(self, engine: int, chunk: Chunk, asked: int) -> None:
        self.tokens[engine] += len(chunk.completion.output_ids)
        self.chunks += 1
        self.asked += asked
        self.cached += chunk.cached
        self.preemptions += chunk.preemptions

    def metrics(self) -> dict[str, float]:
        """What is logged of a step."""
        found = {"rollout/chunks": float(self.chunks), "rollout/engines_lost": float(self.lost)}
        ends = sorted(when for when, _ in self.finished if when >= self.started)
        if not ends or not self.chunks:
            return found  # others had been finished before
        speeds = sorted(self.tokens.values())
        return found | {
            "rollout/tokens_per_s": sum(speeds) / max(ends[-1] - self.started, 1e-9),
            "rollout/tail_s": ends[-1] - ends[int(_TAIL * (len(ends) - 1))],
            "rollout/cached_fraction": self.cached / max(self.asked, 1),
            "rollout/preemptions": float(self.preemptions),
            "rollout/slowest_engine": speeds[0] / max(statistics.median(speeds), 1),
        }


def length_metrics(name: str, lengths: list[int]) -> dict[str, float]:
    """How long responses are, in tokens."""
    if not (ordered := sorted(lengths)):
        return {}
    mean, most = statistics.fmean(ordered), ordered[-1]
    tenth = ordered[int(_TAIL * (len(ordered) - 1))]
    return {f"rollout/{name}_length": mean, f"rollout/{name}_length_p90": tenth, f"rollout/{name}_length_max": most}


class Dispatcher:
    """Use it inside a running event loop; `close` ends what it started."""

    def __init__(self, scheduler: Scheduler, *, stall_s: float, needed_tokens: int) -> None:
        """An engine that owes answers is given up when it has made no progress for `stall_s` seconds.

        `needed_tokens` are those of the longest prompt and response, which every engine must hold.
        """
        self.scheduler, self.tally = scheduler, Tally()
        self.progress_at = time.monotonic()
        self.something_lost = asyncio.Event()
        self._idle = IdleTime()
        self._lost: list[Lost] = []
        self._stall_s, self._needed_tokens = stall_s, needed_tokens
        self._clients: dict[int, EngineClient] = {}
        self._watches: dict[int, asyncio.Task[None]] = {}
        self._chunks: dict[asyncio.Task[None], int] = {}  # and their engines
        self._proofs: set[asyncio.Task[None]] = set()
        self._given_up: set[EngineAddress] = set()
        self._held = self._pumping = False

    async def serve(self, clients: Mapping[int, EngineClient], *, resume: bool = True) -> None:
        """These engines, by number, hold one version of the weights and can be asked from now on.

        `resume` ends a `hold`. One that was given up is not taken back.
        """
        if not self._clients:
            self._idle.take(0)  # until now there was nobody to be idle
        for number, client in list(self._clients.items()):
            if clients.get(number) is not client:
                self.scheduler.lost(number, blame=False)
                self._forget(number)
        new = [(n, one) for n, one in clients.items() if n not in self._clients and one.address not in self._given_up]
        await asyncio.gather(*(self._join(number, client) for number, client in new))
        self._held = self._held and not resume
        self._pump()

    async def hold(self, numbers: Collection[int]) -> None:
        """These engines generate nothing until a `serve` that resumes: what they ran goes on elsewhere or, if all are
        held, waits there."""

        async def pause(number: int, client: EngineClient) -> None:
            try:
                await asyncio.wait_for(client.pause(), self._stall_s)
            except (EngineLost, TimeoutError) as error:
                self.lose(number, client, f"{client.name} could not be paused: {error!r}")

        held = {number: client for number, client in self._clients.items() if number in numbers}
        self._held = len(held) == len(self._clients)
        await asyncio.gather(*(pause(n, one) for n, one in held.items() if self.scheduler.engines[n].running))
        if not self._held:
            for number in held.keys() & self._clients.keys():
                self.scheduler.lost(number, blame=False)
                self._forget(number)
            self._pump()

    async def respond(
        self,
        input_ids: list[int],
        *,
        samples: int,
        temperature: float,
        max_new_tokens: int,
        stop_token: int,
        expected: int | None = None,
        begun: Mapping[int, Completion] = MappingProxyType({}),
        report: Callable[[int, int, Completion], None] = lambda *_: None,
    ) -> list[Completion]:
        """`samples` responses to one prompt; `expected` is their length, if one is.

        Samples that were `begun` before go on. `report` is given each chunk: its sample, its first token's place in the
        response, and its tokens. Raises PoisonedError, or EngineError: an engine refused.
        """
        responses = [
            Response(
                len(input_ids),
                max_new_tokens,
                input_ids=input_ids,
                temperature=temperature,
                stop_token=stop_token,
                report=functools.partial(report, sample),
            )
            for sample in range(samples)
        ]
        for sample, so_far in begun.items():
            response = responses[sample]
            response.so_far.extend(so_far)
            response.generated = len(response.so_far.output_ids)
            if response.ended:
                response.done.set_result(response.so_far)
        unfinished = [response for response in responses if not response.done.done()]
        group = self.scheduler.add(unfinished, expected=expected) if unfinished else None
        self._pump_soon()
        try:
            return list(await asyncio.gather(*(response.done for response in responses)))
        finally:
            for response in unfinished:
                response.done.cancel()  # of one that failed, the others are not wanted either
            if group is not None:
                self.scheduler.withdraw(group)

    def begin_step(self, *, going_on: bool) -> None:
        """Its time counts from now. What ended since the last step is its own only if that step was `going_on`."""
        lost, finished = self.tally.lost, self.tally.finished if going_on else []
        self.tally = Tally(lost=lost, finished=finished)

    def metrics(self) -> dict[str, float]:
        """What is logged of a step; engines' idle time is that since the last call."""
        found = self.tally.metrics() | {"rollout/idle": self._idle.take(len(self._clients))}
        if isinstance(self.scheduler, Context) and (value := self.scheduler.correlation.value) is not None:
            found["rollout/length_correlation"] = value
        return found

    def lengths(self) -> list[int]:
        """Tokens of all responses that were finished since the last step."""
        return [length for _, length in self.tally.finished]

    def take_lost(self) -> list[Lost]:
        """Engines that were given up since the last call."""
        lost, self._lost = self._lost, []
        self.something_lost.clear()
        return lost

    @property
    def owing(self) -> list[str]:
        """Engines that have not answered everything."""
        return [f"{client.name} ({client.owed} requests)" for client in self._clients.values() if client.owed]

    async def close(self) -> None:
        tasks = [*self._watches.values(), *self._chunks, *self._proofs]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _pump_soon(self) -> None:
        """After all that is added now: a policy cannot choose among groups that it does not know yet."""
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        while not self._held and (assignment := self.scheduler.next()) is not None:
            response = assignment.request
            assert isinstance(response, Response)
            task = asyncio.ensure_future(self._run(response, assignment.engine, assignment.tokens))
            self._chunks[task] = assignment.engine
            self._idle.begun(assignment.engine)
            task.add_done_callback(functools.partial(self._ended, response))

    def _ended(self, response: Response, task: asyncio.Task[None]) -> None:
        self._idle.ended(self._chunks.pop(task))
        error = None if task.cancelled() else task.exception()
        if error is not None and not response.done.done():
            response.done.set_exception(error)

    async def _run(self, response: Response, number: int, tokens: int) -> None:
        client = self._clients[number]
        asked = response.input_ids + response.so_far.output_ids
        try:
            chunk = await client.generate(
                asked, temperature=response.temperature, max_new_tokens=tokens, stop_token=response.stop_token
            )
        except EngineLost as error:
            self.lose(number, client, str(error))
            return
        except EngineError as error:
            if self._clients.get(number) is client:
                self.scheduler.finished(response, 0, done=True)
            if not response.done.done():
                response.done.set_exception(error)
            self._pump()
            return
        if self._clients.get(number) is not client:
            return  # it was given up, and the chunk runs elsewhere
        self.progress_at = time.monotonic()
        self.tally.add(number, chunk, len(asked))
        unwanted = response.done.done()
        if not unwanted:
            response.report(len(response.so_far.output_ids), chunk.completion)
        response.so_far.extend(chunk.completion)
        self.scheduler.finished(response, len(chunk.completion.output_ids), done=response.ended or unwanted)
        if response.ended and not unwanted:
            self.tally.finished.append((self.progress_at, len(response.so_far.output_ids)))
            response.done.set_result(response.so_far)
        self._pump()

    async def _join(self, number: int, client: EngineClient) -> None:
        try:
            load = await client.load(timeout_s=self._stall_s)
        except EngineError as error:
            self._report(number, client, str(error))
            return
        if load.max_total_num_tokens < self._needed_tokens:
            raise EngineError(
                f"{client.name} has room for {load.max_total_num_tokens} tokens in its cache, but the longest prompt"
                f" and response have {self._needed_tokens}: lower rollout.max_new_tokens, or give engines more memory"
                " (rollout.server_args: mem_fraction_static, max_total_tokens)"
            )
        self._clients[number] = client
        print(f"{client.name} has room for {load.max_total_num_tokens} tokens and {load.max_running_requests} requests")
        self.progress_at = time.monotonic()  # until now all may have been on their way
        self.scheduler.join(number, kv_tokens=load.max_total_num_tokens, max_running=load.max_running_requests)
        self._watches[number] = asyncio.create_task(self._watch(number, client))

    async def _watch(self, number: int, client: EngineClient) -> None:
        """Give the engine up when it owes answers and nothing that it says of itself changes any more."""
        period = self._stall_s / _LOOKS_PER_STALL
        seen: Load | None = None
        since = time.monotonic()
        while True:
            await asyncio.sleep(period)
            try:
                looks: Load | None = await client.load(timeout_s=period)
            except EngineError:
                looks = seen
            now = time.monotonic()
            if looks != seen or self._held or not client.owed:
                seen, since = looks, now
                if client.owed and not self._held:
                    self.progress_at = now
            elif now - since > self._stall_s:
                self.lose(number, client, f"{client.name} made no progress for {self._stall_s:.0f} s")
                return

    def lose(self, number: int, client: EngineClient, cause: str) -> None:
        """The engine is not asked any more; what it ran runs elsewhere."""
        if self._clients.get(number) is not client:
            return
        print(f"{client.name} is given up: {cause}")
        poisoned = self.scheduler.lost(number)
        self._forget(number)
        self.tally.lost += 1
        for request in poisoned:
            assert isinstance(request, Response)
            tokens = request.input_ids + request.so_far.output_ids
            text = f"a request of {len(tokens)} tokens was with two engines when they failed, the last time: {cause}"
            if not request.done.done():
                request.done.set_exception(PoisonedError(text, tokens))
        self._report(number, client, cause)
        for other, one in self._clients.items():
            task = asyncio.ensure_future(self._prove(other, one))
            self._proofs.add(task)
            task.add_done_callback(self._proofs.discard)
        self._pump()

    async def _prove(self, number: int, client: EngineClient) -> None:
        """Engines often die together: only one that still answers may try what another one died of."""
        since = time.monotonic()
        while self._clients.get(number) is client:
            try:
                await client.check_health(timeout_s=self._stall_s)
            except EngineLost as error:
                self.lose(number, client, str(error))
            except EngineError as error:
                if self._held:  # a paused one looks at nothing
                    since = time.monotonic()
                elif time.monotonic() - since > self._stall_s:
                    self.lose(number, client, str(error))
                await asyncio.sleep(self._stall_s / _LOOKS_PER_STALL)
            else:
                if self._clients.get(number) is client:
                    self.scheduler.alive(number)
                    self._pump()
                return

    def _forget(self, number: int) -> None:
        del self._clients[number]
        asking = [task for task, engine in self._chunks.items() if engine == number]
        for task in [self._watches.pop(number), *asking]:
            if task is not asyncio.current_task():
                task.cancel()

    def _report(self, number: int, client: EngineClient, cause: str) -> None:
        self._given_up.add(client.address)
        self._lost.append(Lost(number, client.address, cause))
        self.something_lost.set()

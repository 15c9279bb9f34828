"""Whole responses, handed out as soon as they come; an engine queues and preempts by itself what it cannot hold."""

from __future__ import annotations

from collections import deque

from megarl.rollout_engine.scheduler.base import Assignment, Engine, Request, Scheduler


class LeastLoaded(Scheduler):
    """Each request goes to the engine that has the fewest: what a router in front of engines does."""

    def __init__(self, *, patience: int = 1 << 62) -> None:
        super().__init__(patience=patience)
        self._queue: deque[Request] = deque()

    def _next(self) -> Assignment | None:
        queue = self._queue
        while queue and not queue[0].stamp:
            queue.popleft()
        engine = self._choose(queue[0]) if queue else None
        if engine is None:
            return None
        request = queue.popleft()
        return self._start(request, engine, request.limit - request.generated)

    def _enqueue(self, request: Request) -> None:
        request.stamp = 1
        self._queue.append(request)

    def _load(self, engine: Engine) -> int:
        return len(engine.running)

    def _choose(self, request: Request) -> Engine | None:
        return self._least_loaded()


class GroupRoundRobin(LeastLoaded):
    """All samples of a prompt go to one engine, prompts to engines in turn: what synchronous trainers do."""

    def __init__(self, *, patience: int = 1 << 62) -> None:
        super().__init__(patience=patience)
        self._turns: deque[int] = deque()

    def join(self, number: int, *, kv_tokens: int, max_running: int) -> None:
        super().join(number, kv_tokens=kv_tokens, max_running=max_running)
        if number not in self._turns:
            self._turns.append(number)

    def _choose(self, request: Request) -> Engine | None:
        home = request.group.home
        if not self.engines:
            return None
        if home is None or self.engines.get(home.number) is not home:
            while self._turns[0] not in self.engines:
                self._turns.popleft()
            home = self.engines[self._turns[0]]
            self._turns.rotate(-1)
        return home

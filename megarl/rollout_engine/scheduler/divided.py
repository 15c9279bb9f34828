"""Responses divided into chunks: an engine is given no more than its cache holds, and a chunk's end is a new choice."""

from __future__ import annotations

import heapq
import math
from collections import deque

from megarl.rollout_engine.scheduler.base import Assignment, Engine, Request, Scheduler

_CHUNK = 1.0
_HEADROOM = 0.1  # of a cache, kept for those that run there: one that has to wait half-way loses its place in it
_IMBALANCE = 8  # one part in so many of a cache may be less free where a request's prefix is cached
_LEAST = 4
_FIRST = 16
_SLACK = 0


class Divided(Scheduler):
    def __init__(self, *, chunk_tokens: int | None = None, patience: int = 1 << 62) -> None:
        """`chunk_tokens` are the new tokens of a chunk while others wait; None: more, the longer a response is."""
        super().__init__(patience=patience)
        self._chunk_tokens = chunk_tokens
        self._ended: deque[Request] = deque()
        self._queue: list[tuple[int, int, Request]] = []  # a heap of (key, stamp, request), some no longer valid
        self._stamp = 0

    def _next(self) -> Assignment | None:
        ended = self._ended
        while ended:
            request = ended.popleft()
            if request.stamp and (assignment := self._go_on(request)):
                return assignment
            if request.stamp:
                self._put_aside(request)
        request = self._starving() or self._first()
        if request is None:
            return None
        best = self._least_loaded()
        if best is None:
            return None
        tokens = min(self._chunk(best), request.limit - request.generated)
        slack = best.kv_tokens // _IMBALANCE
        if not request.generated:
            tokens = max(tokens, request.limit // _FIRST)
            slack = _SLACK * request.prompt
        home = request.engine or request.group.home
        if home is not None and home is not best and self.engines.get(home.number) is home:
            cached = request.prompt + (request.generated if home is request.engine else 0)
            if self._admits(home, request, tokens) and home.used - best.used <= cached + slack:
                best = home
        if not self._admits(best, request, tokens):
            return None
        return self._start(request, best, tokens)

    def _admits(self, engine: Engine, request: Request, tokens: int) -> bool:
        headroom = _HEADROOM * engine.kv_tokens if engine.running else 0
        return engine.room(request) >= tokens + headroom

    def _first(self) -> Request | None:
        queue = self._queue
        while queue and queue[0][1] != queue[0][2].stamp:
            heapq.heappop(queue)
        return queue[0][2] if queue else None

    def _chunk(self, engine: Engine) -> int:
        return self._chunk_tokens or int(_CHUNK * math.sqrt(engine.kv_tokens))

    def _go_on(self, request: Request) -> Assignment | None:
        engine = request.engine
        if engine is None or self.engines.get(engine.number) is not engine:
            return None
        tokens = min(self._chunk(engine), request.limit - request.generated)
        if self.waiting == len(self._ended) + 1:
            best = self._least_loaded()
            if best is not None and best is not engine and best.room(request) >= tokens:
                if engine.used - best.used > request.tokens + engine.kv_tokens // _IMBALANCE:
                    return self._start(request, best, tokens)
        room = engine.room(request)
        if room < tokens // _LEAST:
            return None
        return self._start(request, engine, max(min(tokens, room), 1))

    def _load(self, engine: Engine) -> int:
        return engine.used if len(engine.running) < engine.max_running else engine.kv_tokens

    def _enqueue(self, request: Request) -> None:
        self._stamp += 1
        request.stamp = self._stamp
        if request.engine is not None:
            self._ended.append(request)
        else:
            heapq.heappush(self._queue, (self._key(request), self._stamp, request))

    def _put_aside(self, request: Request) -> None:
        heapq.heappush(self._queue, (self._key(request), request.stamp, request))

    def _key(self, request: Request) -> int:
        """The least is next."""
        return 0 if request.generated else request.group.number + 1

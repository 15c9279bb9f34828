"""Responses divided into chunks: an engine is given no more than its cache holds, and a chunk's end is a new choice."""

from __future__ import annotations

import heapq

from megarl.rollout_engine.scheduler.base import Assignment, Engine, Request, Scheduler

_LEAST_CHUNK = 64
_MOST_CHUNK = 4096
_CHUNKS_PER_CACHE = 64
_IMBALANCE = 8  # one part in so many of a cache may be less free where a request's prefix is cached


class Divided(Scheduler):
    """What has begun goes on, the oldest first; then what came first.

    A chunk starts where the cache has room for the prompt, what has been generated, and the chunk, so that an engine
    never has to preempt. It prefers the engine whose cache has its prefix, unless another is much emptier.
    """

    def __init__(self, *, chunk_tokens: int | None = None, patience: int = 1 << 62) -> None:
        """`chunk_tokens` are the new tokens of a chunk while others wait; None: a share of the engines' caches."""
        super().__init__(patience=patience)
        self._given_chunk = chunk_tokens
        self.chunk_tokens = chunk_tokens or _LEAST_CHUNK
        self._queue: list[tuple[int, int, Request]] = []  # a heap of (key, stamp, request), some no longer valid
        self._stamp = 0

    def join(self, number: int, *, kv_tokens: int, max_running: int) -> None:
        super().join(number, kv_tokens=kv_tokens, max_running=max_running)
        least = min(engine.kv_tokens for engine in self.engines.values())
        if self._given_chunk is None:
            self.chunk_tokens = min(max(least // _CHUNKS_PER_CACHE, _LEAST_CHUNK), _MOST_CHUNK)

    def _next(self) -> Assignment | None:
        queue = self._queue
        while queue and queue[0][1] != queue[0][2].stamp:
            heapq.heappop(queue)
        if not queue:
            return None
        request = self._starving() or queue[0][2]
        held = request.prompt + request.generated
        remaining = request.limit - request.generated
        engine = self._place(request, held, held + min(_LEAST_CHUNK, remaining))
        if engine is None:
            return None
        room = engine.kv_tokens - engine.used - held
        tokens = self.chunk_tokens
        if self.waiting == 1:  # nothing to choose from at the end of a chunk; but others need room to go on
            tokens = max(tokens, room // 2)
        return self._start(request, engine, min(tokens, room, remaining))

    def _place(self, request: Request, held: int, need: int) -> Engine | None:
        """The engine for a request that holds so many tokens, and needs room for so many."""
        best = self._least_loaded()
        if best is None or best.free < need:
            return None
        home = request.engine or request.group.home
        if home is None or home is best or self.engines.get(home.number) is not home:
            return best
        cached = held if home is request.engine else request.prompt
        room = home.free
        return home if room >= need and best.free - room <= cached + home.kv_tokens // _IMBALANCE else best

    def _load(self, engine: Engine) -> int:
        return -engine.free

    def _enqueue(self, request: Request) -> None:
        self._stamp += 1
        request.stamp = self._stamp
        heapq.heappush(self._queue, (self._key(request), self._stamp, request))

    def _key(self, request: Request) -> int:
        """The least is next."""
        return request.group.number if request.generated else request.group.number + _NEW


_NEW = 1 << 40

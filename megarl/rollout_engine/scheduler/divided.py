"""Responses divided into chunks: an engine is given no more than its cache holds, and a chunk's end is a new choice."""

from __future__ import annotations

import heapq

from megarl.rollout_engine.scheduler.base import Assignment, Engine, Request, Scheduler

_LEAST_CHUNK, _MOST_CHUNK = 256, 4096
_PART = 2  # a chunk is one part in so many of what has been generated, so that little is reserved in vain
_HEADROOM = 0.1  # of a cache, kept for those that run there: one that has to wait half-way loses its place in it
_IMBALANCE = 8  # one part in so many of a cache may be less free where a request's prefix is cached
_NEW = 1 << 40


class Divided(Scheduler):
    """What has begun goes on, the oldest first; then what came first.

    A chunk starts where the cache has room for the prompt, what has been generated, and the chunk, so that an engine
    never has to preempt. It prefers the engine whose cache has its prefix, unless another is much emptier.
    """

    def __init__(self, *, chunk_tokens: int | None = None, patience: int = 1 << 62) -> None:
        """`chunk_tokens` are the new tokens of a chunk while others wait; None: more, the longer a response is."""
        super().__init__(patience=patience)
        self._chunk_tokens = chunk_tokens
        self._queue: list[tuple[int, int, Request]] = []  # a heap of (key, stamp, request), some no longer valid
        self._stamp = 0

    def _next(self) -> Assignment | None:
        queue = self._queue
        while queue and queue[0][1] != queue[0][2].stamp:
            heapq.heappop(queue)
        if not queue:
            return None
        request = self._starving() or queue[0][2]
        held = request.prompt + request.generated
        remaining = request.limit - request.generated
        tokens = self._chunk_tokens or min(max(request.generated // _PART, _LEAST_CHUNK), _MOST_CHUNK)
        tokens = min(tokens, remaining)
        engine = self._place(request, held, held + tokens)
        if engine is None:
            return None
        if self.waiting == 1:  # nothing to choose from at the end of a chunk; but others need room to go on
            tokens = min(max(tokens, (engine.kv_tokens - engine.used - held) // 2), remaining)
        return self._start(request, engine, tokens)

    def _place(self, request: Request, held: int, need: int) -> Engine | None:
        """The engine for a request that holds so many tokens, and needs room for so many."""
        best = self._least_loaded()
        if best is None:
            return None
        home = request.engine or request.group.home
        if home is not None and home is not best and self.engines.get(home.number) is home:
            cached = held if home is request.engine else request.prompt
            if home.free >= need and home.used - best.used <= cached + home.kv_tokens // _IMBALANCE:
                best = home
        stays = best is request.engine and request.generated
        headroom = 0 if stays or not best.running else int(_HEADROOM * best.kv_tokens)
        return best if best.free >= need + headroom else None

    def _load(self, engine: Engine) -> int:
        return engine.used if len(engine.running) < engine.max_running else engine.kv_tokens

    def _enqueue(self, request: Request) -> None:
        self._stamp += 1
        request.stamp = self._stamp
        heapq.heappush(self._queue, (self._key(request), self._stamp, request))

    def _key(self, request: Request) -> int:
        """The least is next."""
        return request.group.number if request.generated else request.group.number + _NEW

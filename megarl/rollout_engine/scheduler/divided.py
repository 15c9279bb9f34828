"""Responses divided into chunks: an engine is given no more than its cache holds, and a chunk's end is a new choice."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable

from megarl.rollout_engine.scheduler.base import Assignment, Engine, Request, Scheduler

_CHUNK = 0.8
"""Tokens of a chunk, times the root of those of the cache. Its end costs about one step without the request, and half
of its tokens are reserved in vain; the sum is least near here, and flat."""
_LEAST_PART = 4
"""A chunk may be cut short for want of room, to one part in so many: one that is hardly any is not worth its end."""
_HEADROOM = 0.1
"""The part of a cache that is kept for those that run there to grow."""
_BALANCED = 0.85
"""An engine that has this much of another's load is as loaded."""
_MOVE_PAYS = 700
"""A move costs a prefill, for which all others on the new engine wait, and makes each later step on the old one a bit
shorter. On engines of all kinds it pays after about one step for so many tokens of the cache."""
_PROMPTS_TOGETHER = 4
"""A group stays together on one engine until that has more load than others by so many of its prompts: it saves room
to hold a prompt once, but groups of long responses should spread."""


class Divided(Scheduler):
    """What has begun goes on where it is, as long as there is room; then the first in a queue, where most room is.

    An engine is given what its cache is sure to hold: prompts, what has been generated, and the chunks. So it never has
    to preempt. A request that finds no room at the end of a chunk queues, and loses its place in the cache.
    """

    def __init__(self, *, chunk_tokens: int | None = None, patience: int = 1 << 62) -> None:
        """`chunk_tokens` are the most new tokens of a chunk; None: as an engine's cache suggests."""
        super().__init__(patience=patience)
        self._chunk_tokens = chunk_tokens
        self._ended: deque[Request] = deque()  # their chunks have just come back
        self._queue: list[tuple[int, int, Request]] = []  # a heap of (key, stamp, request), some no longer valid
        self._stamp = 0

    def _next(self) -> Assignment | None:
        ended = self._ended
        while ended:
            request = ended.popleft()
            if not request.stamp:
                continue
            if assignment := self._go_on(request):
                return assignment
            self._push(request)
        queue = self._queue
        while queue and queue[0][1] != queue[0][2].stamp:
            heapq.heappop(queue)
        return self._begin(self._starving() or queue[0][2]) if queue else None

    def _go_on(self, request: Request) -> Assignment | None:
        engine = request.engine
        if engine is None or self.engines.get(engine.number) is not engine or len(engine.running) >= engine.max_running:
            return None
        tokens = self._tokens(request, engine)
        if self.waiting == len(self._ended) + 1:  # none queues, so that room elsewhere is nobody's
            better = self._better(request, engine, tokens)
            if better is not None:
                return self._start(request, better, tokens)
        room = engine.room(request)
        return self._start(request, engine, min(tokens, room)) if room >= max(tokens // _LEAST_PART, 1) else None

    def _better(self, request: Request, engine: Engine, tokens: int) -> Engine | None:
        """An engine that it is worth to move to: what is left is taken to be as long as what has been generated."""
        left = min(request.generated, request.limit - request.generated)
        if left * _MOVE_PAYS < engine.kv_tokens:
            return None
        other = self._least_loaded()
        if other is None or other.used + request.tokens > _BALANCED * engine.used or other.room(request) < tokens:
            return None
        return other

    def _begin(self, request: Request) -> Assignment | None:
        """Starts one from the queue."""
        engine = self._least_loaded()
        if engine is None:
            return None
        tokens = self._tokens(request, engine)
        home = request.engine or request.group.home
        if home is not None and home is not engine and self.engines.get(home.number) is home:
            saved = request.tokens if home is request.engine else _PROMPTS_TOGETHER * request.prompt
            if home.used - engine.used <= saved and self._admits(home, request, tokens):
                engine = home
        return self._start(request, engine, tokens) if self._admits(engine, request, tokens) else None

    def _tokens(self, request: Request, engine: Engine) -> int:
        """New tokens of its next chunk."""
        left = request.limit - request.generated
        if self._chunk_tokens is not None:
            return min(self._chunk_tokens, left)
        return min(math.ceil(_CHUNK * math.sqrt(engine.kv_tokens)), left)

    def _admits(self, engine: Engine, request: Request, tokens: int) -> bool:
        headroom = _HEADROOM * engine.kv_tokens if engine.running else 0
        return engine.room(request) >= tokens + headroom

    def _load(self, engine: Engine) -> int:
        return engine.used if len(engine.running) < engine.max_running else engine.kv_tokens

    def _enqueue(self, request: Request) -> None:
        self._stamp += 1
        request.stamp = self._stamp
        if request.engine is None:
            self._push(request)
        else:
            self._ended.append(request)

    def _push(self, request: Request) -> None:
        heapq.heappush(self._queue, (self._key(request), request.stamp, request))

    def _reorder(self, requests: Iterable[Request]) -> None:
        """Their keys have changed."""
        for request in requests:
            self._stamp += 1
            request.stamp = self._stamp
            self._push(request)

    def _key(self, request: Request) -> int:
        """The least is next, the first come among equals: what has begun, then the oldest group."""
        return 0 if request.generated else request.group.number + 1

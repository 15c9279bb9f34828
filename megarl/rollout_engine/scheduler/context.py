"""Chunks in the order of the lengths that are expected: from a group's other members, or from knowing them."""

from __future__ import annotations

from megarl.rollout_engine.scheduler.base import Group, Request
from megarl.rollout_engine.scheduler.divided import Divided
from megarl.rollout_engine.scheduler.lengths import Correlation, Moments

_PROBES = -(1 << 60)
_TRUSTED, _DOUBTED = 0.3, 0.2


class Context(Divided):
    """After Seer (arXiv 2511.14617): a group's first request is a probe; probes go first, the shortest so far in front.

    The rest is served by the length that is expected: of a group, the longest that has finished, or the limit until one
    has. Where lengths within groups turn out not to go together, it serves as `Divided` does.
    """

    def __init__(self, *, chunk_tokens: int | None = None, patience: int = 1 << 62) -> None:
        super().__init__(chunk_tokens=chunk_tokens, patience=patience)
        self.correlation = Correlation()
        self.trusts_groups = True

    def finished(self, request: Request, tokens: int, *, done: bool) -> None:
        group, length = request.group, request.generated + tokens
        super().finished(request, tokens, done=done)
        if done:
            self._learn(group, length)

    def _learn(self, group: Group, length: int) -> None:
        old = group.known
        new = group.known = (old or Moments()).with_length(length)
        self.correlation.replace(old, new)
        group.estimate = length if old is None else max(group.estimate, length)
        value = self.correlation.value
        trusts = value is None or value > (_DOUBTED if self.trusts_groups else _TRUSTED)
        for request in group.requests:
            request.probe = False
        if trusts != self.trusts_groups:
            self.trusts_groups = trusts
            self._reorder([request for _, stamp, request in self._queue if stamp == request.stamp])
        else:
            self._reorder(request for request in group.requests if request.stamp > 0)

    def _key(self, request: Request) -> int:
        if not self.trusts_groups:
            return super()._key(request)
        if request.probe:
            return _PROBES + request.generated
        # what has begun holds cache: others must be expected to be longer by as much to pass it
        return -max(request.group.estimate, request.generated) - request.generated


class Oracle(Divided):
    """The longest first, whose lengths are known: what `Context` could reach. For simulations."""

    def _key(self, request: Request) -> int:
        assert request.length is not None, "an oracle has to be told"
        return -request.length - request.generated

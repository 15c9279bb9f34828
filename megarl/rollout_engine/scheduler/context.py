"""Chunks in the order of the lengths that are expected: from a group's other members, or from knowing them."""

from __future__ import annotations

import math

from megarl.rollout_engine.scheduler.base import Group, Request
from megarl.rollout_engine.scheduler.divided import Divided

_PROBES = -(1 << 60)
_TRUSTED, _DOUBTED = 0.3, 0.2
_GROUPS_TO_TELL = 8


class Correlation:
    """The intraclass correlation of logarithms of lengths, from groups of which at least two are known.

    One-way random effects (Shrout & Fleiss 1979, ICC(1,1)), for groups of different sizes by their mean size n0.
    """

    def __init__(self) -> None:
        self.groups = self._members = 0
        self._within = self._sum = self._squares = self._sizes = 0.0

    def replace(self, old: tuple[int, float, float], new: tuple[int, float, float]) -> None:
        """A group's (count, mean, sum of squared deviations) have changed."""
        for (count, mean, deviations), sign in ((old, -1), (new, 1)):
            if count >= 2:
                self.groups += sign
                self._members += sign * count
                self._sizes += sign * count * count
                self._within += sign * deviations
                self._sum += sign * count * mean
                self._squares += sign * count * mean * mean

    @property
    def value(self) -> float:
        """Between 0 and 1; 1 while too few groups are known."""
        if self.groups < _GROUPS_TO_TELL:
            return 1.0
        members, groups = self._members, self.groups
        within = self._within / (members - groups)
        between = (self._squares - self._sum * self._sum / members) / (groups - 1)
        size = (members - self._sizes / members) / (groups - 1)
        total = between + (size - 1) * within
        return min(max((between - within) / total, 0.0), 1.0) if total > 0 else 1.0


class Context(Divided):
    """After Seer (arXiv 2511.14617): a group's first request is a probe; probes go first, the shortest so far in front.

    The rest is served by the length that is expected: of a group, the longest that has finished, or the limit until one
    has. Where lengths within groups turn out not to go together, it serves as `Divided` does.
    """

    def __init__(self, *, chunk_tokens: int | None = None, patience: int = 1 << 62) -> None:
        super().__init__(chunk_tokens=chunk_tokens, patience=patience)
        self.correlation = Correlation()
        self.trusts_groups = True
        self._known: dict[Group, tuple[int, float, float]] = {}

    def finished(self, request: Request, tokens: int, *, done: bool) -> None:
        group, length = request.group, request.generated + tokens
        super().finished(request, tokens, done=done)
        if done:
            self._learn(group, length)

    def _learn(self, group: Group, length: int) -> None:
        old = count, mean, deviations = self._known.get(group, (0, 0.0, 0.0))
        log = math.log(max(length, 1))
        step = log - mean
        mean += step / (count + 1)
        new = self._known[group] = (count + 1, mean, deviations + step * (log - mean))
        self.correlation.replace(old, new)
        group.estimate = length if not count else max(group.estimate, length)
        if not group.unfinished:
            del self._known[group]
        value = self.correlation.value
        trusts = value > (_DOUBTED if self.trusts_groups else _TRUSTED)
        if trusts != self.trusts_groups:
            self.trusts_groups = trusts
            again = [request for *_, request in self._queue]
        else:
            again = list(group.requests)
        for request in again:
            if request.stamp > 0:
                request.probe = False
                self._enqueue(request)

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

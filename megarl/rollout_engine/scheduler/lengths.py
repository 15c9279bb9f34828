"""How far lengths within groups go together."""

from __future__ import annotations

import math

_GROUPS_TO_TELL = 8


class Correlation:
    """The intraclass correlation of logarithms of lengths, from groups of which at least two are known.

    One-way random effects (Shrout & Fleiss 1979, ICC(1,1)); groups of different sizes count by their mean size.
    """

    def __init__(self) -> None:
        self._groups = self._members = 0
        self._within = self._sum = self._squares = self._sizes = 0.0

    def replace(self, old: Moments | None, new: Moments) -> None:
        """What is known of a group has changed."""
        for moments, sign in ((old, -1), (new, 1)):
            if moments is not None and moments.count >= 2:
                count = moments.count
                self._groups += sign
                self._members += sign * count
                self._sizes += sign * count * count
                self._within += sign * moments.deviations
                self._sum += sign * count * moments.mean
                self._squares += sign * count * moments.mean**2

    @property
    def value(self) -> float | None:
        """Between 0 and 1; None while too few groups are known."""
        if self._groups < _GROUPS_TO_TELL:
            return None
        within = self._within / (self._members - self._groups)
        between = (self._squares - self._sum**2 / self._members) / (self._groups - 1)
        size = (self._members - self._sizes / self._members) / (self._groups - 1)
        total = between + (size - 1) * within
        return min(max((between - within) / total, 0.0), 1.0) if total > 0 else 1.0


class Moments:
    """Of the logarithms of a group's lengths: count, mean, and sum of squared deviations (Welford 1962)."""

    __slots__ = ("count", "deviations", "mean")

    def __init__(self, count: int = 0, mean: float = 0.0, deviations: float = 0.0) -> None:
        self.count, self.mean, self.deviations = count, mean, deviations

    def with_length(self, length: int) -> Moments:
        log = math.log(max(length, 1))
        step, count = log - self.mean, self.count + 1
        mean = self.mean + step / count
        return Moments(count, mean, self.deviations + step * (log - mean))

"""How long engines have nothing to do."""

from __future__ import annotations

import time
from collections import defaultdict


class IdleTime:
    """The share of time in which engines have no request under way."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._busy_since: dict[int, float] = {}
        self._under_way: dict[int, int] = defaultdict(int)
        self._busy_s = 0.0

    def begun(self, engine: int) -> None:
        """It has one more request under way."""
        self._under_way[engine] += 1
        if self._under_way[engine] == 1:
            self._busy_since[engine] = time.monotonic()

    def ended(self, engine: int) -> None:
        """It has one less."""
        self._under_way[engine] -= 1
        if not self._under_way[engine]:
            self._busy_s += time.monotonic() - self._busy_since.pop(engine)

    def take(self, engines: int) -> float:
        """The share since the last call, 0 to 1, over this number of engines."""
        now = time.monotonic()
        busy_s = self._busy_s + sum(now - since for since in self._busy_since.values())
        self._busy_since = dict.fromkeys(self._busy_since, now)
        seconds = engines * (now - self._since)
        self._since, self._busy_s = now, 0.0
        return max(0.0, 1 - busy_s / seconds) if seconds else 0.0

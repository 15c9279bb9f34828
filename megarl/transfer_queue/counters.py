"""What the queue counts: for the step's metrics, and for Prometheus as a file of the run directory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, write_to_textfile

from megarl.types import Group, WeightVersion

METRICS_FILE = "metrics.prom"
_LAGS = (0, 1, 2, 4, 8, 16)


class Counters:
    """Told of every group and byte that goes in and out."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._put_at: dict[int, float] = {}
        self._bytes = 0
        self.step: dict[str, float] = {}
        """What is logged of the step that was taken last."""
        here = self._registry
        self._put = Counter("megarl_queue_groups_put", "groups that were put", registry=here)
        self._taken = Counter("megarl_queue_groups_taken", "groups that steps have taken", registry=here)
        self._sent = Counter("megarl_queue_sent_bytes", "bytes of fields that were sent to ranks", registry=here)
        self._depth = Gauge("megarl_queue_depth_groups", "groups there when the last step was taken", registry=here)
        self._age = Gauge(
            "megarl_queue_oldest_age_seconds", "how long the oldest of the last step's waited", registry=here
        )
        lag = "versions that the oldest token of a response lags behind the step that trains on it"
        self._lag = Histogram("megarl_queue_lag_versions", lag, buckets=_LAGS, registry=here)

    def put(self, row: int) -> None:
        """Count a group that is there from now on."""
        self._put_at[row] = time.monotonic()
        self._put.inc()

    def sent(self, nbytes: int) -> None:
        """Count what a rank was sent."""
        self._bytes += nbytes
        self._sent.inc(nbytes)

    def taken(self, step: WeightVersion, groups: Mapping[int, Group]) -> None:
        """Count what goes out for `step`, by row."""
        depth, now = len(self._put_at), time.monotonic()
        age = max(now - self._put_at.pop(row) for row in groups)
        self._taken.inc(len(groups))
        self._depth.set(depth)
        self._age.set(age)
        for trajectory in (trajectory for group in groups.values() for trajectory in group.trajectories):
            self._lag.observe(step - min(span.version for span in trajectory.versions))
        self.step = {"queue/depth": float(depth), "queue/age_s": age, "queue/mb": self._bytes / 1e6}
        self._bytes = 0

    def write(self, directory: Path) -> None:
        """Have all in `directory`'s METRICS_FILE, as Prometheus' textfile collector reads it; never half of it."""
        write_to_textfile(str(directory / METRICS_FILE), self._registry)

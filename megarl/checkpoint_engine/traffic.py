"""What a reshard plan costs each rank in bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megarl.checkpoint_engine.plan import Plan
from megarl.checkpoint_engine.sides import Ints


@dataclass(frozen=True, eq=False)
class Traffic:
    """(buckets, ranks): bytes that a rank sends to others, gets from others, and passes to its own GPU's engine."""

    sent: Ints
    received: Ints
    kept: Ints


def traffic(plan: Plan) -> Traffic:
    sums = [np.zeros((len(plan.buckets), plan.sides.ranks), dtype=np.int64) for _ in range(3)]
    sent, received, kept = sums
    for number, bucket in enumerate(plan.buckets):
        for index, k in bucket:
            cell = plan.cells[index]
            sources, targets, nbytes = cell.sources(k), cell.requests["target"], cell.request_bytes
            away = sources != targets
            np.add.at(sent[number], sources[away], nbytes[away])
            np.add.at(received[number], targets[away], nbytes[away])
            np.add.at(kept[number], targets[~away], nbytes[~away])
    return Traffic(*sums)

"""What a reshard plan costs each rank in bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megarl.checkpoint_engine.plan import Item, Plan
from megarl.checkpoint_engine.sides import Ints


@dataclass(frozen=True, eq=False)
class Traffic:
    """(buckets, ranks): bytes that a rank sends to others, gets from others, and passes to its own GPU's engine.

    Of what is sent, that which is `relayed` leaves a rank of an engine in the rounds, one after the other; the rest is
    the trainer's.
    """

    sent: Ints
    received: Ints
    kept: Ints
    relayed: Ints


def traffic(plan: Plan) -> Traffic:
    ranks = plan.sides.ranks
    flow = np.zeros((len(plan.buckets), 3 * ranks), dtype=np.int64)
    where: dict[tuple[int, int, int], list[tuple[int, Item]]] = {}
    for number, bucket in enumerate(plan.buckets):
        for item in bucket:
            where.setdefault((item.cell, item.row, item.rows), []).append((number, item))
    for (index, *_), items in where.items():
        cell = plan.cells[index]
        one = cell.flow(items[0][1], ranks)
        for number, item in items:
            np.add.at(flow[number], *(one if cell.steady else cell.flow(item, ranks)))
    sent, has, kept = flow.reshape(-1, 3, ranks).swapaxes(0, 1)
    relayed = np.zeros_like(sent)
    for giver, getter in (pair for one in plan.relays for pair in one):
        givers, getters = plan.engines.ranks[giver], plan.engines.ranks[getter]
        relayed[:, givers] += has[:, givers]
        has[:, getters] += has[:, givers]
    return Traffic(sent + relayed, has - kept, kept, relayed)

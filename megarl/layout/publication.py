"""Seconds in which new weights go from the ranks that train into the engines."""

from __future__ import annotations

from megarl.config import Layout, ModelShape
from megarl.layout.machine import Machine
from megarl.layout.serving import Serving

BUCKET_BYTES = 256 << 20


def least_s(shape: ModelShape, serving: Serving, weight_bytes: int, machine: Machine) -> float:
    """If each rank of an engine gets its shard over the network at once, and nobody sends more than it gets."""
    return shape.parameters * weight_bytes / serving.tensor / machine.network_bytes_s


def planned_s(
    shape: ModelShape,
    layout: Layout,
    serving: Serving,
    machine: Machine,
    *,
    train: int,
    first: int,
    node: int,
    weight_bytes: int,
) -> float:
    """By the reshard plan: the busiest rank sends or gets all that it has to. Ranks from `first` on have engines.

    What lies on one node goes over its links, all else over the network. Loads torch.
    """
    from megarl.checkpoint_engine import Engines, Training, make_plan, traffic

    starts = range(first, first + serving.count * serving.tensor, serving.tensor)
    engines = Engines(tuple(tuple(range(start, start + serving.tensor)) for start in starts), serving.expert)
    plan = make_plan(
        shape,
        Training(layout, train),
        engines,
        ranks_per_node=node,
        bucket_bytes=BUCKET_BYTES,
        item_bytes=weight_bytes,
    )
    flow = traffic(plan)
    speed = machine.link_bytes_s if starts.stop <= node else machine.network_bytes_s
    return float(max(flow.sent.sum(0).max(), flow.received.sum(0).max())) / speed

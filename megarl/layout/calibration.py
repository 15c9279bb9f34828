"""What a machine was measured to do, in place of a data sheet and fitted shares: the table that is measured once by
`tools/calibrate_machine.py`, and the `Machine` that it makes.

A table has measurements alone. Between measured sizes a `Measured` machine interpolates: products by the logarithm of
their speed, collectives by straight lines. Ranks of a CPU share its cores and its memory, so all is measured while
several ranks of a node do the same at once, and a machine is made for so many of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from megarl.layout.machine import Machine, Shares, distinct
from megarl.layout.training import Kernel, Precision
from megarl.simulator import Gpu

Dtype = Literal["fp32", "bf16"]
Kind = Literal["all_gather", "reduce_scatter", "all_to_all", "send"]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(gt=0)]
Points = Annotated[list[tuple[Positive, Positive]], msgspec.Meta(min_length=2)]
"""Bytes and seconds, by rising bytes."""

GENERATION = "measured"
KERNELS: tuple[Kernel, ...] = ("unfused", "fused_softmax", "flash1", "flash2", "cudnn")


class Products(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Matrix products of rows x inputs and inputs x outputs, for all combinations of these sizes.

    `seconds` of one, in the order of three nested loops: the mean of a linear layer's product in the forward pass and
    its two of the backward pass.
    """

    rows: list[Count]
    inputs: list[Count]
    outputs: list[Count]
    seconds: list[Positive]

    def __post_init__(self) -> None:
        for axis in self.axes:
            _check_rising(axis)
        wanted = math.prod(len(axis) for axis in self.axes)
        if len(self.seconds) != wanted:
            raise ValueError(f"{len(self.seconds)} seconds of {wanted} products")

    @property
    def axes(self) -> tuple[list[int], list[int], list[int]]:
        return self.rows, self.inputs, self.outputs

    def rates(self) -> np.ndarray:
        """FLOPs a second [rows, inputs, outputs]."""
        flops = 2.0 * np.multiply.outer(np.multiply.outer(self.rows, self.inputs), self.outputs)
        return flops / np.reshape(self.seconds, flops.shape)


class Load(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What each of so many `ranks` of a node does in a second while all of them do the same."""

    ranks: Count
    gemm: Annotated[dict[Dtype, Products], msgspec.Meta(min_length=1)]
    attention: dict[Dtype, Positive]
    """FLOPs a second of causal attention, of a backward pass that takes 2.5 / 0.8 times as many as the forward pass."""
    memory: Points
    """Bytes that an elementwise operation reads and writes, with a new tensor for its result. The first point is so
    small that its seconds are those of starting any operation."""

    def __post_init__(self) -> None:
        _check_rising([moved for moved, _ in self.memory])
        if missing := self.gemm.keys() - self.attention.keys():
            raise ValueError(f"no attention in {', '.join(sorted(missing))}")


class Exchange(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Collectives of groups of `ranks`, on so many `nodes`, while `busy` ranks of a node are in such groups at once.

    Bytes are those of the gathered or the not yet scattered tensor, or what each rank sends.
    """

    kind: Kind
    ranks: Annotated[int, msgspec.Meta(ge=2)]
    nodes: Count
    busy: Count
    points: Points

    def __post_init__(self) -> None:
        _check_rising([sent for sent, _ in self.points])

    @property
    def bytes_s(self) -> float:
        """Of long messages."""
        (sent, seconds), (more, longer) = self.points[-2:]
        return (more - sent) / max(longer - seconds, 1e-12)

    def seconds(self, sent: float, ranks: int) -> float:
        """For groups of another size, as a ring: more steps, and almost as many bytes for each rank."""
        latency = max(_along(self.points, 0.0), 0.0)
        steps = (ranks - 1) / (self.ranks - 1)
        more = 1.0 if self.kind == "send" else steps * self.ranks / ranks
        return latency * (1.0 if self.kind == "send" else steps) + more * (_along(self.points, sent) - latency)


class Table(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Measurements of one machine. `memory` is a GPU's, or all of a node; `engine` as `megarl.simulator` reads it."""

    name: str
    device: Literal["cpu", "cuda"]
    memory: Positive
    ranks_per_node: Count
    loads: Annotated[list[Load], msgspec.Meta(min_length=1)]
    exchanges: list[Exchange]
    engine: dict[str, Any] | None = None

    def machine(self, ranks: int, precision: Precision = "bf16") -> Measured:
        """For a job of `ranks` in all that computes attention in 32 bits or 16. Raises ValueError: not measured so."""
        near = min(ranks, self.ranks_per_node)
        load = min((one for one in self.loads if one.ranks >= near), key=lambda one: one.ranks, default=self.loads[-1])
        exchanges = tuple(one for one in self.exchanges if one.busy == load.ranks)
        if near > 1 and not any(one.nodes == 1 for one in exchanges):
            raise ValueError(f"the table of {self.name} has no collectives among {near} ranks: {AGAIN}")
        if ranks > self.ranks_per_node and not any(one.nodes > 1 for one in exchanges):
            raise ValueError(
                f"the table of {self.name} is of one node of {self.ranks_per_node} ranks, not of {ranks}: {AGAIN}"
            )
        dtype: Dtype = "fp32" if precision == "fp32" else "bf16"
        if dtype not in load.gemm:
            raise ValueError(f"the table of {self.name} has no products in {dtype}")
        gpu = self._gpu(load, dtype, exchanges, near)
        shares = self._shares(load, dtype, gpu.flops_16)
        alone = self.loads[0].gemm.get(dtype, load.gemm[dtype]).rates().max()
        bubble = min(1.0, float(load.gemm[dtype].rates().max() / alone))
        return Measured(gpu, GENERATION, shares, bubble, load=load, exchanges=exchanges)

    def _gpu(self, load: Load, dtype: Dtype, exchanges: Sequence[Exchange], near: int) -> Gpu:
        """What was reached, in place of a data sheet's peaks."""
        peak = float(load.gemm[dtype].rates().max())
        sends = [one for one in exchanges if one.kind == "send"]
        link = max((one.bytes_s for one in sends if one.nodes == 1), default=math.inf)  # alone: nobody to send to
        return Gpu(
            memory=self.memory if self.device == "cuda" else self.memory / near,
            bandwidth=max(moved / seconds for moved, seconds in load.memory),
            flops_16=peak,
            flops_8=peak,
            link=link,
            network=max((one.bytes_s for one in sends if one.nodes > 1), default=link),
            linked=self.ranks_per_node,
        )

    def _shares(self, load: Load, dtype: Dtype, peak: float) -> Shares:
        attention = dict.fromkeys(KERNELS, load.attention[dtype] / peak)
        whole = {GENERATION: 1.0}
        reached = Shares(gemm=whole, attention=attention, older_kernel=1.0, link=whole, network=1.0, memory=1.0)
        if self.device == "cuda":
            return reached
        # host and device are one: what an operation takes to start is all there is, and nothing runs beside it
        return replace(
            reached,
            kernel_s=load.memory[0][1],
            layer_s=0.0,
            expert_layer_s=0.0,
            routing_s=0.0,
            overlap=0.0,
            step_s=0.0,
        )


AGAIN = "run tools/calibrate_machine.py on as many ranks of a node, and for more than one node on two"


@dataclass(frozen=True, kw_only=True)
class Measured(Machine):
    """A machine whose products, memory and collectives are those of a table."""

    load: Load
    exchanges: tuple[Exchange, ...]

    def gemm_s(
        self, rows: float, inputs: float, outputs: float, precision: Precision = "bf16", count: float = 1
    ) -> float:
        return 2.0 * rows * inputs * outputs * count / self._rate((rows, inputs, outputs), precision)

    def flops(self, precision: Precision) -> float:
        return float(self._products(precision).rates().max())

    def memory_s(self, moved: float) -> float:
        """At the speed of an operation that moves so many bytes; what it takes to start is counted with kernels."""
        start, points = self.load.memory[0][1], self.load.memory[1:]
        log_rates = [math.log(size / max(seconds - start, 0.1 * seconds)) for size, seconds in points]
        log_sizes = [math.log(size) for size, _ in points]
        return moved / math.exp(np.interp(math.log(max(moved, 1.0)), log_sizes, log_rates))

    def collective_s(self, sent: float, ranks: int, stride: int) -> float:
        """The mean of an all-gather and a reduce-scatter."""
        if ranks == 1:
            return 0.0
        kinds: tuple[Kind, ...] = ("all_gather", "reduce_scatter")
        nodes, _ = self.spread(ranks, stride)
        return sum(self._seconds(kind, sent, ranks, nodes) for kind in kinds) / len(kinds)

    def exchange_s(self, sent: float, chosen: tuple[int, int], ranks: int, stride: int, once: bool) -> float:
        """Of all-to-alls, which have nobody on a node pass tokens on."""
        if ranks == 1:
            return 0.0
        copies = distinct(ranks, *chosen) if once else chosen[0]
        return self._seconds("all_to_all", sent * copies, ranks, self.spread(ranks, stride)[0])

    def send_s(self, sent: float, stride: int, ranks: int) -> float:
        away = self.away(stride, ranks)
        shares = {1: 1 - away, 2: away}
        return sum(share * self._seconds("send", sent, 2, nodes) for nodes, share in shares.items() if share)

    def _products(self, precision: Precision) -> Products:
        if precision not in self.load.gemm:
            raise ValueError(f"products in {precision} were not measured")
        return self.load.gemm[precision]

    def _rate(self, sizes: tuple[float, float, float], precision: Precision) -> float:
        """FLOPs a second; of sizes outside of the measured ones, that of the nearest."""
        products = self._products(precision)
        log_rates = np.log(products.rates())
        for axis, size in zip(products.axes, sizes, strict=True):
            place = np.interp(math.log(max(size, 1.0)), np.log(axis), np.arange(len(axis)))
            below = min(int(place), max(len(axis) - 2, 0))
            above = min(below + 1, len(axis) - 1)
            log_rates = log_rates[below] + (place - below) * (log_rates[above] - log_rates[below])
        return float(np.exp(log_rates))

    def _seconds(self, kind: Kind, sent: float, ranks: int, nodes: int) -> float:
        """From the measured groups nearest in size, on nodes as these are: one or several."""
        fitting = [one for one in self.exchanges if one.kind == kind and (one.nodes > 1) == (nodes > 1)]
        if not fitting:
            raise ValueError(f"no {kind} on {'several nodes' if nodes > 1 else 'one node'} was measured: {AGAIN}")
        closest = min(fitting, key=lambda one: (abs(math.log(one.ranks / ranks)), abs(math.log(one.nodes / nodes))))
        return closest.seconds(sent, ranks)


def read_table(file: Path) -> Table:
    """Raises ValueError: there is none, or it is none."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Table)
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}; tools/calibrate_machine.py writes such a table") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"{file}: no table of a machine: {error}") from None


def write_table(file: Path, table: Table) -> None:
    """The file appears whole."""
    aside = file.with_name(file.name + ".partial")
    aside.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
    aside.rename(file)


def _along(points: Sequence[tuple[float, float]], size: float) -> float:
    """Straight lines between the points, and on beyond the first and the last two, where they never fall."""
    sizes, seconds = zip(*points, strict=True)
    at = min(max(int(np.searchsorted(sizes, size)), 1), len(points) - 1)
    slope = (seconds[at] - seconds[at - 1]) / (sizes[at] - sizes[at - 1])
    if not sizes[0] <= size <= sizes[-1]:
        slope = max(slope, 0.0)
    return float(seconds[at - 1] + slope * (size - sizes[at - 1]))


def _check_rising(sizes: Sequence[float]) -> None:
    if not sizes or any(later <= one for one, later in itertools.pairwise(sizes)):
        raise ValueError(f"sizes rise, these do not: {', '.join(f'{size:g}' for size in sizes)}")

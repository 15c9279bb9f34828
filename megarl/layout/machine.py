"""What GPUs and networks do of what their data sheets promise: few numbers, the same for all models.

Peaks are `megarl.simulator.GPUS`; shares are fitted to published training runs by `tools/bench/layout_accuracy.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from megarl.layout.training import Kernel, Precision
from megarl.simulator import Gpu

_GEMM = {"A100": 0.78, "H100": 0.644, "B200": 0.6, "B300": 0.725}
_LINK = {"A100": 0.562, "H100": 0.66, "B200": 0.574, "B300": 0.577}
_LOW_PRECISION: dict[Precision, float] = {"fp32": 0.07, "bf16": 1.0, "fp8": 0.944, "mxfp8": 0.875, "fp4": 0.627}
_ATTENTION: dict[Kernel, float] = {"unfused": 0.374, "flash1": 0.355, "flash2": 0.46, "cudnn": 0.589}


GENERATIONS = {
    "A100": "A100",
    "A100-40GB": "A100",
    "H100": "H100",
    "H200": "H100",
    "H800": "H100",
    "H20": "H100",
    "B200": "B200",
    "GB200": "B200",
    "B300": "B300",
    "GB300": "B300",
}
"""GPUs of `megarl.simulator` for which there are shares."""


@dataclass(frozen=True)
class Shares:
    """What is reached of the peaks, and what each operation costs beyond it."""

    gemm: Mapping[str, float] = field(default_factory=lambda: dict(_GEMM))
    """16-bit matrix products that are not bound by memory, by GPU generation."""
    low_precision: Mapping[Precision, float] = field(default_factory=lambda: dict(_LOW_PRECISION))
    """Of `gemm`, on the peak of each precision; in 32 bits, on the 16-bit peak."""
    attention: Mapping[Kernel, float] = field(default_factory=lambda: dict(_ATTENTION))
    """Of the 16-bit peak, in the products of attention's forward pass; they are the same however a softmax is fused."""
    older_kernel: float = 0.57
    """Of that, where kernels that were written for the A100 run on a later GPU."""
    depth: float = 113.0
    """A matrix product takes as long to begin and to end as for so many more inputs."""
    tail: float = 1.23e6
    """A matrix product takes as long as for so many more results: the last round of tiles leaves a GPU half empty."""
    scan: float = 0.021
    """Of the 16-bit peak, in a Mamba-2 scan."""
    memory: float = 0.75
    link: Mapping[str, float] = field(default_factory=lambda: dict(_LINK))
    """In collectives within a node, by GPU generation."""
    exchange: float = 0.763
    """Of the link, when tokens are sent to experts."""
    network: float = 0.794
    collective_s: float = 3.6e-5
    """Of one collective beyond its bytes."""
    kernel_s: float = 9e-6
    """Of a kernel's start and end, in which the GPU does nothing else."""
    layer_s: float = 0.0003
    """The host's work for the forward pass of a layer; the backward pass takes as long. A guess, as is the next: what
    is published is bound by GPUs."""
    expert_layer_s: float = 0.0011
    """The same of a layer with experts."""
    routing_s: float = 0.0012
    """Of a forward pass through a layer with experts, whose host waits to know how many tokens each of them has."""
    overlap: float = 0.645
    """Of a collective that runs beside computation, what it does not add to it."""
    waiting: float = 1.71
    """How much longer a collective takes in programs that run nothing beside any: all wait for the slowest rank."""
    step_s: float = 0.067
    """Of a step: the optimizer's kernels, the gradient's norm, the data."""


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind on a network; `generation` is the one whose shares they reach."""

    gpu: Gpu
    generation: str = "H100"
    shares: Shares = field(default_factory=Shares)
    bubble: float = 1.0
    """Of a pipeline's bubble, what it costs: less where ranks share cores, which those that wait leave to others."""

    @property
    def link_bytes_s(self) -> float:
        """From one GPU to others of its node."""
        return self.gpu.link * self.shares.link[self.generation]

    @property
    def network_bytes_s(self) -> float:
        """From one GPU to other nodes."""
        return self.gpu.network * self.shares.network

    def gemm_s(
        self, rows: float, inputs: float, outputs: float, precision: Precision = "bf16", count: float = 1
    ) -> float:
        """Seconds of `count` products of rows x inputs and inputs x outputs."""
        low = {"fp32": 4.0, "bf16": 2.0}.get(precision, 1.0)
        flops = 2.0 * rows * inputs * outputs * count
        moved = count * (low * (rows * inputs + inputs * outputs) + 2.0 * rows * outputs)
        more = (1 + self.shares.depth / inputs) * (1 + self.shares.tail / (count * rows * outputs))
        return max(flops * more / self.flops(precision), self.memory_s(moved))

    def flops(self, precision: Precision) -> float:
        """FLOPs a second of a large product."""
        full = self.gpu.flops_16
        peak = {"fp32": full, "bf16": full, "fp4": self.gpu.flops_4 or self.gpu.flops_8}.get(
            precision, self.gpu.flops_8
        )
        return peak * self.shares.gemm[self.generation] * self.shares.low_precision[precision]

    def memory_s(self, moved: float) -> float:
        """Seconds to read or write so many bytes of memory."""
        return moved / (self.gpu.bandwidth * self.shares.memory)

    def collective_s(self, sent: float, ranks: int, stride: int) -> float:
        """Seconds of an all-gather or a reduce-scatter of `sent` bytes in all, among ranks so far apart, as a ring.

        A group that leaves its node is bound by the network, of which each GPU has its part; what its ranks on one
        node exchange goes over their link.
        """
        if ranks == 1:
            return 0.0
        far, near = self.spread(ranks, stride)
        link, network = self.link_bytes_s, self.network_bytes_s
        if far == 1:
            return sent * (ranks - 1) / ranks / link + self.shares.collective_s
        # rings through all NICs of the node's members: each carries 1 / near of the bytes
        seconds = sent * (far - 1) / far / near / network + sent * (near - 1) / near / link
        return seconds + self.shares.collective_s * (1 + far.bit_length())

    def exchange_s(self, sent: float, chosen: tuple[int, int], ranks: int, stride: int, once: bool) -> float:
        """Seconds to send tokens of `sent` bytes on each rank to the ranks of those experts that each has `chosen` at
        random, so many of so many.

        A token goes to each of its experts; `once` over the network once to each node that has any, and from there once
        to each rank.
        """
        if ranks == 1:
            return 0.0
        nodes, near = self.spread(ranks, stride)
        link, network = self.gpu.link * self.shares.exchange, self.network_bytes_s
        copies = distinct(ranks, *chosen) if once else chosen[0]
        away = (distinct(nodes, *chosen) if once else copies) * (nodes - 1) / nodes
        inside = copies * (1 if once else near / ranks) * (near - 1) / near
        return sent * max(away / network, inside / link) + self.shares.collective_s

    def send_s(self, sent: float, stride: int, ranks: int) -> float:
        """Seconds to send bytes to the rank `stride` further, of `ranks` in all: the mean of those that do."""
        away = self.away(stride, ranks)
        return sent * (away / self.network_bytes_s + (1 - away) / self.link_bytes_s) + self.shares.collective_s

    def shown_s(self, seconds: float, beside: float) -> float:
        """What collectives add to `beside` seconds of computation that they run beside."""
        return max((1 - self.shares.overlap) * seconds, seconds - self.shares.overlap * beside)

    def spread(self, ranks: int, stride: int) -> tuple[int, float]:
        """On how many nodes a group is whose ranks are so far apart, and how many of them are on each: as few nodes as
        hold it, and evenly, as jobs are placed that use 64 of a rack's 72 GPUs."""
        nodes = -(-ranks // max(1, self.gpu.linked // stride))
        return nodes, ranks / nodes

    def away(self, stride: int, ranks: int) -> float:
        """The share of so many ranks for which the rank `stride` further is on another node."""
        nodes, near = self.spread(ranks, 1)
        return min(1.0, stride / near) if nodes > 1 else 0.0


def distinct(places: int, chosen: int, count: int) -> float:
    """How many of so many places have any of those that are chosen of `count` experts, on average.

    Each place has as many experts. None of a place's is chosen if all are among the others.
    """
    others = count - count / places
    return places * (1 - math.prod(max(0.0, others - one) / (count - one) for one in range(chosen)))

"""How long a training step takes: the work of each pipeline stage, the pipeline's bubble, the update.

Sources: the pipeline's bubble and its interleaving from Narayanan et al. (arXiv 2104.04473, section 2.2). Times are
seconds; what the operations of a layer cost is in `operations.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.layout.machine import Machine
from megarl.layout.model import Layer, Mixture
from megarl.layout.operations import Cost, embedding_cost, layer_cost, output_cost, passes
from megarl.layout.parameters import held, stages
from megarl.layout.training import Training

UNFUSED_ADAM_BYTES = 64.0
"""For each parameter, more than fused: torch's eight operations read and write 80 bytes, and clipping 8."""


@dataclass(frozen=True)
class Step:
    """Seconds of one optimizer step, by phase; `work` is that of the slowest pipeline stage over all micro-batches."""

    work: Cost
    bubble: float
    pipeline: float
    """Sending activations and gradients between stages."""
    data: float
    """Gradients summed and weights gathered over data-parallel ranks, beyond what computation hides."""
    optimizer: float
    host: float = 0.0

    @property
    def seconds(self) -> float:
        return self.work.seconds + self.bubble + self.pipeline + self.data + self.optimizer + self.host


def step_time(training: Training, machine: Machine) -> Step:
    """Seconds of one step. Raises ValueError: the GPUs cannot be divided as the layout says."""
    layout, decoder, software = training.layout, training.decoder, training.software
    each = [layer_cost(training, machine, kind) for kind in decoder.kinds]
    parts = stages(decoder, layout.pipeline, layout.interleave, software.listed)
    works: list[tuple[Cost, float]] = []
    for stage in parts:
        work, host = Cost(), 0.0
        for count, cost, kind in zip(stage.layers, each, decoder.kinds, strict=True):
            work = work + cost * count
            host += count * max(0.0, _host_s(training, machine, kind) - cost.seconds)
        if stage.last:
            work = work + output_cost(training, machine)
        if stage.first:
            work = work + embedding_cost(training, machine)
        works.append((work, work.seconds + host))
    count = training.micro_batches
    slowest, longest = max(works, key=lambda pair: pair[1])
    bubble = machine.bubble * (sum(seconds for _, seconds in works) - longest) / layout.interleave
    rounds = 2 * layout.interleave * (count + (layout.pipeline - 1) / layout.interleave)
    return Step(
        slowest * count,
        bubble + (longest - slowest.seconds) * count,
        _hop(training, machine) * rounds,
        *_update(training, machine, longest),
        machine.shares.step_s,
    )


def forward_time(training: Training, machine: Machine) -> float:
    """Seconds of one forward pass over the step's sequences, which keeps nothing: for log-probabilities or values."""
    layout, decoder = training.layout, training.decoder
    each = [passes(training, machine, kind)[0].seconds for kind in decoder.kinds]
    seconds = []
    for stage in stages(decoder, layout.pipeline, layout.interleave, training.software.listed):
        work = sum(count * one for count, one in zip(stage.layers, each, strict=True))
        if stage.last:
            work += output_cost(training, machine).seconds / 3
        seconds.append(work)
    hop = _hop(training, machine) * (training.micro_batches + layout.pipeline - 1)
    return max(seconds) * (training.micro_batches - 1) + sum(seconds) + hop


def _host_s(training: Training, machine: Machine, layer: Layer) -> float:
    """Seconds in which the host launches the kernels of a layer's passes, if it must."""
    if training.software.graphs:
        return 0.0
    once = machine.shares.expert_layer_s if isinstance(layer.mlp, Mixture) else machine.shares.layer_s
    return once * (3 if training.layout.recompute == "full" else 2)


def _hop(training: Training, machine: Machine) -> float:
    """Seconds to send a micro-batch's hidden states to the next stage, beyond what computation hides.

    Each tensor-parallel rank sends its part; without sequence parallelism the receivers gather them (arXiv 2104.04473,
    section 4.1).
    """
    layout = training.layout
    if layout.pipeline == 1:
        return 0.0
    whole = training.element_bytes * training.tokens * training.decoder.hidden
    seconds = machine.send_s(whole / layout.tensor, training.gpus // layout.pipeline, training.gpus)
    if not training.sequence_parallel:
        seconds += machine.collective_s(whole, layout.tensor, 1)
    hidden = layout.interleave > 1 and training.software.pipeline_overlap
    return seconds * (1 - machine.shares.overlap if hidden else 1.0)


def _update(training: Training, machine: Machine, micro_batch_s: float) -> tuple[float, float]:
    """Data-parallel collectives that are not hidden, and the optimizer, of the rank with the most parameters."""
    layout, software = training.layout, training.software
    divided = stages(training.decoder, layout.pipeline, layout.interleave, software.listed)
    parts = [held(training.decoder, layout, stage) for stage in divided]
    most = max(parts, key=lambda part: part.total)
    copies = training.data * layout.context
    expert_copies = max(1, copies * layout.tensor // (layout.expert * layout.expert_tensor))
    if training.adapters and training.sharding != "full":
        return 0.0, 0.0
    # a pipeline keeps what it has gathered for all of its micro-batches
    times = 1 if layout.pipeline > 1 else training.micro_batches
    seconds = 0.0
    for count, ranks, stride in (
        (most.dense, copies, layout.tensor),
        (most.experts, expert_copies, layout.expert * layout.expert_tensor),
    ):
        scatter = machine.collective_s(float(software.gradient_bytes) * count, ranks, stride)
        gather = machine.collective_s(training.element_bytes * count, ranks, stride)
        if training.sharding == "full":
            seconds += times * (2 * gather + (0.0 if training.adapters else scatter))
        else:
            seconds += scatter + (gather if training.sharding == "optimizer" else scatter)
    if training.sharding == "full":
        seconds = max(0.0, seconds - micro_batch_s * training.micro_batches)
    elif software.data_overlap:
        seconds = machine.shown_s(seconds, micro_batch_s)
    if training.adapters:
        return seconds, 0.0
    shared = copies if training.sharding != "none" else 1
    own = most.dense / shared + most.experts / (expert_copies if training.sharding != "none" else 1)
    # reads the gradient, reads and writes master weights and both moments, writes the weights; the norm reads again
    moved = software.gradient_bytes * 2 + 24.0 + 2.0
    if not software.fused_adam:
        moved += UNFUSED_ADAM_BYTES
    return seconds, machine.memory_s(own * moved)

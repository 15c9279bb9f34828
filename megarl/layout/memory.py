"""Bytes that each rank of a pipeline stage needs: weights, gradients, optimizer, activations and what lies around them.

Activations are those that `megarl.layout.activations` counts, of all micro-batches under way. How many these are
follows from 1F1B and its interleaved form (arXiv 2104.04473, figure 4).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megarl.layout.activations import edge_bytes, hidden_bytes, layer_bytes
from megarl.layout.machine import Machine
from megarl.layout.model import Attention, Layer
from megarl.layout.parameters import Stage, held, stages
from megarl.layout.training import Training

NOMINAL = 1.06
"""GPUs have so much more memory than they are sold with: an 80 GB A100 has 79.2 GiB."""
LOGIT_CHUNK_BYTES = 4 * 2.0**28
"""Of a part of the logits, where they are computed so: 256 MiB, their gradient and what a cross entropy needs."""
FRAGMENTED = 0.06
"""Of activations, whose sizes differ: room between them that nothing fits into."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    """Kept for the backward passes of all micro-batches under way."""
    working: float
    """Of what comes and goes at the peak: one recomputed layer, logits, gathered tensors."""
    buffers: float
    """CUDA's context or a process of its own, NCCL, fragmentation."""
    others: float = 0.0
    """Models beside the trained one, such as a critic and a reference."""

    @property
    def total(self) -> float:
        return sum(getattr(self, one.name) for one in fields(self))


def memory(training: Training) -> list[Memory]:
    """Of one rank of each pipeline stage at its peak. Raises ValueError: the GPUs cannot be divided so."""
    layout = training.layout
    return [
        _stage(training, number, stage)
        for number, stage in enumerate(
            stages(training.decoder, layout.pipeline, layout.interleave, training.software.listed)
        )
    ]


def fits(training: Training, machine: Machine) -> bool:
    """Whether every rank's peak is within what its GPU has."""
    return max(one.total for one in memory(training)) <= NOMINAL * machine.gpu.memory


def _stage(training: Training, number: int, stage: Stage) -> Memory:
    layout, decoder, software = training.layout, training.decoder, training.software
    own = held(decoder, layout, stage)
    copies = training.data * layout.context
    expert_copies = max(1, copies * layout.tensor // (layout.expert * layout.expert_tensor))
    whole = float(own.total)
    share = own.dense / copies + own.experts / expert_copies
    stored = share if training.sharding == "full" else whole
    learned = 0.0 if training.adapters else 1.0
    kept = [layer_bytes(training, kind) for kind in decoder.kinds]
    parts = _under_way(training, number)
    chunks = parts / layout.interleave
    again = training.recomputed if layout.recompute == "full" else 0.0
    each = [again * hidden_bytes(training) + (1 - again) * one for one in kept]
    activations = chunks * sum(n * one for n, one in zip(stage.layers, each, strict=True))
    activations += edge_bytes(training, stage, parts)
    working = 2.0 * hidden_bytes(training) * 4
    working += max((_scores(training, kind) for kind in decoder.kinds), default=0.0)
    if again:
        working += max((one for one, n in zip(kept, stage.layers, strict=True) if n), default=0.0)
    if stage.last:
        working = max(working, _output_bytes(training) + 2 * hidden_bytes(training))
    if training.sharding == "full":  # two layers are gathered at a time, and one's gradient is whole
        largest = max(kind.parameters(layout.tensor) for kind in decoder.kinds)
        working += 2.0 * 2 * largest + 4.0 * largest
    groups = 1 + sum(size > 1 for size in (layout.tensor, layout.pipeline, layout.context, layout.expert, copies))
    weight_bytes = 4.0 if training.precision == "fp32" else 2.0
    # master weights in 32 bits, unless the weights are, and Adam's two moments
    state_bytes = software.partition_bytes - (4.0 if training.precision == "fp32" else 0.0)
    return Memory(
        weights=weight_bytes * stored,
        gradients=learned * software.gradient_bytes * stored,
        optimizer=learned * state_bytes * (whole if training.sharding == "none" else share),
        activations=activations,
        working=working,
        buffers=software.context_bytes
        + software.buffer_bytes
        + software.group_bytes * groups
        + FRAGMENTED * (activations + working),
    )


def _scores(training: Training, layer: Layer) -> float:
    """Bytes of the gradients of attention's scores, which come and go: in 32 bits where softmax is not fused."""
    width = {"unfused": 4.0, "fused_softmax": 2.0}.get(training.software.kernel, 0.0)
    if not isinstance(layer.mixer, Attention):
        return 0.0
    return width * training.tokens * training.sequence * layer.mixer.heads / training.layout.tensor


def _under_way(training: Training, number: int) -> float:
    """Parts of the stage's layers, 1 / interleave of them each, whose activations are kept at once."""
    layout = training.layout
    most = training.micro_batches * layout.interleave
    if layout.interleave == 1:
        return min(most, layout.pipeline - number)
    return min(most, 2 * (layout.pipeline - number - 1) + (layout.interleave - 1) * layout.pipeline + 1)


def _output_bytes(training: Training) -> float:
    """Of logits and their loss; in parts, they make the gradient of a whole matrix in 32 bits, and cast it."""
    decoder, software, tensor = training.decoder, training.software, training.layout.tensor
    outputs = 1.0 if decoder.head else decoder.padded_vocab(tensor)
    each, ranks = software.logit_bytes, tensor
    if software.gathered_logits:
        ranks = 1
        if tensor > 1:  # the rank's own and what it received lie beside them
            each += 2.0 / tensor + 2.0
    logits = each * training.tokens * outputs / ranks
    if decoder.head or not software.chunked_logits:
        return logits
    gradient = 4.0 if training.precision == "fp32" else 6.0
    return min(logits, LOGIT_CHUNK_BYTES) + gradient * outputs * decoder.hidden / tensor

"""Bytes that each rank of a pipeline stage needs: weights, gradients, optimizer, activations and what lies around them.

Activations after Korthikanti et al. (arXiv 2205.05198, sections 4 and 5), tensor by tensor for decoders of today: what
autograd keeps is the input of each linear layer, of each norm and of each activation, query, key and value, and what
attention's kernel needs for its backward pass. How many micro-batches are under way at once follows from 1F1B and its
interleaved form (arXiv 2104.04473, figure 4).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megarl.layout.machine import Machine
from megarl.layout.model import Attention, Layer, Mixture, Mlp, Scan
from megarl.layout.parameters import Stage, held, stages
from megarl.layout.training import LOW, Training

NOMINAL = 1.06
"""GPUs have so much more memory than they are sold with: an 80 GB A100 has 79.2 GiB."""
CONTEXT_BYTES = 1.5e9
"""CUDA's context and kernels, outside of the allocator."""
GROUP_BYTES = 0.25e9
"""Of NCCL's buffers, for each kind of group that a rank is in."""
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
    """CUDA's context, NCCL, fragmentation."""
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
        for number, stage in enumerate(stages(training.decoder, layout.pipeline, layout.interleave))
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
    chunks = _under_way(training, number) / layout.interleave
    again = training.recomputed if layout.recompute == "full" else 0.0
    each = [again * _hidden(training) + (1 - again) * one for one in kept]
    activations = chunks * sum(n * one for n, one in zip(stage.layers, each, strict=True))
    working = 2.0 * _hidden(training) * 4
    if again:
        working += max((one for one, n in zip(kept, stage.layers, strict=True) if n), default=0.0)
    if stage.first:
        activations += chunks * _hidden(training)
    if stage.last:
        outputs = 1.0 if decoder.head else decoder.padded_vocab(layout.tensor)
        outputs /= 1 if software.gathered_logits else layout.tensor
        logits = software.logit_bytes * training.tokens * outputs
        logits = min(logits, LOGIT_CHUNK_BYTES) if software.chunked_logits else logits
        working = max(working, logits + 2 * _hidden(training))
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
        buffers=CONTEXT_BYTES + software.buffer_bytes + GROUP_BYTES * groups + FRAGMENTED * (activations + working),
    )


def _under_way(training: Training, number: int) -> float:
    """Parts of the stage's layers, 1 / interleave of them each, whose activations are kept at once."""
    layout = training.layout
    most = training.micro_batches * layout.interleave
    if layout.interleave == 1:
        return min(most, layout.pipeline - number)
    return min(most, 2 * (layout.pipeline - number - 1) + (layout.interleave - 1) * layout.pipeline + 1)


def _hidden(training: Training) -> float:
    """Bytes of the hidden states of a micro-batch, as one rank keeps them."""
    shared = training.layout.tensor if training.sequence_parallel else 1
    width = 4.0 if training.precision == "fp32" else 2.0
    return width * training.tokens * training.decoder.hidden / shared


def layer_bytes(training: Training, layer: Layer) -> float:
    """What one layer keeps of a micro-batch without full recomputation."""
    software, hidden = training.software, _hidden(training)
    width = 4.0 if training.precision == "fp32" else 2.0
    scaled = training.tokens * width / training.layout.tensor
    low = 0.5 if training.precision in LOW else 1.0  # of a linear layer's input
    if training.light_recompute:
        low = 0.0
    # each norm keeps its input, and the linear layers behind it its output
    total = layer.norm_passes * hidden * (1.0 + low)
    if not software.fused_norm:  # 32-bit copies of its input, before and behind the division
        total += layer.norm_passes * hidden * 4.0
    if training.decoder.dropout:
        total += hidden
    if isinstance(layer.mixer, Attention):
        total += _attention_bytes(training, layer.mixer, scaled)
    elif isinstance(layer.mixer, Scan):
        total += scaled * (4 * layer.mixer.inner + 2 * layer.mixer.groups * layer.mixer.state)
    if isinstance(layer.mlp, Mixture):
        own = training.tokens / training.layout.tensor
        routed = own * layer.mlp.active
        entry = layer.mlp.expert.up.inputs
        total += width * routed * (entry * (low + 1.0) + _mlp_elements(training, layer.mlp.expert, low))
        total += 8.0 * own * layer.mlp.count
        if layer.mlp.shared is not None:
            total += scaled * _mlp_elements(training, layer.mlp.shared, low)
    elif layer.mlp is not None:
        total += scaled * _mlp_elements(training, layer.mlp, low)
    return total


def _mlp_elements(training: Training, mlp: Mlp, low: float) -> float:
    """For each token: the activation's input, and its output, which the second layer reads."""
    before = 2 * mlp.width if mlp.gated else mlp.width
    apart = mlp.width if mlp.gated and not training.software.fused_mlp else 0
    return before + apart + low * mlp.width


def _attention_bytes(training: Training, attention: Attention, scaled: float) -> float:
    kernel, layout = training.software.kernel, training.layout
    query, key = attention.heads * attention.key, attention.kv_heads * attention.key
    value, out = attention.kv_heads * attention.value, attention.heads * attention.value
    latent = len(attention.linears) > 2
    total = scaled * (out if latent and training.light_recompute else query + key + value + out)
    if latent:  # latent states, before and behind their norms
        total += 2 * scaled * layout.tensor * sum(one.inputs for one in attention.linears[1:-1])
    if attention.rotary and not training.software.fused_mlp:  # rotated copies
        total += scaled * (query + key)
    pairs = training.tokens * training.sequence * attention.heads / layout.tensor
    if kernel in ("unfused", "fused_softmax") and layout.recompute != "selective":
        once = 2.0 if kernel == "fused_softmax" else 6.0
        total += pairs * (once + (3.0 if training.decoder.dropout else 0.0))
    elif kernel not in ("unfused", "fused_softmax"):
        total += 4.0 * training.tokens * attention.heads / layout.tensor
    return total

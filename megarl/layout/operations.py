"""What a layer's operations cost one rank: matrix products, attention, passes over memory, exchanges between ranks.

Rooflines and collectives of a forward and a backward pass of one micro-batch. Sources: tensor and sequence parallelism
from Korthikanti et al. (arXiv 2205.05198), attention without stored scores from Dao (arXiv 2307.08691), whose backward
pass computes five products for the forward pass's two. Times are seconds. `step.py` makes a step of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.layout.machine import Machine
from megarl.layout.model import Attention, Layer, Linear, Mixture, Mlp, Scan
from megarl.layout.training import LOW, Training

UNALIGNED = 11.0
"""How much slower the products of unfused attention are with heads that are no multiple of 8 elements."""

BACKWARD = 0.8
"""Of the rate of attention's forward pass without stored scores, what its backward pass reaches."""


@dataclass(frozen=True)
class Cost:
    """Seconds of one rank, by what they go to."""

    gemm: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    """Norms, activations, casts: bound by memory."""
    tensor: float = 0.0
    """Tensor- and context-parallel collectives that nothing hides."""
    expert: float = 0.0
    """Exchange of tokens between expert-parallel ranks."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.gemm + other.gemm,
            self.attention + other.attention,
            self.memory + other.memory,
            self.tensor + other.tensor,
            self.expert + other.expert,
        )

    def __mul__(self, factor: float) -> Cost:
        return Cost(
            self.gemm * factor,
            self.attention * factor,
            self.memory * factor,
            self.tensor * factor,
            self.expert * factor,
        )

    @property
    def seconds(self) -> float:
        return self.gemm + self.attention + self.memory + self.tensor + self.expert


def layer_cost(training: Training, machine: Machine, layer: Layer) -> Cost:
    """Forward and backward pass of a micro-batch through one layer, and its recomputation."""
    forward, backward = passes(training, machine, layer)
    total = forward + backward + Cost(memory=_accumulation_s(training, machine, layer))
    if training.light_recompute:
        total = total + _norms(training, machine, layer)[0] + Cost(memory=_activation_s(training, machine, layer.mlp))
    if training.layout.recompute == "full":
        return total + forward * training.recomputed
    if training.layout.recompute == "selective" and training.software.kernel in ("unfused", "fused_softmax"):
        return total + Cost(attention=forward.attention)
    return total


def passes(training: Training, machine: Machine, layer: Layer) -> tuple[Cost, Cost]:
    """Forward and backward pass."""
    forward, backward = Cost(), Cost()
    for ahead, back in (
        _mixer(training, machine, layer),
        _mlp(training, machine, layer),
        _norms(training, machine, layer),
    ):
        forward, backward = forward + ahead, backward + back
    starts = Cost(
        memory=_kernels(training, layer) * machine.shares.kernel_s * (0.3 if training.software.graphs else 1.0)
    )
    return forward + starts, backward + starts * 2


def _accumulation_s(training: Training, machine: Machine, layer: Layer) -> float:
    """Seconds to write the gradients of a micro-batch, and to read and add them to those of earlier ones."""
    if training.software.fused_gradients or training.adapters or training.sharding == "full":
        return 0.0
    layout = training.layout
    count = layer.parameters(layout.tensor) + layer.expert_parameters(layout.expert, layout.expert_tensor)
    return machine.memory_s(2 * (training.element_bytes + training.software.gradient_bytes) * count)


def _kernels(training: Training, layer: Layer) -> int:
    """How many kernels a forward pass starts; a backward pass starts twice as many."""
    software = training.software
    count = 3 * layer.norm_passes if software.fused_norm else 9 * layer.norm_passes
    if layer.mixer is not None:
        count += len(layer.mixer.linears) + (4 if software.fused_mlp else 12)
        count += {"unfused": 6, "fused_softmax": 4}.get(software.kernel, 1)
    if isinstance(layer.mlp, Mixture):  # products, and casts of low precision, expert by expert
        count += 24 + layer.mlp.count // training.layout.expert * (6 if training.precision in LOW else 2)
    elif layer.mlp is not None:
        count += 3 if software.fused_mlp else 5
    if training.precision in LOW:
        count += 8
    return count


def _linears(training: Training, machine: Machine, linears: tuple[Linear, ...], tokens: float) -> tuple[Cost, Cost]:
    """Products of layers that all tokens pass: one forward, two backward, one without gradients of weights."""
    gemm = cast = 0.0
    low = training.precision in LOW
    for one in linears:
        inputs, outputs = one.sizes(training.layout.tensor)
        gemm += machine.gemm_s(tokens, inputs, outputs, training.precision)
        if low:  # read 16 bits, write 8 and their transposed copy
            cast += machine.memory_s(4.0 * tokens * inputs)
    back = 1.0 if training.adapters else 2.0
    return Cost(gemm=gemm, memory=cast), Cost(gemm=back * gemm, memory=cast)


def _exchange(training: Training, machine: Machine) -> tuple[Cost, Cost]:
    """Collectives around one tensor-parallel block: with sequence parallelism a gather before and a scatter after it.

    Without it, an all-reduce after it, of the same bytes. The backward pass gathers the block's input again.
    """
    tensor = training.layout.tensor
    one = machine.collective_s(training.element_bytes * training.tokens * training.decoder.hidden, tensor, 1)
    shown = 1 - machine.shares.overlap
    if training.software.tensor_overlap:
        return Cost(tensor=2 * one * shown), Cost(tensor=2 * one * shown)
    if not training.software.backward_overlap:
        one *= machine.shares.waiting
        return Cost(tensor=2 * one), Cost(tensor=2 * one)
    # all of the all-reduce is beside products, or the scatter but not the gather before it
    back = 1.0 + shown if training.sequence_parallel else 2 * shown
    if not training.software.asynchronous:
        back = 3.0
    return Cost(tensor=2 * one), Cost(tensor=back * one)


def _mixer(training: Training, machine: Machine, layer: Layer) -> tuple[Cost, Cost]:
    mixer = layer.mixer
    if mixer is None:
        return Cost(), Cost()
    ahead, back = _linears(training, machine, mixer.linears, training.tokens)
    core = _scan(training, machine, mixer) if isinstance(mixer, Scan) else _attention(training, machine, mixer)
    around = _exchange(training, machine)
    return ahead + core[0] + around[0], back + core[1] + around[1]


def _attention(training: Training, machine: Machine, attention: Attention) -> tuple[Cost, Cost]:
    """Scores, softmax and values, of a causal mask's half where the kernel leaves the rest out."""
    software, layout = training.software, training.layout
    heads = attention.heads / layout.tensor
    tokens, sequence = training.tokens, training.sequence
    seen = sequence if attention.window is None else min(sequence, 2 * attention.window)
    pairs = tokens * seen * heads
    products = "unfused" if software.kernel == "fused_softmax" else software.kernel
    peak = machine.gpu.flops_16 * machine.shares.attention[products]
    if software.kernel != "cudnn" and machine.generation != "A100":
        peak *= machine.shares.older_kernel
    rotated = tokens * heads * attention.key if attention.rotary else 0.0
    rope = machine.memory_s((4.0 if software.fused_mlp else 16.0) * training.element_bytes * rotated)
    if software.kernel in ("unfused", "fused_softmax"):
        flops = 2.0 * pairs * (attention.key + attention.value)
        if attention.key % 8:  # tensor cores want operands of 16 bytes
            flops *= UNALIGNED
        # writes scores, softmax reads and writes them, the product reads them; unfused: scale, mask and a softmax apart
        moved = pairs * (8.0 if software.kernel == "fused_softmax" else 22.0)
        dropout = pairs * 5.0 if training.decoder.dropout else 0.0
        once = flops / peak + machine.memory_s(moved + dropout)
        ahead, back = once, 2 * once
    else:
        flops = pairs * (attention.key + attention.value)
        if software.packed and layout.context > 1:  # a rank's queries and keys make no triangle
            flops *= 2
        ahead = flops / peak
        back = 2.5 * ahead / BACKWARD
    kv = attention.kv_heads / min(layout.tensor, attention.kv_heads) * (attention.key + attention.value)
    kv *= training.element_bytes * tokens * layout.context
    if software.packed:
        own = training.element_bytes * tokens * heads * (attention.key + attention.value)
        around = rope + machine.memory_s(2 * (own + kv))
        gather = 2 * machine.collective_s(kv / 2, layout.context, layout.tensor)
        return (
            Cost(attention=ahead, memory=around, tensor=gather),
            Cost(attention=back, memory=around, tensor=gather),
        )
    # keys and values go round beside the products, and in the backward pass their gradients as well
    ring = machine.collective_s(kv, layout.context, layout.tensor)
    return (
        Cost(attention=ahead, memory=rope, tensor=machine.shown_s(ring, ahead)),
        Cost(attention=back, memory=rope, tensor=machine.shown_s(2 * ring, back)),
    )


def _scan(training: Training, machine: Machine, scan: Scan) -> tuple[Cost, Cost]:
    """The chunked scan: products within chunks and with the state, and its convolution."""
    tokens, inner = training.tokens, scan.inner / training.layout.tensor
    flops = 2.0 * tokens * inner * (scan.chunk + 3 * scan.state)
    seconds = flops / (machine.gpu.flops_16 * machine.shares.scan)
    moved = machine.memory_s(tokens * (16.0 * inner + 8.0 * scan.groups * scan.state / training.layout.tensor))
    return Cost(attention=seconds, memory=moved), Cost(attention=2.5 * seconds, memory=2 * moved)


def _mlp(training: Training, machine: Machine, layer: Layer) -> tuple[Cost, Cost]:
    if layer.mlp is None:
        return Cost(), Cost()
    if isinstance(layer.mlp, Mixture):
        return _mixture(training, machine, layer.mlp)
    around = _exchange(training, machine)
    ahead, back = _dense(training, machine, layer.mlp)
    return ahead + around[0], back + around[1]


def _dense(training: Training, machine: Machine, mlp: Mlp) -> tuple[Cost, Cost]:
    ahead, back = _linears(training, machine, (mlp.up, mlp.down), training.tokens)
    act = _activation_s(training, machine, mlp)
    return ahead + Cost(memory=act), back + Cost(memory=5 / 3 * act)


def _activation_s(training: Training, machine: Machine, mlp: Mlp | Mixture | None) -> float:
    """Seconds of the activation in a forward pass."""
    if mlp is None:
        return 0.0
    shared = training.tokens / training.layout.tensor
    if isinstance(mlp, Mixture):
        routed = machine.memory_s(_activation(training, mlp.expert) * shared * mlp.active)
        return routed + _activation_s(training, machine, mlp.shared)
    return machine.memory_s(_activation(training, mlp) * shared)


def _activation(training: Training, mlp: Mlp) -> float:
    """Bytes for each token to read what the first layer makes, and write what the second takes."""
    if not mlp.fusable:
        return 80.0 * mlp.width
    elements = 3.0 if mlp.gated else 2.0
    if not training.software.fused_mlp:
        elements += 2.0
    return elements * training.element_bytes * mlp.width


def _mixture(training: Training, machine: Machine, mixture: Mixture) -> tuple[Cost, Cost]:
    """Router, exchange of tokens, the rank's experts, and the way back. Tokens are spread evenly over experts."""
    layout, hidden = training.layout, mixture.expert.up.inputs
    own = training.tokens / layout.tensor  # experts want sequence parallelism
    routed = own * mixture.active
    group = layout.expert * layout.expert_tensor
    rows = routed * group / mixture.count
    local = mixture.count / layout.expert
    low = 4.0 if training.precision in LOW else 0.0
    gemm = cast = 0.0
    for one in (mixture.expert.up, mixture.expert.down):
        inputs, outputs = one.sizes(layout.expert_tensor)
        gemm += machine.gemm_s(rows, inputs, outputs, training.precision, local)
        cast += machine.memory_s(low * rows * local * inputs)
    act = machine.memory_s(_activation(training, mixture.expert) * routed)
    permute = machine.memory_s(8.0 * routed * hidden + 16.0 * own * mixture.count)
    router = machine.gemm_s(own, mixture.router.inputs, mixture.router.outputs, training.rest)
    software = training.software
    chosen = mixture.active, mixture.count
    send = machine.exchange_s(
        training.element_bytes * own * hidden, chosen, layout.expert, layout.expert_tensor, software.send_once
    )
    send *= 1 - machine.shares.overlap if software.expert_overlap else 1.0
    wait = 0.0 if software.graphs else machine.shares.routing_s
    gathered = training.element_bytes * routed * hidden * layout.expert_tensor
    gather = machine.collective_s(gathered, layout.expert_tensor, 1)
    ahead = Cost(gemm=gemm + router, memory=act + permute + cast + wait, expert=2 * send, tensor=2 * gather)
    back = Cost(gemm=2 * gemm + 2 * router, memory=5 / 3 * act + permute + cast, expert=2 * send, tensor=2 * gather)
    if mixture.shared is not None:
        for more in (_dense(training, machine, mixture.shared), _exchange(training, machine)):
            ahead, back = ahead + more[0], back + more[1]
    if mixture.latent:
        around = _linears(training, machine, mixture.latent, own)
        ahead, back = ahead + around[0], back + around[1]
    return ahead, back


def _norms(training: Training, machine: Machine, layer: Layer) -> tuple[Cost, Cost]:
    """Norms and the additions to the residual stream, of all tokens or of a sequence-parallel rank's."""
    shared = training.layout.tensor if training.sequence_parallel else 1
    elements = training.tokens * training.decoder.hidden / shared
    norm = 4.0 if training.software.fused_norm else 40.0
    add = (3.0 + (1.0 if training.decoder.dropout else 0.0)) * training.element_bytes
    seconds = machine.memory_s(layer.norm_passes * elements * (norm + add))
    return Cost(memory=seconds), Cost(memory=1.5 * seconds)


def output_cost(training: Training, machine: Machine) -> Cost:
    """Logits and their cross entropy in 32 bits."""
    decoder, tensor = training.decoder, training.layout.tensor
    outputs = 1 if decoder.head else decoder.padded_vocab(tensor) // tensor
    gemm = machine.gemm_s(training.tokens, decoder.hidden, outputs, training.rest)
    around = _exchange(training, machine)
    gathered = 0.0
    if training.software.gathered_logits:
        gathered = machine.collective_s(training.element_bytes * training.tokens * outputs * tensor, tensor, 1)
        outputs *= tensor
    moved = machine.memory_s(24.0 * training.tokens * outputs)
    passes = 4 if training.software.chunked_logits else 3
    return Cost(gemm=passes * gemm, memory=moved, tensor=gathered) + (around[0] + around[1]) * 0.5


def embedding_cost(training: Training, machine: Machine) -> Cost:
    return Cost(memory=machine.memory_s(16.0 * training.tokens * training.decoder.hidden))

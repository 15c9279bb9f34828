"""What is trained, on which GPUs, and how the program computes it: the question to the memory and the time model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from megarl.config import Layout
from megarl.layout.model import Decoder

Precision = Literal["fp32", "bf16", "fp8", "mxfp8", "fp4"]
"""Of linear layers; attention and the rest are 16-bit, or with fp32 32-bit."""

LOW: tuple[Precision, ...] = ("fp8", "mxfp8", "fp4")
"""Precisions to which the inputs of linear layers are cast."""

Kernel = Literal["unfused", "fused_softmax", "flash1", "flash2", "cudnn"]
"""How attention is computed: with scores in memory and a softmax of several passes or one, or without them."""


@dataclass(frozen=True)
class Software:
    """What a training program fuses and overlaps; the default is current Megatron-core with TransformerEngine."""

    kernel: Kernel = "cudnn"
    fused_norm: bool = True
    """Norms in one pass over memory; else in 32 bits, operation by operation."""
    norm_bytes: float = 10.0
    """What a norm that is not fused keeps of each element: the input in 16 bits, and in 32 before and behind the
    division. Only torch's own, whose input nothing else needs, drops the first."""
    fused_mlp: bool = True
    """Activations and rotary positions in one pass."""
    activation_copies: int = 1
    """Of what a gated activation that is not fused keeps beside its input and output, each as wide as the MLP: the half
    behind the nonlinearity, and where Megatron-core adds an offset to the other half, be it 0, that one as well."""
    packed: bool = False
    """Attention copies the queries, keys and values of each sequence, with those keys and values that other
    context-parallel ranks have, and puts its output in order again; it masks what a kernel's triangle does not."""
    grouped: bool = True
    """Packed attention takes fewer keys than queries always; else not with a mask nor in 32 bits."""
    plain_heads: bool = False
    """Packed attention holds scores, and works in 32 bits, where keys and values differ in size or there are sinks."""
    freed_outputs: bool = True
    """A pipeline stage frees the hidden states that it has sent; else they stay until their backward pass."""
    fused_gradients: bool = True
    """Products of gradients of weights add them to those of earlier micro-batches; else that is a pass of its own."""
    tensor_overlap: bool = True
    """Tensor-parallel collectives run beside the matrix products that they feed."""
    backward_overlap: bool = True
    """At least those of gradients run beside the products of weights' gradients."""
    data_overlap: bool = True
    """Gradients are summed and weights gathered while others are computed."""
    asynchronous: bool = True
    """A collective can run beside a product: in the backward pass that of a linear layer's input does."""
    fused_adam: bool = True
    """Adam in one pass over memory; else operation by operation."""
    graphs: bool = False
    """Kernels are launched in CUDA graphs, so that the host is never waited for."""
    send_once: bool = True
    """A token for several experts of one node is sent there once (DeepEP, HybridEP)."""
    expert_overlap: bool = False
    """Tokens are exchanged while others are computed."""
    pipeline_overlap: bool = True
    """Interleaved pipelines send while they compute."""
    listed: tuple[int, int] = (0, 0)
    """See `stages`: what is counted as layers, before and behind them, where stages divide them."""
    gradient_bytes: int = 4
    partition_bytes: float = 12.0
    """Of the optimizer's state for each parameter: master weights and two moments in 32 bits, maybe a gradient."""
    logit_bytes: float = 8.0
    """For each logit at the peak of the loss: 16 and 32 bits, and their gradient."""
    chunked_logits: bool = False
    """Logits are computed a part at a time, and again in the backward pass."""
    gathered_logits: bool = False
    """Every tensor-parallel rank has the logits of the whole vocabulary."""
    buffer_bytes: float = 0.0
    """The program's own buffers."""
    context_bytes: float = 1.5e9
    """CUDA's context and kernels, outside of the allocator; on a CPU, a process and what it loads."""
    group_bytes: float = 0.25e9
    """Of NCCL's buffers, for each kind of group that a rank is in."""
    engine_bytes: float = 7e9
    """Of an engine, beside weights and cache: CUDA's context, graphs of decode steps, activations of a prefill; on a
    CPU, its processes, which take 1.2 GB."""


MEGARL = Software(
    kernel="flash2",
    fused_mlp=False,
    activation_copies=2,
    packed=True,
    grouped=False,
    freed_outputs=False,
    fused_gradients=False,
    tensor_overlap=False,
    send_once=False,
    chunked_logits=True,
)
"""How megarl trains on GPUs: torch's attention, norms in one kernel, activations and rotary positions not, logits in
parts."""
MEGARL_CPU = replace(
    MEGARL,
    fused_norm=False,
    norm_bytes=8.0,
    grouped=True,
    plain_heads=True,
    asynchronous=False,
    fused_adam=False,
    context_bytes=0.5e9,
    group_bytes=0.0,
    engine_bytes=1.5e9,
)
"""And without one: torch's own operations, and gloo, which needs the cores that compute."""

ROUNDING = 1e-9


@dataclass(frozen=True)
class Training:
    """One optimizer step of `global_batch` sequences of `sequence` tokens, `micro_batch` of them at a time.

    Packed sequences of other lengths are as many of sum(length^2) / sum(length) tokens, in parts of a sequence if need
    be: these have as many tokens, and as many pairs for attention.

    `sharding`: data-parallel ranks each hold all of the optimizer's state, a share of it, or a share of everything
    (FSDP). With `adapters` only small added matrices learn (LoRA), so that weights have no gradients.
    """

    decoder: Decoder
    layout: Layout
    gpus: int
    sequence: float
    global_batch: float
    micro_batch: float = 1
    precision: Precision = "bf16"
    sequence_parallel: bool = True
    sharding: Literal["none", "optimizer", "full"] = "optimizer"
    adapters: bool = False
    recomputed: float = 1.0
    """With full recomputation, the share of layers that it is used for."""
    light_recompute: bool = False
    """What norms and activations return is computed again and not kept."""
    software: Software = Software()

    @property
    def data(self) -> int:
        """Data-parallel size. Raises ValueError: the GPUs cannot be divided so."""
        size, rest = divmod(self.gpus, self.layout.model_ranks)
        if rest or not size:
            raise ValueError(f"{self.gpus} GPUs cannot be divided into groups of {self.layout.model_ranks}")
        return size

    @property
    def micro_batches(self) -> int:
        """Of each data-parallel rank in a step."""
        return max(1, math.ceil(self.global_batch / (self.data * self.micro_batch) - ROUNDING))

    @property
    def tokens(self) -> int:
        """Of a micro-batch on one rank, before tensor-parallel ranks share them."""
        return round(self.micro_batch * self.sequence) // self.layout.context

    @property
    def rest(self) -> Precision:
        """Of what is never computed in low precision."""
        return "fp32" if self.precision == "fp32" else "bf16"

    @property
    def element_bytes(self) -> float:
        """Of activations and weights."""
        return 4.0 if self.precision == "fp32" else 2.0

"""What is trained, on which GPUs, and how the program computes it: the question to the memory and the time model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megarl.config import Layout
from megarl.layout.model import Decoder

Precision = Literal["fp32", "bf16", "fp8", "mxfp8", "fp4"]
"""Of linear layers; attention and the rest are 16-bit."""

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
    fused_mlp: bool = True
    """Activations and rotary positions in one pass."""
    tensor_overlap: bool = True
    """Tensor-parallel collectives run beside the matrix products that they feed."""
    data_overlap: bool = True
    """Gradients are summed and weights gathered while others are computed."""
    graphs: bool = False
    """Kernels are launched in CUDA graphs, so that the host is never waited for."""
    send_once: bool = True
    """A token for several experts of one node is sent there once (DeepEP, HybridEP)."""
    expert_overlap: bool = False
    """Tokens are exchanged while others are computed."""
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

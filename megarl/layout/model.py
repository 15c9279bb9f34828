"""What a layout divides: a decoder as linear layers, attention and experts, with the sizes that cost memory and time.

Made from a `ModelShape`, or by hand for models that are measured but not trained here (GPT, MPT, Nemotron-H). Sizes are
in elements; nothing here knows of ranks beyond how Megatron splits a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megarl.config import LatentAttention, ModelShape, PolicyHead


@dataclass(frozen=True)
class Linear:
    """A matrix of `inputs` x `outputs`; tensor-parallel ranks share its outputs, its inputs, or hold it whole."""

    inputs: int
    outputs: int
    split: Literal["outputs", "inputs", "none"]
    bias: bool = False

    def sizes(self, tensor: int) -> tuple[int, int]:
        """Inputs and outputs of one rank's part."""
        return (
            self.inputs // tensor if self.split == "inputs" else self.inputs,
            self.outputs // tensor if self.split == "outputs" else self.outputs,
        )

    def parameters(self, tensor: int) -> int:
        """Those of one rank."""
        inputs, outputs = self.sizes(tensor)
        return inputs * outputs + (outputs if self.bias else 0)


@dataclass(frozen=True)
class Attention:
    """Causal attention. A head's query and key have `key` elements, its value `value`.

    A token sees the last `window` ones, if not all. Each rank holds `norms` elements whole, and `sinks` of each of its
    heads.
    """

    linears: tuple[Linear, ...]
    heads: int
    kv_heads: int
    key: int
    value: int
    window: int | None = None
    norms: int = 0
    sinks: int = 0
    rotary: bool = True

    @property
    def latent(self) -> bool:
        """Keys and values are made from a latent state, and maybe queries from another; `norms` is their size."""
        return len(self.linears) > 2

    @property
    def rotated(self) -> int:
        """Elements of a head that turn with the position, at most."""
        if not self.rotary:
            return 0
        return self.linears[-3].outputs - self.linears[-2].inputs if self.latent else self.key

    def kv_heads_of(self, tensor: int) -> float:
        """Of one rank: where ranks outnumber them, each has a copy of one."""
        return max(self.kv_heads / tensor, 1.0)

    def parameters(self, tensor: int) -> int:
        return sum(one.parameters(tensor) for one in self.linears) + self.norms + self.sinks * self.heads // tensor


@dataclass(frozen=True)
class Scan:
    """A Mamba-2 mixer (arXiv 2405.21060): a state of `state` elements for each of `heads` x `head_dim` channels."""

    linears: tuple[Linear, ...]
    heads: int
    head_dim: int
    state: int
    groups: int
    chunk: int = 128

    @property
    def inner(self) -> int:
        """Channels."""
        return self.heads * self.head_dim

    def parameters(self, tensor: int) -> int:
        convolution = 5 * (self.inner + 2 * self.groups * self.state)  # four taps and a bias
        return (
            sum(one.parameters(tensor) for one in self.linears) + (convolution + self.inner + 3 * self.heads) // tensor
        )


@dataclass(frozen=True)
class Mlp:
    up: Linear
    down: Linear
    gated: bool = True
    fusable: bool = True
    """There is a kernel for its activation; else it is computed operation by operation."""

    @property
    def width(self) -> int:
        return self.down.inputs

    def parameters(self, tensor: int) -> int:
        return self.up.parameters(tensor) + self.down.parameters(tensor)


@dataclass(frozen=True)
class Mixture:
    """Experts, `active` of `count` for each token, and maybe one that all tokens use.

    `latent` are linear layers around the experts, which then work in a smaller space.
    """

    expert: Mlp
    count: int
    active: int
    router: Linear
    shared: Mlp | None = None
    latent: tuple[Linear, ...] = ()

    def parameters(self, tensor: int) -> int:
        """Those of one rank, without the experts'."""
        shared = self.shared.parameters(tensor) if self.shared is not None else 0
        return self.router.parameters(1) + shared + sum(one.parameters(tensor) for one in self.latent)

    def expert_parameters(self, expert: int, expert_tensor: int) -> int:
        """Those of the experts of one rank, of `expert` x `expert_tensor`."""
        return self.count // expert * self.expert.parameters(expert_tensor)


@dataclass(frozen=True)
class Layer:
    """`norms` are elements that each rank holds whole, `norm_passes` how often the hidden state is normed: before mixer
    and MLP, and maybe behind them."""

    mixer: Attention | Scan | None
    mlp: Mlp | Mixture | None
    norms: int
    norm_passes: int = 2

    def parameters(self, tensor: int) -> int:
        """Those of one rank, without routed experts."""
        mixer = self.mixer.parameters(tensor) if self.mixer is not None else 0
        return mixer + (self.mlp.parameters(tensor) if self.mlp is not None else 0) + self.norms

    def expert_parameters(self, expert: int, expert_tensor: int) -> int:
        """Routed experts' of one rank."""
        return self.mlp.expert_parameters(expert, expert_tensor) if isinstance(self.mlp, Mixture) else 0


@dataclass(frozen=True)
class Decoder:
    """`kinds` are the different layers; layer i is kinds[order[i]].

    A vocabulary of `outputs` logits, or a scalar head of `head` elements. `positions` learned ones lie beside the
    embedding. With `dropout` its masks are kept. `unit_norms` multiply by 1 + weight, in 32 bits.
    """

    name: str
    hidden: int
    vocab: int
    kinds: tuple[Layer, ...]
    order: tuple[int, ...]
    tied: bool = False
    head: int = 0
    final_norm: int = 0
    embedding_extra: int = 0
    dropout: bool = False
    unit_norms: bool = False

    @property
    def layers(self) -> int:
        return len(self.order)

    def padded_vocab(self, tensor: int) -> int:
        """As ModelShape's: each rank has the same number of rows."""
        return -(-self.vocab // tensor) * tensor

    @property
    def parameters(self) -> int:
        """Of the whole model, without padding; a tied embedding counts once."""
        output = self.head if self.head else 0 if self.tied else self.vocab * self.hidden
        each = [kind.parameters(1) + kind.expert_parameters(1, 1) for kind in self.kinds]
        inside = sum(each[kind] for kind in self.order)
        return inside + self.vocab * self.hidden + output + self.final_norm + self.embedding_extra


def decoder(shape: ModelShape) -> Decoder:
    """A model that is trained here, as `megarl.weights` lists its parameters."""
    kinds: list[Layer] = []
    order = []
    for number in range(shape.layers):
        layer = _layer(shape, number)
        if layer not in kinds:
            kinds.append(layer)
        order.append(kinds.index(layer))
    head = 0 if isinstance(shape.head, PolicyHead) else shape.hidden + len(shape.head.tensors) - 1
    return Decoder(
        shape.family,
        shape.hidden,
        shape.vocab,
        tuple(kinds),
        tuple(order),
        tied=shape.tied,
        head=head,
        final_norm=shape.hidden,
        unit_norms=shape.unit_norms,
    )


def gated_mlp(hidden: int, width: int, bias: bool = False) -> Mlp:
    """With biases, gpt-oss's: its clamped activation is not fused."""
    up, down = Linear(hidden, 2 * width, "outputs", bias), Linear(width, hidden, "inputs", bias)
    return Mlp(up, down, fusable=not bias)


def grouped_attention(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    window: int | None = None,
    norms: int = 0,
    sinks: int = 0,
) -> Attention:
    """Grouped-query attention with query, key and value projected at once."""
    query = heads * head_dim
    together = Linear(hidden, query + 2 * kv_heads * head_dim, "outputs", qkv_bias)
    linears = (together, Linear(query, hidden, "inputs", output_bias))
    return Attention(linears, heads, kv_heads, head_dim, head_dim, window, norms, sinks)


def latent_attention(hidden: int, heads: int, latent: LatentAttention) -> Attention:
    """Multi-head latent attention, whose down projections Megatron splits too and gathers."""
    key = latent.nope + latent.rope
    if latent.query_rank is None:
        queries: tuple[Linear, ...] = (Linear(hidden, heads * key, "outputs"),)
    else:
        queries = (
            Linear(hidden, latent.query_rank, "outputs"),
            Linear(latent.query_rank, heads * key, "outputs"),
        )
    linears = (
        *queries,
        Linear(hidden, latent.kv_rank + latent.rope, "outputs"),
        Linear(latent.kv_rank, heads * (latent.nope + latent.value), "outputs"),
        Linear(heads * latent.value, hidden, "inputs"),
    )
    norms = latent.kv_rank + (latent.query_rank or 0)
    return Attention(linears, heads, heads, key, latent.value, norms=norms)


def _layer(shape: ModelShape, number: int) -> Layer:
    norms = 4 if shape.post_norms else 2
    return Layer(_attention(shape, number), _mlp(shape, number), norms * shape.hidden, norms)


def _attention(shape: ModelShape, number: int) -> Attention:
    if shape.latent is not None:
        return latent_attention(shape.hidden, shape.heads, shape.latent)
    window = shape.window.size if shape.window is not None and number in shape.window.layers else None
    return grouped_attention(
        shape.hidden,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        qkv_bias=shape.qkv_bias,
        output_bias=shape.attention_output_bias,
        window=window,
        norms=2 * shape.head_dim if shape.qk_norm else 0,
        sinks=int(shape.sinks),
    )


def _mlp(shape: ModelShape, number: int) -> Mlp | Mixture:
    experts = shape.experts
    if experts is None or not shape.has_experts(number):
        return gated_mlp(shape.hidden, shape.ffn)
    return Mixture(
        gated_mlp(shape.hidden, experts.ffn, experts.bias),
        experts.count,
        experts.active,
        Linear(shape.hidden, experts.count, "none", experts.bias),
        gated_mlp(shape.hidden, experts.shared_ffn) if experts.shared_ffn else None,
    )

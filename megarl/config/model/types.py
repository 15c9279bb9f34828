"""The typed description of a decoder: what distinguishes the supported families, each field with one meaning in all.

A field's default is what most families do. Sizes are in elements, layers count from 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megarl.config.model.heads import POLICY, Head, PolicyHead


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's: low frequencies divided by `factor`, high ones kept, a smooth step between.

    A frequency is low if its wave is longer than `original_positions / low_frequency` positions, high if it is shorter
    than `original_positions / high_frequency`.
    """

    factor: float
    low_frequency: float
    high_frequency: float
    original_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): the slow frequencies are divided by `factor`.

    Slow are those with fewer than `beta_slow` turns in `original_positions`; a ramp leads to those with `beta_fast`.
    Sines and cosines are multiplied by `attention_factor`. `mscale_all_dim` also scales the softmax of latent
    attention. With `truncate` the ramp's ends are rounded to whole frequencies.
    """

    factor: float
    original_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True)
class Rope:
    """Rotary positions. `fraction` of each head is rotated; with latent attention, of each head's rope part."""

    theta: float = 10_000.0
    fraction: float = 1.0
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class Window:
    """Sliding-window attention: a token of `layers` sees the last `size` tokens, itself among them.

    `rope` is what those layers rotate by, where it is not the model's.
    """

    size: int
    layers: tuple[int, ...]
    rope: Rope | None = None


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek's multi-head latent attention.

    A head's query and key are `nope` elements without position and `rope` with; the rope part of the key is shared by
    all heads. Without `query_rank` queries are projected directly. `interleaved`: rotated pairs are neighbours in the
    checkpoint's rows, not halves. `norm_epsilon` is that of the two latent norms.
    """

    query_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int
    interleaved: bool = True
    norm_epsilon: float = 1e-6


@dataclass(frozen=True)
class ExpertGroups:
    """A token's experts come from the best `active` of `count` groups.

    A group's score is that of its best expert ("best"), or the sum of its two best ("two_best").
    """

    count: int
    active: int
    scored_by: Literal["best", "two_best"]


@dataclass(frozen=True)
class Experts:
    """The mixture-of-experts MLPs of `layers`; all other layers have a dense MLP of width `ModelShape.ffn`.

    Scores are softmax or sigmoid of the router's logits over all experts. The best `active` experts are chosen, by
    score plus a bias with `correction_bias` (float32, not trained by gradient); their weights are their scores without
    it, divided by their sum if `normalized`, times `scaling`. (softmax and normalized is the same as a softmax over the
    chosen.) `shared_ffn` is the width of the expert that all tokens use, 0 for none. With `bias` the experts' MLPs and
    the router have biases.
    """

    count: int
    active: int
    ffn: int
    layers: tuple[int, ...]
    shared_ffn: int = 0
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True
    scaling: float = 1.0
    groups: ExpertGroups | None = None
    correction_bias: bool = False
    bias: bool = False


@dataclass(frozen=True)
class ClampedSwiglu:
    """gpt-oss: (up + 1) * gate * sigmoid(sharpness * gate), with gate at most `limit` and up within ±`limit`."""

    limit: float
    sharpness: float


Activation = Literal["silu", "gelu_tanh"] | ClampedSwiglu
"""Of the gate of a gated MLP."""


@dataclass(frozen=True)
class ModelShape:
    """The decoder of a Hugging Face directory.

    `ffn` is the dense layers' MLP width (a family without dense layers repeats its experts'). `head_dim` is that of
    queries and keys. With `latent`, `kv_heads` is `heads`. `attention_output_bias` is the output projection's.
    `softmax_scale` None means 1 / sqrt(head_dim). `sinks`: each head has a logit that takes part in the softmax and
    attends to nothing. `unit_norms`: norms multiply by 1 + weight. `post_norms`: attention's and the MLP's output are
    normed before they are added. Embeddings are multiplied by `embedding_scale`. `mtp_layers`: multi-token-prediction
    layers that the checkpoint may have; they are not read, trained or written. Without a policy's head there is no
    output matrix, and nothing is `tied`.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    norm_epsilon: float
    rope: Rope
    tied: bool
    activation: Activation = "silu"
    qkv_bias: bool = False
    attention_output_bias: bool = False
    qk_norm: bool = False
    softmax_scale: float | None = None
    sinks: bool = False
    window: Window | None = None
    latent: LatentAttention | None = None
    experts: Experts | None = None
    unit_norms: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    mtp_layers: int = 0
    head: Head = POLICY

    def padded_vocab(self, tensor: int) -> int:
        """Vocabulary rows so that each of `tensor` ranks has the same number of them."""
        return -(-self.vocab // tensor) * tensor

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of `layer` is a mixture of experts."""
        return self.experts is not None and layer in self.experts.layers

    @property
    def parameters(self) -> int:
        """Weights of the whole model, norms and biases among them; a tied embedding counts once."""
        outside = self.hidden + self.vocab * self.hidden + self._head()
        norms = self.hidden * (4 if self.post_norms else 2)
        mlps = sum(self._mlp(layer) for layer in range(self.layers))
        return outside + self.layers * (norms + self._attention()) + mlps

    @property
    def active_parameters(self) -> int:
        """`parameters` without the experts that a token does not use."""
        if self.experts is None:
            return self.parameters
        idle = len(self.experts.layers) * (self.experts.count - self.experts.active)
        return self.parameters - idle * self._expert()

    def _head(self) -> int:
        if isinstance(self.head, PolicyHead):
            return 0 if self.tied else self.vocab * self.hidden
        return self.hidden + len(self.head.tensors) - 1

    def _attention(self) -> int:
        query, key_value = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.latent is not None:
            own, rank = self.latent, self.latent.query_rank
            queries = self.hidden * query if rank is None else rank * (self.hidden + 1 + query)
            down = self.hidden * (own.kv_rank + own.rope) + own.kv_rank
            return queries + down + self.heads * (own.kv_rank * (own.nope + own.value) + own.value * self.hidden)
        weights = self.hidden * (2 * query + 2 * key_value) + (2 * self.head_dim if self.qk_norm else 0)
        biases = (query + 2 * key_value if self.qkv_bias else 0) + (self.hidden if self.attention_output_bias else 0)
        return weights + biases + (self.heads if self.sinks else 0)

    def _mlp(self, layer: int) -> int:
        if self.experts is None or not self.has_experts(layer):
            return 3 * self.hidden * self.ffn
        router = self.experts.count * (self.hidden + self.experts.bias)
        return router + self.experts.count * self._expert() + 3 * self.hidden * self.experts.shared_ffn

    def _expert(self) -> int:
        assert self.experts is not None
        width = self.experts.ffn
        return 3 * self.hidden * width + (2 * width + self.hidden if self.experts.bias else 0)

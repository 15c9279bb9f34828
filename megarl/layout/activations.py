"""Bytes of activations: what autograd keeps of one micro-batch on one rank for its backward pass.

After Korthikanti et al. (arXiv 2205.05198, sections 4 and 5), tensor by tensor for decoders of today: the input of each
linear layer, of each norm and of each activation, query, key and value, and what attention's kernel needs. A view keeps
the whole tensor that it is of. Left out is what takes a few bytes a token: statistics of norms, indices, losses.
"""

from __future__ import annotations

from megarl.layout.model import Attention, Layer, Mixture, Mlp, Scan
from megarl.layout.parameters import Stage
from megarl.layout.training import LOW, Kernel, Training

WITH_SCORES: tuple[Kernel, ...] = ("unfused", "fused_softmax")


def hidden_bytes(training: Training) -> float:
    """The hidden states, as one rank keeps them between layers."""
    return _width(training) * _hidden(training)


def layer_bytes(training: Training, layer: Layer) -> float:
    """What one layer keeps without full recomputation."""
    scaled = _width(training) * training.tokens / training.layout.tensor
    # each norm keeps its input, and the linear layers behind two of them their output
    total = layer.norm_passes * _norm_bytes(training, _hidden(training))
    total += min(layer.norm_passes, 2) * _low(training) * hidden_bytes(training)
    if training.decoder.dropout:
        total += hidden_bytes(training)
    if isinstance(layer.mixer, Attention):
        total += _attention_bytes(training, layer.mixer)
    elif isinstance(layer.mixer, Scan):
        total += scaled * (4 * layer.mixer.inner + 2 * layer.mixer.groups * layer.mixer.state)
    if isinstance(layer.mlp, Mixture):
        total += _mixture_bytes(training, layer.mlp)
    elif layer.mlp is not None:
        total += scaled * _mlp_elements(training, layer.mlp)
    return total


def edge_bytes(training: Training, stage: Stage, parts: float) -> float:
    """What a pipeline stage keeps around its layers while `parts` of its parts are under way."""
    software, layout, hidden = training.software, training.layout, hidden_bytes(training)
    first, last = (parts / layout.interleave if there else 0.0 for there in (stage.first, stage.last))
    total = 0.0
    if training.decoder.dropout:
        total += first * hidden / 2  # the embedding's mask
    if not software.fused_norm and _width(training) < 4 and layout.recompute != "full":
        total += (parts - first) * hidden  # what was received; the first norm keeps a copy
    if stage.last:
        total += _norm_bytes(training, _hidden(training)) + _output_bytes(training)
        last = min(last, 1.0)
    if not software.freed_outputs:
        total += (parts - last) * hidden
    if training.micro_batches * layout.interleave > parts:
        # the schedule still holds what was received and sent, and its gradients, of the backward pass before
        total += (0 if stage.first else 2 * hidden) + (0 if stage.last else (2 - software.freed_outputs) * hidden)
    if layout.recompute == "full" and software.packed:  # angles of the tokens
        total += parts * 4.0 * training.tokens * max(_rotated(layer) for layer in training.decoder.kinds)
    return total


def _width(training: Training) -> float:
    return 4.0 if training.precision == "fp32" else 2.0


def _low(training: Training) -> float:
    """A linear layer's input, in sizes of what it is made from."""
    if training.light_recompute:
        return 0.0
    return 0.5 if training.precision in LOW else 1.0


def _hidden(training: Training) -> float:
    """Elements of the hidden states of one rank."""
    shared = training.layout.tensor if training.sequence_parallel else 1
    return training.tokens * training.decoder.hidden / shared


def _norm_bytes(training: Training, elements: float) -> float:
    """Of a norm, without what it returns."""
    software = training.software
    if not software.fused_norm:
        return elements * software.norm_bytes
    return elements * (8.0 if training.decoder.unit_norms else _width(training))


def _output_bytes(training: Training) -> float:
    """The output layer's input, which a scalar head reads in 32 bits."""
    if training.decoder.head:
        return 4.0 * _hidden(training)
    if training.software.chunked_logits:  # every tensor-parallel rank has all tokens
        return _width(training) * training.tokens * training.decoder.hidden
    return _low(training) * hidden_bytes(training)


def _rotated(layer: Layer) -> int:
    return layer.mixer.rotated if isinstance(layer.mixer, Attention) else 0


def _mixture_bytes(training: Training, mixture: Mixture) -> float:
    """Experts keep their input, and the router probabilities and indices. Tokens are spread evenly over ranks."""
    layout, software = training.layout, training.software
    own = training.tokens / layout.tensor
    entry = mixture.expert.up.inputs * layout.expert_tensor
    elements = entry * _low(training) + _mlp_elements(training, mixture.expert)
    if not software.fused_mlp:  # before it is multiplied by the probability; so is the bias behind
        elements += mixture.expert.width + (entry if mixture.expert.down.bias else 0.0)
    total = _width(training) * own * mixture.active * elements
    total += own * (14.0 * mixture.count + 24.0 * mixture.active)
    if mixture.shared is not None:
        total += _width(training) * own * _mlp_elements(training, mixture.shared)
    return total


def _mlp_elements(training: Training, mlp: Mlp) -> float:
    """For each token: the activation's input, what lies within it, and its output, which the second layer reads."""
    software = training.software
    before = 2 * mlp.width if mlp.gated else mlp.width
    within = 0
    if not mlp.fusable:  # clamped, its sigmoid, their product, and the other half with its offset
        within = 4 * mlp.width
    elif mlp.gated and not software.fused_mlp:
        within = software.activation_copies * mlp.width
    return before + within + _low(training) * mlp.width


def _attention_bytes(training: Training, attention: Attention) -> float:
    software, tensor, width = training.software, training.layout.tensor, _width(training)
    tokens, kv_heads = training.tokens, attention.kv_heads_of(tensor)
    query, key = attention.heads / tensor * attention.key, kv_heads * attention.key
    total, elements = _core_bytes(training, attention), 0.0
    if attention.rotary and not software.fused_mlp:  # sines and cosines, for queries and for keys
        elements += 4 * attention.rotated
    if attention.latent:
        latent = tokens * attention.norms / tensor
        return total + _norm_bytes(training, latent) + width * (_low(training) * latent + tokens * elements)
    # what may be kept as views of all that the first linear layer returns, which ranks that outnumber keys gather
    whole = attention.linears[0].outputs / (1 if attention.kv_heads < tensor else tensor)
    views = 0.0
    if attention.norms:
        total += _norm_bytes(training, tokens * (query + key))
        if not software.fused_norm and width == 4:  # queries of several groups have to be copied
            views += key if 1 < kv_heads < attention.heads / tensor else query + key
    if software.packed and training.layout.recompute == "selective":
        views += kv_heads * attention.value
    if views:
        elements += whole - views
    return total + width * tokens * elements


def _core_bytes(training: Training, attention: Attention) -> float:
    """Queries, keys and values, what comes out, and what the kernel needs beside."""
    software, layout, width = training.software, training.layout, _width(training)
    tokens, heads, kv_heads = training.tokens, attention.heads / layout.tensor, attention.kv_heads_of(layout.tensor)
    query, pair, out = heads * attention.key, attention.key + attention.value, heads * attention.value
    if attention.latent and training.light_recompute:
        once = width * tokens * out
    else:
        once = width * tokens * (query + kv_heads * pair + out)
    if layout.recompute == "selective" and (software.packed or software.kernel in WITH_SCORES):
        return once
    scores = tokens * training.sequence * heads
    if software.kernel in WITH_SCORES:
        passes = 2.0 if software.kernel == "fused_softmax" else 6.0
        return once + scores * (passes + 3.0 * training.decoder.dropout)
    if not software.packed:
        return once + 4.0 * tokens * heads
    if software.plain_heads and (attention.key != attention.value or attention.sinks):
        return 4.0 * (tokens * heads * (attention.key + layout.context * pair) + scores) + width * tokens * out
    beside = 4.0 * tokens * heads
    if masked := layout.context > 1 or attention.window is not None or attention.sinks > 0:
        beside += width * (scores if attention.sinks else scores / heads)
    if not software.grouped and (masked or width == 4):
        kv_heads = heads
    return beside + width * tokens * (query + layout.context * kv_heads * pair + 2 * out)

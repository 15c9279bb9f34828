"""How long an engine takes for a decode step and for a prefill, and how much its cache holds.

An `EngineModel` is a few numbers. `roofline` derives them from a model and a GPU; `measured` reads them from a file of
measurements of a real engine.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class EngineModel:
    """Seconds of an engine's work, linear in cached tokens, so that a run of equal steps has a closed form.

    A decode step of a batch takes `decode_s[batch]`, and `cached_s` for each token of context that it reads. A prefill
    takes `pass_s` for each started `pass_tokens`, `admit_s` for each request, `prefill_s` for each token, and `pair_s`
    for each pair of a token and one before it.
    """

    name: str
    kv_tokens: int
    max_running: int
    decode_s: tuple[float, ...]
    """By batch size, 0 to `max_running`."""
    cached_s: float
    pass_s: float
    prefill_s: float
    pair_s: float = 0.0
    admit_s: float = 0.0
    request_s: float = 0.0
    """From the scheduler's decision until the request is in the engine's queue."""
    call_s: float = 0.0
    """At least so much later than the one before."""
    pass_tokens: int = 8192
    gpus: int = 1
    first_share: float = 0.7
    """Of the new tokens that running requests may still ask for, an engine that was idle keeps so much room free."""

    def steps_s(self, steps: int, batch: int, context: int) -> float:
        """Seconds of so many decode steps of a batch whose contexts are `context` tokens in all before the first."""
        each = self.decode_s[batch] + self.cached_s * context
        return steps * each + self.cached_s * batch * (steps * (steps - 1) // 2)

    def steps_until(self, seconds: float, batch: int, context: int) -> int:
        """The fewest such steps that take at least so long."""
        if seconds <= 0:
            return 0
        each = self.decode_s[batch] + self.cached_s * context
        slope = self.cached_s * batch
        linear = each - slope / 2
        steps = math.ceil(2 * seconds / (linear + math.sqrt(linear * linear + 2 * slope * seconds)))
        while steps and self.steps_s(steps - 1, batch, context) >= seconds:
            steps -= 1
        while self.steps_s(steps, batch, context) < seconds:
            steps += 1
        return steps

    def prefill_seconds(self, tokens: int, pairs: float, requests: int) -> float:
        passes = -(-tokens // self.pass_tokens)
        return passes * self.pass_s + requests * self.admit_s + tokens * self.prefill_s + pairs * self.pair_s


@dataclass(frozen=True)
class Gpu:
    """Peaks of one GPU: bytes, bytes a second (memory, links in a node, network), FLOPs a second without sparsity."""

    memory: float
    bandwidth: float
    flops_16: float
    flops_8: float
    link: float
    network: float = 50e9
    flops_4: float = 0.0
    linked: int = 8
    """GPUs that `link` joins."""
    host: float = 63e9
    """Bytes a second to or from the host's memory."""


GPUS = {
    "A100": Gpu(80e9, 2.04e12, 312e12, 312e12, 300e9, network=25e9, host=31e9),
    "A100-40GB": Gpu(40e9, 1.56e12, 312e12, 312e12, 300e9, network=25e9, host=31e9),
    "H100": Gpu(80e9, 3.35e12, 989e12, 1979e12, 450e9),
    "H200": Gpu(141e9, 4.8e12, 989e12, 1979e12, 450e9),
    "H20": Gpu(96e9, 4.0e12, 148e12, 296e12, 450e9),
    "H800": Gpu(80e9, 3.35e12, 989e12, 1979e12, 200e9),
    "B200": Gpu(180e9, 8e12, 2250e12, 4500e12, 900e9, flops_4=9000e12),
    "B300": Gpu(268e9, 8e12, 2250e12, 4500e12, 900e9, network=100e9, flops_4=13500e12),
    "GB200": Gpu(186e9, 8e12, 2500e12, 5000e12, 900e9, flops_4=10000e12, linked=72, host=450e9),
    "GB300": Gpu(278e9, 8e12, 2500e12, 5000e12, 900e9, network=100e9, flops_4=15000e12, linked=72, host=450e9),
}
"""Data sheets of NVIDIA's SXM parts and of those with a Grace; `link` is one direction of NVLink. The H800's is cut to
400 GB/s both ways; an A100 has no 8-bit floating point."""


@dataclass(frozen=True)
class ServedModel:
    """What a decoder costs to serve. Parameters are numbers of them, `kv_values` are those cached for each token."""

    parameters: float
    active: float
    """Parameters that each token is multiplied with."""
    layers: int
    hidden: int
    kv_values: int
    kv_heads: int
    """More GPUs than that hold copies; 1 for latent attention, whose cache has no heads."""
    attention_flops: float
    """For each new token and token of its context, all layers."""
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0
    routed: float = 0.0
    """Parameters in routed experts, of `parameters`."""
    experts: int = 1
    experts_per_token: int = 1

    def weights_read(self, batch: int) -> float:
        """Bytes of weights that a step of a batch reads, with experts chosen evenly at random."""
        touched = 1 - (1 - self.experts_per_token / self.experts) ** batch
        return self.weight_bytes * (self.parameters - self.routed * (1 - touched))


def grouped(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, parameters: float, **experts: Any
) -> ServedModel:
    """A decoder with grouped-query attention."""
    return ServedModel(
        parameters,
        experts.pop("active", parameters),
        layers,
        hidden,
        kv_values=2 * layers * kv_heads * head_dim,
        kv_heads=kv_heads,
        attention_flops=4 * layers * heads * head_dim,
        **experts,
    )


def latent(layers: int, hidden: int, heads: int, parameters: float, active: float, **experts: Any) -> ServedModel:
    """A decoder with multi-head latent attention of rank 512 and 64 rotary values, weights absorbed in decoding."""
    return ServedModel(
        parameters,
        active,
        layers,
        hidden,
        kv_values=layers * 576,
        kv_heads=1,
        attention_flops=2 * layers * heads * (576 + 512),
        **experts,
    )


MODELS = {
    "llama3.1-8b": grouped(32, 4096, 32, 8, 128, 8.03e9),
    "llama3.3-70b": grouped(80, 8192, 64, 8, 128, 70.6e9),
    "llama3.1-405b": grouped(126, 16384, 128, 8, 128, 405.9e9),
    "qwen2.5-7b": grouped(28, 3584, 28, 4, 128, 7.62e9),
    "qwen3-8b": grouped(36, 4096, 32, 8, 128, 8.19e9),
    "qwen3-32b": grouped(64, 5120, 64, 8, 128, 32.8e9),
    "qwen2-vl-72b": grouped(80, 8192, 64, 8, 128, 73.4e9),
    "qwen3-235b-a22b": grouped(
        94, 4096, 64, 4, 128, 235.1e9, active=22.2e9, routed=227.1e9, experts=128, experts_per_token=8
    ),
    "moonlight-16b-a3b": latent(27, 2048, 16, 15.96e9, 2.9e9, routed=14.4e9, experts=64, experts_per_token=6),
    "deepseek-v3": latent(
        61, 7168, 128, 671e9, 37.6e9, routed=653.9e9, experts=256, experts_per_token=8, weight_bytes=1.0
    ),
    "kimi-k2": latent(
        61, 7168, 64, 1.026e12, 32.9e9, routed=1.0146e12, experts=384, experts_per_token=8, weight_bytes=1.0
    ),
}
"""Sizes from the models' published configurations; routed = layers x experts x 3 x hidden x the experts' width."""

MEMORY_EFFICIENCY = 0.75
FLOPS_EFFICIENCY = 0.65
LAYER_S = 12e-6
"""Launches of a layer's kernels, in a CUDA graph."""
EXPERTS_S = 60e-6
"""A layer with experts takes so much longer: routing, and products of small matrices."""
STEP_S = 1.5e-3
"""The engine's own work between steps."""
REDUCE_S = 10e-6
"""Latency of one all-reduce within a node, two a layer."""


@dataclass(frozen=True)
class Placement:
    """An engine on `gpus` GPUs. With `attention_data`, these split the requests and not the heads, as large engines of
    latent attention do (experts spread over all), so that each token is cached once and not on every GPU."""

    gpus: int
    attention_data: bool = False
    memory_fraction: float = 0.85
    max_running: int = 1024
    request_s: float = 0.01


def roofline(name: str, model: ServedModel, gpu: Gpu, place: Placement) -> EngineModel:
    """Each part of a step takes as long as memory or arithmetic allow, whichever is slower; the parts add up."""
    count = place.gpus
    bandwidth = count * gpu.bandwidth * MEMORY_EFFICIENCY
    peak = gpu.flops_8 if model.weight_bytes <= 1 else gpu.flops_16
    flops, attention = count * peak * FLOPS_EFFICIENCY, count * gpu.flops_16 * FLOPS_EFFICIENCY
    copies = 1.0 if place.attention_data else max(count / model.kv_heads, 1.0)
    kv_bytes = model.kv_values * model.kv_bytes
    room = count * gpu.memory * place.memory_fraction - model.parameters * model.weight_bytes
    kv_tokens = int(room / (kv_bytes * copies))
    if kv_tokens <= 0:
        raise ValueError(
            f"{count} GPUs have {count * gpu.memory * place.memory_fraction / 1e9:.0f} GB for weights and cache, the "
            f"weights alone are {model.parameters * model.weight_bytes / 1e9:.0f} GB"
        )
    layer = LAYER_S + (2 * REDUCE_S if count > 1 else 0.0) + (EXPERTS_S if model.experts > 1 else 0.0)
    fixed = STEP_S + model.layers * layer
    link = gpu.link if count <= gpu.linked else gpu.network
    sent = 0.0 if count == 1 else 4 * model.layers * model.hidden * 2 / link
    sent /= count if place.attention_data else 1
    decode = [
        fixed + max(model.weights_read(batch) / bandwidth, 2 * model.active * batch / flops) + sent * batch
        for batch in range(place.max_running + 1)
    ]
    return EngineModel(
        name=name,
        kv_tokens=kv_tokens,
        max_running=place.max_running,
        decode_s=tuple(decode),
        cached_s=max(kv_bytes * copies / bandwidth, model.attention_flops / attention),
        pass_s=fixed + model.weights_read(8192) / bandwidth,
        prefill_s=2 * model.active / flops + sent,
        pair_s=model.attention_flops / attention,
        request_s=place.request_s,
        gpus=count,
    )


def measured(file: Path) -> EngineModel:
    """A real engine from a JSON file; see `tools/simulate_rollout.py --help`. A machine's table may have one, too.

    Seconds of a decode step are fitted as a function of its batch size (straight lines between those measured) plus
    the same for each token of context.
    """
    try:
        table = json.loads(file.read_text())
        table = table.get("engine", table) or {}  # of a whole machine, which may have none
        points = np.array(table["decode"], dtype=float).reshape(-1, 3)
        known = {name: table[name] for name in ("kv_tokens", "max_running")}
        prefill = {part: float(table.get(f"prefill_{part}_s", 0.0)) for part in ("pass", "request", "token", "pair")}
        request_s, call_s = (float(table.get(name, 0.0)) for name in ("request_s", "call_s"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file}: no table of an engine ({error!r}); --help shows one, and"
            " tools/calibrate_machine.py --engine MODEL measures one"
        ) from None
    if not len(points) or (points[:, 0] < 1).any() or (points <= 0).any() or min(known.values()) < 1:
        raise ValueError(f"{file}: batches, contexts, seconds, kv_tokens and max_running are above 0")
    sizes = np.unique(points[:, 0])
    contexts = points[:, 0] * points[:, 1]
    design = np.column_stack([points[:, 0:1] == sizes, contexts])
    slope = 0.0
    if np.linalg.matrix_rank(design) > len(sizes):
        slope = max(float(np.linalg.lstsq(design, points[:, 2], rcond=None)[0][-1]), 0.0)
    bases = [float(np.mean((points[:, 2] - slope * contexts)[points[:, 0] == size])) for size in sizes]
    batches = np.arange(known["max_running"] + 1)
    decode = np.interp(batches, sizes, bases)
    if len(sizes) > 1:
        rise = max((bases[-1] - bases[-2]) / (sizes[-1] - sizes[-2]), 0.0)
        decode = decode + rise * np.maximum(batches - sizes[-1], 0)
    return EngineModel(
        name=str(table.get("name", file.stem)),
        kv_tokens=known["kv_tokens"],
        max_running=known["max_running"],
        decode_s=tuple(np.maximum(decode, 1e-9).tolist()),
        cached_s=slope,
        pass_s=prefill["pass"],
        prefill_s=prefill["token"],
        pair_s=prefill["pair"],
        admit_s=prefill["request"],
        request_s=request_s,
        call_s=call_s,
        gpus=0,
    )

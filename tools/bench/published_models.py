"""Decoders of published training runs, from their names and from the sizes that are told of them.

A name tells the kind: GPT-like, with latent attention, with windows, or of mixers in turn; any other is a decoder as
Llama's or, with experts, as Mixtral's. Sizes that nobody tells are those with which the decoder has most nearly its
parameters. Used by `published_layouts.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from megarl.config import LatentAttention
from megarl.layout import (
    Decoder,
    Layer,
    Linear,
    Mixture,
    Mlp,
    Scan,
    gated_mlp,
    grouped_attention,
    latent_attention,
)


@dataclass(frozen=True)
class Sizes:
    """What a row tells; 0 is what it does not. `ffn` is that of an expert where there are experts."""

    hidden: int
    layers: int = 0
    ffn: int = 0
    heads: int = 0
    kv_heads: int = 0
    vocab: int = 0
    experts: int = 0
    topk: int = 0
    billions: float = 0.0
    """Parameters."""


GPT_LIKE = re.compile(r"(?!gpt-?oss)(gpt|mpt|bloom|opt|megatron|mt-nlg|turing|pythia|starcoder|nemotron)")
"""MLPs that are not gated, and biases."""
ROTARY = re.compile(r"nemotron|pythia")
"""GPT-like ones with rotary positions and an output of its own; the others learn positions and tie the output."""
WINDOWED = re.compile(r"gpt-?oss")
"""Every other layer sees 128 tokens."""
WINDOW = 128
VOCABULARIES = (
    (r"llama-?2|mi[sx]tral", 32_000),
    (r"llama-?3", 128_256),
    (r"llama-?4", 202_048),
    (r"qwen", 151_936),
    (r"gemma|nemotron", 256_000),
    (r"deepseek", 129_280),
    (r"gpt-?oss", 201_088),
)
VOCABULARY = 50_304
"""GPT-2's, padded; where neither row nor name tells one."""


@dataclass(frozen=True)
class _Latent:
    """What rows do not give of models with latent attention: their first layers are dense and of another width.

    `predicted`: multi-token-prediction layers that are trained.
    """

    attention: LatentAttention
    dense: int
    width: int
    shared: int = 1
    predicted: int = 0


_LARGE, _LITE = LatentAttention(1536, 512, 128, 64, 128), LatentAttention(None, 512, 128, 64, 128)
LATENT = (
    (r"deepseek-?v2-?lite", _Latent(_LITE, dense=1, width=10_944, shared=2)),
    (r"deepseek-?v2", _Latent(_LARGE, dense=1, width=12_288, shared=2)),
    (r"deepseek|dsv3", _Latent(_LARGE, dense=3, width=18_432, predicted=1)),
    (r"kimi", _Latent(_LARGE, dense=1, width=18_432)),
    (r"moonlight", _Latent(_LITE, dense=1, width=11_264, shared=2)),
)
"""Sizes from the models' published configurations."""


def published_decoder(name: str, sizes: Sizes | None) -> Decoder:
    """Raises ValueError: the sizes are not given, and the name is not known to tell them."""
    plain = re.sub(r"[\s_]+", "-", name.strip().lower())
    for start, known in HYBRIDS.items():
        if re.match(start, plain):
            return known
    if sizes is None:
        raise ValueError("the model's sizes are not given")
    if not sizes.vocab:
        vocab = next((size for start, size in VOCABULARIES if re.match(start, plain)), VOCABULARY)
        sizes = replace(sizes, vocab=vocab)
    return _nearest(name, plain, sizes)


@dataclass(frozen=True)
class _Guess:
    """What is left open beside the sizes: every `every`-th layer has experts, `shared` are used by all tokens."""

    head_dim: int
    shared: int = 0
    every: int = 1


@cache
def _nearest(name: str, plain: str, sizes: Sizes) -> Decoder:
    """The first of those with most nearly the parameters."""
    given = replace(sizes, heads=sizes.heads or max(1, sizes.hidden // 128), topk=sizes.topk or 1)
    given = replace(given, kv_heads=given.kv_heads or given.heads)
    candidates = [
        _described(name, plain, replace(given, layers=layers, ffn=ffn), guess)
        for layers, ffn, guess in product(_depths(given), _widths(plain, given), _guesses(plain, given))
    ]
    if not sizes.billions or len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda one: round(abs(one.parameters / 1e9 / sizes.billions - 1), 2))


def _depths(sizes: Sizes) -> Iterable[int]:
    if sizes.layers:
        return [sizes.layers]
    return range(1, 200) if sizes.billions else [max(1, sizes.hidden // 128)]


def _widths(plain: str, sizes: Sizes) -> Iterable[int]:
    """The usual ones; where depth and parameters are told, also others."""
    if sizes.ffn:
        return [sizes.ffn]
    usual = 4 * sizes.hidden if GPT_LIKE.match(plain) else -(-8 * sizes.hidden // 3 // 128) * 128
    if not sizes.layers or not sizes.billions:
        return [usual]
    return [usual, *range(128, 6 * sizes.hidden, 128)]


def _guesses(plain: str, sizes: Sizes) -> list[_Guess]:
    usual = max(1, sizes.hidden // sizes.heads)
    if not sizes.experts:
        return [_Guess(usual)] if sizes.hidden % sizes.heads == 0 else [_Guess(128), _Guess(64), _Guess(256)]
    if _latent(plain):
        return [_Guess(usual)]
    dims = dict.fromkeys((*([] if usual % 16 else [usual]), 128, 64, 256))
    return [_Guess(dim, shared, every) for every in (1, 2) for dim in dims for shared in (0, 1)]


def _latent(plain: str) -> _Latent | None:
    return next((known for start, known in LATENT if re.match(start, plain)), None)


def _described(name: str, plain: str, sizes: Sizes, guess: _Guess) -> Decoder:
    """A decoder of the kind that its name tells."""
    hidden, latent = sizes.hidden, _latent(plain) if sizes.experts else None
    gpt = GPT_LIKE.match(plain) is not None and not sizes.experts
    learned = gpt and not ROTARY.match(plain)
    windowed = WINDOWED.match(plain) is not None
    attention = (
        latent_attention(hidden, sizes.heads, latent.attention)
        if latent
        else grouped_attention(hidden, sizes.heads, sizes.kv_heads, guess.head_dim, qkv_bias=gpt, output_bias=gpt)
    )
    attention = replace(attention, rotary=not learned)
    dense = gated_mlp(hidden, sizes.ffn, bias=windowed)
    if gpt:
        up, down = Linear(hidden, sizes.ffn, "outputs", True), Linear(sizes.ffn, hidden, "inputs", True)
        dense = Mlp(up, down, gated=False)
    first = Layer(attention, dense, (4 if gpt else 2) * hidden)
    kinds, order = [first], [0] * sizes.layers
    if sizes.experts:
        shared = latent.shared if latent else guess.shared
        mixture = Mixture(
            dense,
            sizes.experts,
            sizes.topk,
            Linear(hidden, sizes.experts, "none"),
            gated_mlp(hidden, shared * sizes.ffn) if shared else None,
        )
        kinds = [replace(first, mlp=mixture), replace(first, mlp=gated_mlp(hidden, 2 * sizes.ffn))]
        order = [0 if layer % guess.every == guess.every - 1 else 1 for layer in range(sizes.layers)]
    if latent:
        kinds[1] = replace(first, mlp=gated_mlp(hidden, latent.width))
        order = [1] * latent.dense + [0] * (sizes.layers + latent.predicted - latent.dense)
    if windowed:
        kinds.append(replace(kinds[0], mixer=replace(attention, window=WINDOW)))
        order = [len(kinds) - 1 if layer % 2 else kind for layer, kind in enumerate(order)]
    used = sorted(set(order))
    return Decoder(
        name,
        hidden,
        sizes.vocab,
        tuple(kinds[kind] for kind in used),
        tuple(used.index(kind) for kind in order),
        tied=learned,
        final_norm=hidden * (2 if gpt else 1),
    )


def _hybrid(
    name: str,
    hidden: int,
    pattern: str,
    *,
    scan: tuple[int, int],
    heads: tuple[int, int],
    width: int,
    experts: tuple[int, int] = (0, 0),
    shared: int = 0,
    latent: int | None = None,
) -> Decoder:
    """Nemotron-H: layers of one mixer each, M a Mamba-2, * attention, - an MLP (squared ReLU, not gated), E experts.

    `scan` are the heads of 64 and the state of each, `heads` those of attention for queries and keys, of 128.
    """
    inner, groups = scan[0] * 64, 8
    mamba = Scan(
        (Linear(hidden, 2 * inner + 2 * groups * scan[1] + scan[0], "outputs"), Linear(inner, hidden, "inputs")),
        scan[0],
        64,
        scan[1],
        groups,
    )

    def mlp(inputs: int, size: int) -> Mlp:
        return Mlp(Linear(inputs, size, "outputs"), Linear(size, inputs, "inputs"), gated=False)

    kinds = {
        "M": Layer(mamba, None, hidden, 1),
        "*": Layer(grouped_attention(hidden, *heads, 128), None, hidden, 1),
        "-": Layer(None, mlp(hidden, width), hidden, 1),
    }
    if experts[0]:
        around = () if latent is None else (Linear(hidden, latent, "none"), Linear(latent, hidden, "none"))
        router = Linear(hidden, experts[0], "none")
        mixture = Mixture(mlp(latent or hidden, width), *experts, router, mlp(hidden, shared), around)
        kinds["E"] = Layer(None, mixture, hidden, 1)
    used = [kind for kind in kinds if kind in pattern]
    order = tuple(used.index(one) for one in pattern)
    return Decoder(name, hidden, 131_072, tuple(kinds[kind] for kind in used), order, final_norm=hidden)


HYBRIDS = {
    r"nemotron-?3-?nano": _hybrid(
        "nemotron3-nano",
        2688,
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        scan=(64, 128),
        heads=(32, 2),
        width=1856,
        experts=(128, 6),
        shared=3712,
    ),
    r"nemotron-?3-?super": _hybrid(
        "nemotron3-super",
        4096,
        "MEMEMEM*E" * 8 + "ME" * 8,
        scan=(128, 128),
        heads=(32, 2),
        width=2688,
        experts=(512, 22),
        shared=5376,
        latent=1024,
    ),
    r"nemotron-?h-?8b": _hybrid(
        "nemotron-h-8b", 4096, ("M-" * 6 + "*-")[:-1] * 4, scan=(128, 128), heads=(32, 8), width=21_504
    ),
    r"nemotron-?h-?56b": _hybrid(
        "nemotron-h-56b", 8192, ("M-" * 5 + "M*-M-")[:-3] * 9 + "M-" * 5, scan=(256, 256), heads=(64, 8), width=32_768
    ),
}
"""By how a name begins; sizes from the models' published configurations."""

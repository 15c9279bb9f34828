"""Sizes of well-known models, from their published configurations, so that a layout can be asked for without a file."""

from __future__ import annotations

from dataclasses import replace

from megarl.config import Experts, LatentAttention, ModelShape, Rope

_V3 = LatentAttention(1536, 512, 128, 64, 128)
_DEEPSEEK_V3 = replace(
    ModelShape("deepseek_v3", 61, 7168, 128, 128, 192, 18_432, 129_280, 163_840, 1e-6, Rope(), False),
    latent=_V3,
    experts=Experts(256, 8, 2048, tuple(range(3, 61)), shared_ffn=2048, score="sigmoid", correction_bias=True),
)


def _llama(layers: int, hidden: int, heads: int, ffn: int, tied: bool = False) -> ModelShape:
    """Llama 3.1 and 3.2."""
    return ModelShape("llama", layers, hidden, heads, 8, hidden // heads, ffn, 128_256, 131_072, 1e-5, Rope(5e5), tied)


def _qwen2(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, tied: bool = False) -> ModelShape:
    """Qwen2.5."""
    sizes = (layers, hidden, heads, kv_heads, 128 if hidden > 896 else 64, ffn, vocab, 32_768)
    return ModelShape("qwen2", *sizes, 1e-6, Rope(1e6), tied, qkv_bias=True)


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, tied: bool = False) -> ModelShape:
    return ModelShape("qwen3", layers, hidden, heads, 8, 128, ffn, 151_936, 40_960, 1e-6, Rope(1e6), tied, qk_norm=True)


def _qwen3_moe(layers: int, hidden: int, heads: int, ffn: int, width: int) -> ModelShape:
    dense = ModelShape(
        "qwen3_moe", layers, hidden, heads, 4, 128, ffn, 151_936, 40_960, 1e-6, Rope(1e6), False, qk_norm=True
    )
    return replace(dense, experts=Experts(128, 8, width, tuple(range(layers))))


KNOWN = {
    "llama3.2-1b": _llama(16, 2048, 32, 8192, tied=True),
    "llama3.2-3b": _llama(28, 3072, 24, 8192, tied=True),
    "llama3.1-8b": _llama(32, 4096, 32, 14_336),
    "llama3.1-70b": _llama(80, 8192, 64, 28_672),
    "llama3.1-405b": _llama(126, 16_384, 128, 53_248),
    "qwen2.5-0.5b": _qwen2(24, 896, 14, 2, 4864, 151_936, tied=True),
    "qwen2.5-1.5b": _qwen2(28, 1536, 12, 2, 8960, 151_936, tied=True),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 4, 18_944, 152_064),
    "qwen2.5-32b": _qwen2(64, 5120, 40, 8, 27_648, 152_064),
    "qwen2.5-72b": _qwen2(80, 8192, 64, 8, 29_568, 152_064),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12_288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17_408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25_600),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 6144, 768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 12_288, 1536),
    "moonlight-16b-a3b": replace(
        ModelShape("deepseek_v3", 27, 2048, 16, 16, 192, 11_264, 163_840, 8192, 1e-5, Rope(5e4), False),
        latent=replace(_V3, query_rank=None),
        experts=Experts(64, 6, 1408, tuple(range(1, 27)), shared_ffn=2816, score="sigmoid", correction_bias=True),
    ),
    "deepseek-v3": _DEEPSEEK_V3,
    "kimi-k2": replace(
        _DEEPSEEK_V3,
        heads=64,
        kv_heads=64,
        vocab=163_840,
        max_positions=131_072,
        experts=Experts(384, 8, 2048, tuple(range(1, 61)), shared_ffn=2048, score="sigmoid", correction_bias=True),
    ),
}

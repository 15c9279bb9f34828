"""The plugin's decoding equals SGLang's own, sequence by sequence."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

PLUGIN = Path(__file__).parents[2] / "cpu_development/sglang_kernel_stub/sglang_cpu_decode.py"


@pytest.fixture(scope="module")
def plugin() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sglang_cpu_decode_under_test", PLUGIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("sequences", "heads", "kv_heads"), [(1, 4, 4), (3, 4, 2), (70, 6, 2), (130, 3, 1)], ids=lambda n: str(n)
)
def test_equals_attention_of_each_sequence(plugin: ModuleType, sequences: int, heads: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    dim, slots = 8, 4096
    k_cache, v_cache = (torch.randn(slots, kv_heads, dim, generator=generator) for _ in range(2))
    lengths = torch.randint(1, 40, (sequences,), generator=generator)
    # rows of requests that have ended, and stale slots beyond each end, must not matter
    table = torch.randint(1, slots, (sequences + 5, 48), generator=generator)
    requests = torch.randperm(sequences + 5, generator=generator)[:sequences]
    query = torch.randn(sequences, heads, dim, generator=generator)
    output = plugin.decode(
        None, None, query, torch.empty_like(query), k_cache, v_cache, table, requests, lengths, scaling=0.3
    )
    for row in range(sequences):
        cached = table[requests[row], : lengths[row]]
        keys, values = (
            cache[cached].repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for cache in (k_cache, v_cache)
        )
        expected = scaled_dot_product_attention(query[row][:, None], keys, values, scale=0.3)[:, 0]
        torch.testing.assert_close(output[row], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{"is_cross_attn": True}, {"sliding_window_size": 128}])
def test_leaves_the_rest_to_sglang(plugin: ModuleType, options: dict[str, Any]) -> None:
    seen: dict[str, Any] = {}

    def original(*args: Any, **kwargs: Any) -> str:
        seen.update(kwargs)
        return "sglang's"

    x = torch.zeros(1, 1, 1)
    assert plugin.decode(original, None, x, x, x, x, x, x, x, **options) == "sglang's"
    assert seen == options

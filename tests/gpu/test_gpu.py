"""What can only be seen on a GPU: training in bfloat16, memory and speed.

`bash tests/gpu/run.sh` runs it and prints what it measures. Needs one CUDA device with 40 GB free, 10 GB of host
memory, 2 GB of disk for a model of random weights, and the environment of requirements.txt; no network. Should take a
few minutes on an H200. The model has the shape of Qwen2.5-0.5B, with the real vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from megarl.config import Layout, Model, Optimizer, read_model_shape
from megarl.model_engine import MicroBatch, ModelEngine, Moved, TokenSequence, specification, token_logprobs
from megarl.model_engine.flops import training_flops
from megarl.model_engine.logprobs import CHUNK_BYTES
from megarl.runtime import Links
from megarl.runtime.device import group_of_all
from tests.families import write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
]

CONFIG: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "architectures": ["Qwen2ForCausalLM"],
    "dtype": "bfloat16",
}
SEQUENCES, LENGTH, TOKENS_PER_MICROBATCH = 32, 1025, 8192
UPDATES = 8
MATMUL_SIZE = 8192
CYCLES = 5
GB = 1e9


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield device
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model(device: torch.device, tmp_path_factory: pytest.TempPathFactory) -> ModelEngine:
    return engine(write_random_model(tmp_path_factory.mktemp("gpu") / "model"), device)


def write_random_model(path: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen2Config(**CONFIG)).bfloat16().save_pretrained(path)
    return path


def engine(path: Path, device: torch.device) -> ModelEngine:
    return ModelEngine(
        Model(path=path, dtype="bfloat16"),
        read_model_shape(path),
        Layout(),
        device=device,
        seed=0,
        max_tokens_per_rank=TOKENS_PER_MICROBATCH,
        optimizer=Optimizer(learning_rate=2e-4),
        updates=UPDATES,
    )


def sequences() -> list[TokenSequence]:
    """Random tokens, the same each time, so that a model can learn them by heart."""
    tokens = torch.randint(CONFIG["vocab_size"], (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1))
    return [TokenSequence(row, 1) for row in tokens.tolist()]


def update(model: ModelEngine) -> tuple[float, float]:
    """Mean loss (nats a token) and gradient norm."""

    def loss(batch: MicroBatch, logprobs: Tensor, _: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        total = -(logprobs * batch.mask).sum() / (SEQUENCES * (LENGTH - 1))
        return total, {"loss": total.detach()}, {}

    done = model.update(sequences(), loss)
    return done.metrics.sums["loss"], done.grad_norm


def seconds(action: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def matmul_peak(device: torch.device) -> float:
    """Operations a second of this card's best of several large bfloat16 products."""
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    repeats = 20
    best = min(seconds(lambda: [torch.mm(a, b, out=out) for _ in range(repeats)]) for _ in range(5))
    return 2 * MATMUL_SIZE**3 * repeats / best


def test_training_in_bfloat16(model: ModelEngine, device: torch.device) -> None:
    peak = matmul_peak(device)
    done: list[tuple[float, float]] = []
    times = []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(UPDATES):
        times.append(seconds(lambda: done.append(update(model))))
    losses, norms = zip(*done, strict=True)
    fastest = min(times[1:])  # the first chooses kernels
    flops = SEQUENCES * training_flops(model._shape, LENGTH - 1)
    print(
        f"\nlosses {' '.join(f'{loss:.3f}' for loss in losses)}; gradient norms {' '.join(f'{n:.2f}' for n in norms)}"
    )
    print(
        f"update of {SEQUENCES * (LENGTH - 1)} tokens: {fastest:.3f} s, {flops / fastest / 1e12:.0f} TFLOP/s of"
        f" {peak / 1e12:.0f} that matmul reaches: MFU {flops / fastest / peak:.1%}; at most"
        f" {torch.cuda.max_memory_allocated() / GB:.1f} GB"
    )
    assert all(torch.isfinite(torch.tensor([*losses, *norms])))
    assert losses[-1] < losses[0] - 0.1
    assert 0 < flops / fastest / peak < 1


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("engine_modules", [True, False], ids=["transformer_engine", "megatron"])
def test_small_models_agree_with_transformers(
    family: str, engine_modules: bool, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grouped products too, of experts with few tokens or none."""
    if engine_modules and not specification.transformer_engine.HAVE_TE:
        pytest.skip("Transformer Engine is not installed")
    if not engine_modules:
        monkeypatch.setattr(specification, "_transformer_engine", lambda config: None)
    write_model(family, tmp_path)
    row = list(range(1, 20))
    other = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).to(device)
    logits = other(torch.tensor([row], device=device)).logits[0, :-1].float()
    expected = logits.log_softmax(-1).gather(1, torch.tensor(row[1:], device=device)[:, None])[:, 0]
    found = engine(tmp_path, device).logprobs([TokenSequence(row, 1)])
    torch.testing.assert_close(found, expected.detach().cpu(), atol=0.1, rtol=0)


def test_parts_leave_the_gpu_and_come_back(model: ModelEngine) -> None:
    before, logprobs = copies(model), model.logprobs(sequences()[:8])
    first = model.offload()  # takes host memory
    model.onload()
    cycles = [(model.offload(), model.onload()) for _ in range(CYCLES)]
    report(first, cycles)
    away, back = cycles[-1][0], cycles[-1][1]
    assert away.after.device_total == 0
    assert away.before.reserved - away.after.reserved >= 0.95 * away.moved_bytes, "torch keeps what was freed"
    assert back.after.device == first.before.device
    assert back.after.host == away.before.host == cycles[0][0].after.host
    assert back.after.reserved <= 1.05 * cycles[0][1].after.reserved, "the reserved memory grows"
    assert all(torch.equal(was, now) for was, now in zip(before, copies(model), strict=True))
    torch.testing.assert_close(model.logprobs(sequences()[:8]), logprobs)
    loss, _ = update(model)
    assert loss < -float(logprobs.mean()) + 0.1, "it has forgotten what it had learned"


def copies(model: ModelEngine) -> list[Tensor]:
    return [t.cpu() for bucket in model.weights.hf_buckets(1 << 28) for _, parts in bucket for t in parts]


def report(first: Moved, cycles: list[tuple[Moved, Moved]]) -> None:
    offload, onload = (min(c[i].seconds for c in cycles) for i in range(2))
    gradients = first.before.device["gradients"]  # these are not copied
    copied = first.moved_bytes - gradients
    print(
        f"\noffload: {copied / GB:.2f} GB copied, {gradients / GB:.2f} GB dropped; {first.seconds:.2f} s at first, then"
        f" {offload:.3f} s, {copied / offload / GB:.1f} GB/s; onload {onload:.3f} s, {copied / onload / GB:.1f} GB/s;"
        f" reserved {cycles[-1][0].before.reserved / GB:.1f} GB before, {cycles[-1][0].after.reserved / GB:.1f} away"
    )


def test_logprobs_need_no_memory_for_all_logits(device: torch.device) -> None:
    """Weight and hidden states, their gradients, the weight's in float32, and the buffers of one chunk."""
    tokens, hidden_size, vocab = 16_384, CONFIG["hidden_size"], CONFIG["vocab_size"]
    group = dist.group.WORLD
    assert group is not None
    before = torch.cuda.memory_allocated()
    weight = torch.empty(vocab, hidden_size, device=device, dtype=torch.bfloat16).normal_(std=hidden_size**-0.5)
    hidden = torch.empty(tokens, hidden_size, device=device, dtype=torch.bfloat16).normal_()
    targets = torch.randint(vocab, (tokens,), device=device)
    weight.requires_grad_()
    hidden.requires_grad_()

    def both_passes() -> None:
        weight.grad = hidden.grad = None
        logprobs, entropies = token_logprobs(hidden, weight, targets, vocab=vocab, temperature=1.0, group=group)
        (logprobs + entropies).sum().backward()

    both_passes()
    torch.cuda.reset_peak_memory_stats()
    took = seconds(both_passes)
    peak = torch.cuda.max_memory_allocated() - before
    states = 2 * (weight.nbytes + hidden.nbytes)
    bound = states + 2 * weight.nbytes + 3 * CHUNK_BYTES
    print(
        f"\nlogprobs of {tokens} tokens: {peak / GB:.2f} GB at most, bound {bound / GB:.2f}, of which weight, states"
        f" and gradients {states / GB:.2f}; all logits in float32 {4 * tokens * vocab / GB:.1f}; {took:.3f} s"
    )
    assert peak <= bound


def test_ranks_that_do_not_train_are_reached_by_nccl(device: torch.device) -> None:
    """One GPU has one rank, which sends to itself."""
    control: Any = SimpleNamespace(rank=0, world=1)
    links = Links(group_of_all(control, dist.HashStore(), device, timedelta(seconds=60)), device)
    given, found = torch.arange(1 << 20, device=device), torch.zeros(1 << 20, dtype=torch.int64, device=device)
    for work in links.start([(True, given, 0), (False, found, 0)]):
        work.wait(timedelta(seconds=60))
    assert torch.equal(given, found)

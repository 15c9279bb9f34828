"""Log-probabilities, entropies and divergences from hidden states, against log_softmax in float64; on one, two and four
ranks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes
from torch.profiler import ProfilerActivity, profile

from megarl.algorithms.losses import PolicyTokens, ppo
from megarl.model_engine.logprobs import token_divergences, token_logprobs

VOCAB, PADDED, TOKENS, HIDDEN = 11, 16, 7, 5

Inputs = tuple[Tensor, Tensor, Tensor]
"""Hidden states, weight and targets."""

Values = tuple[Tensor, Tensor]
"""Log-probabilities and entropies."""


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def inputs(scale: float = 1.0, *, tokens: int = TOKENS, vocab: int = VOCAB, padded: int = PADDED) -> Inputs:
    """Whatever touches the rows of padding becomes NaN."""
    generator = torch.Generator().manual_seed(5)
    hidden = scale * torch.randn(tokens, HIDDEN, generator=generator)
    weight = torch.randn(padded, HIDDEN, generator=generator)
    weight[vocab:] = float("nan")
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(vocab, (tokens,), generator=generator)


def exact(given: Inputs, *, vocab: int = VOCAB, temperature: float = 1.0) -> tuple[Inputs, Values]:
    """The inputs in float64, and the log-probabilities and entropies that torch makes of them."""
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in given[:2])
    log_p = torch.log_softmax(hidden @ weight[:vocab].T / temperature, -1)
    logprobs = log_p.gather(-1, given[2][:, None])[:, 0]
    return (hidden, weight, given[2]), (logprobs, -(log_p.exp() * log_p).sum(-1))


def reference_inputs(scale: float = 1.0, *, vocab: int = VOCAB, padded: int = PADDED) -> tuple[Tensor, Tensor]:
    """Hidden states, of another width, and weight of a reference model."""
    generator = torch.Generator().manual_seed(6)
    hidden = scale * torch.randn(TOKENS, HIDDEN + 1, generator=generator)
    weight = torch.randn(padded, HIDDEN + 1, generator=generator)
    weight[vocab:] = float("nan")
    return hidden.requires_grad_(), weight.requires_grad_()


def exact_divergences(
    given: Inputs, reference: tuple[Tensor, Tensor], *, vocab: int = VOCAB, temperature: float = 1.0
) -> tuple[Inputs, Tensor]:
    """The policy's inputs in float64, and the divergences in the form of the definition."""
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in given[:2])
    other, other_weight = (tensor.detach().double() for tensor in reference)
    log_p = torch.log_softmax(hidden @ weight[:vocab].T / temperature, -1)
    log_q = torch.log_softmax(other @ other_weight[:vocab].T / temperature, -1)
    return (hidden, weight, given[2]), (log_p.exp() * (log_p - log_q)).sum(-1)


def weighted_sum(values: Values, used: str = "logprobs+entropies") -> Tensor:
    """Another weight for each token; what is not used gets no gradient at all."""
    weights = torch.linspace(-1, 2, len(values[0]))
    terms = {"logprobs": values[0] * weights, "entropies": values[1] * (0.5 - weights)}
    return torch.stack([terms[name].sum() for name in used.split("+")]).sum()


def grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


@pytest.mark.parametrize("used", ["logprobs", "entropies", "logprobs+entropies"])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 3.0])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_values_and_gradients(
    group: dist.ProcessGroup, scale: float, temperature: float, chunk_tokens: int, used: str
) -> None:
    given = inputs(scale)
    chunk_bytes = chunk_tokens * 4 * VOCAB
    values = token_logprobs(*given, vocab=VOCAB, temperature=temperature, group=group, chunk_bytes=chunk_bytes)
    wanted, want_values = exact(given, temperature=temperature)
    atol = 4e-6 * max(scale / temperature, 1)
    for value, want in zip(values, want_values, strict=True):
        torch.testing.assert_close(value, want, rtol=1e-5, atol=atol, check_dtype=False)
    weighted_sum(values, used).backward()
    weighted_sum(want_values, used).backward()
    atol *= max(scale, 1) / min(temperature, 1)  # logits' gradients are multiplied by weight or hidden states
    for got, want in zip(given[:2], wanted[:2], strict=True):
        torch.testing.assert_close(grad(got)[:VOCAB], grad(want)[:VOCAB], rtol=1e-5, atol=atol, check_dtype=False)
    assert not grad(given[1])[VOCAB:].any(), "padding gets no gradient"


def test_a_published_vocabulary_over_a_padded_one(group: dist.ProcessGroup) -> None:
    vocab = 151_669
    given = inputs(vocab=vocab, padded=152_064)
    values = token_logprobs(*given, vocab=vocab, temperature=1.0, group=group, chunk_bytes=3 * 4 * vocab)
    wanted, want_values = exact(given, vocab=vocab)
    for value, want in zip(values, want_values, strict=True):
        torch.testing.assert_close(value, want, rtol=1e-6, atol=1e-5, check_dtype=False)
    weighted_sum(values).backward()
    weighted_sum(want_values).backward()
    # A float32 product over so many rows is no better: that of torch's own log_softmax errs as much.
    torch.testing.assert_close(grad(given[0]), grad(wanted[0]), rtol=0, atol=2e-3, check_dtype=False)
    torch.testing.assert_close(grad(given[1])[:vocab], grad(wanted[1])[:vocab], rtol=1e-4, atol=1e-5, check_dtype=False)


def test_probabilities_sum_to_one_and_the_inputs_are_not_written_to(group: dist.ProcessGroup) -> None:
    hidden, weight, _ = inputs(vocab=VOCAB)
    before = hidden.detach().clone(), weight.detach().clone()
    repeated, every_token = hidden.repeat_interleave(VOCAB, 0), torch.arange(VOCAB).repeat(TOKENS)
    logprobs, _ = token_logprobs(repeated, weight, every_token, vocab=VOCAB, temperature=1.0, group=group)
    torch.testing.assert_close(logprobs.exp().view(TOKENS, VOCAB).sum(-1), torch.ones(TOKENS))
    logprobs.sum().backward()
    torch.testing.assert_close((hidden.detach(), weight.detach()), before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("chunk_bytes", [50, 1 << 20])
def test_bfloat16_follows_float32(group: dist.ProcessGroup, chunk_bytes: int) -> None:
    """Logits are rounded to 8 bits, as the rollout engine's are: those of about 4 by 0.01."""
    hidden, weight, targets = inputs()
    given = hidden.detach().bfloat16().requires_grad_(), weight.detach().bfloat16().requires_grad_(), targets
    values = token_logprobs(*given, vocab=VOCAB, temperature=1.0, group=group, chunk_bytes=chunk_bytes)
    wanted, want_values = exact(given)
    for value, want in zip(values, want_values, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, want, rtol=0, atol=0.03, check_dtype=False)
    weighted_sum(values).backward()
    weighted_sum(want_values).backward()
    for got, want in zip(given[:2], wanted[:2], strict=True):
        assert grad(got).dtype == torch.bfloat16
        largest = float(grad(want).nan_to_num().abs().max())
        torch.testing.assert_close(
            grad(got)[:VOCAB], grad(want)[:VOCAB], rtol=0, atol=0.02 * largest, check_dtype=False
        )


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(group: dist.ProcessGroup, tokens: int) -> None:
    given = inputs(tokens=tokens)
    values = token_logprobs(*given, vocab=VOCAB, temperature=1.0, group=group)
    wanted, want_values = exact(given)
    for value, want in zip(values, want_values, strict=True):
        assert value.shape == (tokens,)
        torch.testing.assert_close(value, want, check_dtype=False)
    weighted_sum(values).backward()
    weighted_sum(want_values).backward()
    torch.testing.assert_close(grad(given[0]), grad(wanted[0]), rtol=1e-5, atol=1e-6, check_dtype=False)
    torch.testing.assert_close(grad(given[1])[:VOCAB], grad(wanted[1])[:VOCAB], rtol=1e-5, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_input_costs_no_gradient_and_leaves_the_others(group: dist.ProcessGroup, frozen: int) -> None:
    whole, part = inputs(), inputs()
    part[frozen].requires_grad_(False)
    for given in (whole, part):
        token_logprobs(*given, vocab=VOCAB, temperature=0.7, group=group)[0].sum().backward()
    assert part[frozen].grad is None
    assert torch.equal(grad(part[1 - frozen]), grad(whole[1 - frozen]))


def test_nothing_is_kept_without_grad(group: dist.ProcessGroup) -> None:
    with torch.no_grad():
        logprobs, entropies = token_logprobs(*inputs(), vocab=VOCAB, temperature=1.0, group=group)
    assert logprobs.grad_fn is None
    assert entropies.grad_fn is None


@pytest.mark.parametrize("chunk_tokens", [1, 3, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 3.0])
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_divergences_and_their_gradients(
    group: dist.ProcessGroup, scale: float, temperature: float, chunk_tokens: int
) -> None:
    given, reference = inputs(scale), reference_inputs(scale)
    chunk_bytes = chunk_tokens * 4 * VOCAB
    found = token_divergences(
        *given[:2], *reference, vocab=VOCAB, temperature=temperature, group=group, chunk_bytes=chunk_bytes
    )
    wanted, want = exact_divergences(given, reference, temperature=temperature)
    assert found.dtype == torch.float32
    atol = 1e-6 * max(scale / temperature, 1)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=atol, check_dtype=False)
    weights = torch.linspace(-1, 2, TOKENS)
    (found * weights).sum().backward()
    (want * weights).sum().backward()
    largest = max(float(want.detach().max()), 1.0) * max(scale, 1) / min(temperature, 1)
    for got, expected in zip(given[:2], wanted[:2], strict=True):
        torch.testing.assert_close(
            grad(got)[:VOCAB], grad(expected)[:VOCAB], rtol=1e-5, atol=2e-6 * largest, check_dtype=False
        )
    assert not grad(given[1])[VOCAB:].any(), "padding gets no gradient"
    assert all(tensor.grad is None for tensor in reference), "the reference gets none"


@pytest.mark.parametrize("temperature", [0.3, 0.7, 2.5])
def test_a_temperature_divides_the_logits_of_everything_that_is_learned_from(
    group: dist.ProcessGroup, temperature: float
) -> None:
    """What scales the hidden states is undone; and a loss's gradients are those of softmax(logits / temperature)."""
    given, (other, other_weight) = inputs(), reference_inputs()
    scaled = (temperature * given[0]).detach().requires_grad_(), *given[1:]
    hot: dict[str, Any] = {"vocab": VOCAB, "temperature": temperature, "group": group}
    plain = hot | {"temperature": 1.0}
    logprobs, entropies = token_logprobs(*scaled, **hot)
    divergences = token_divergences(*scaled[:2], temperature * other.detach(), other_weight, **hot)
    torch.testing.assert_close((logprobs, entropies), token_logprobs(*given, **plain))
    torch.testing.assert_close(divergences, token_divergences(*given[:2], other, other_weight, **plain))

    found = policy_objective(*token_logprobs(*given, **hot), token_divergences(*given[:2], other, other_weight, **hot))
    wanted, values = exact(given, temperature=temperature)
    again, exact_values = exact_divergences(given, (other, other_weight), temperature=temperature)
    want = policy_objective(*values, exact_values)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5, check_dtype=False)
    found.backward()
    want.backward()
    for i in (0, 1):
        total = grad(wanted[i]) + grad(again[i])
        torch.testing.assert_close(grad(given[i])[:VOCAB], total[:VOCAB], rtol=1e-5, atol=2e-5, check_dtype=False)


def policy_objective(logprobs: Tensor, entropies: Tensor, divergences: Tensor) -> Tensor:
    """PPO's loss with ratios on both sides of the clip, an entropy and a divergence."""
    gaps = torch.linspace(-0.5, 0.55, TOKENS)
    number = torch.zeros(TOKENS).long()
    ones = torch.ones(TOKENS)
    tokens = PolicyTokens(logprobs, logprobs.detach() - gaps, torch.linspace(-1, 2, TOKENS), ones, number, 1)
    return (ppo(tokens)[0] - 0.1 * entropies + 0.3 * divergences).sum()


HARD = {
    "ordinary": lambda p, q: (p, q),
    "close": lambda p, q: (p, p + 1e-3 * q),
    "policy sure": lambda p, q: (200 * p, q),
    "reference sure": lambda p, q: (p, 200 * q),
    "huge": lambda p, q: (1e5 * p, 1e5 * q),
    "huge and close": lambda p, q: (1e5 + p, 1e5 + q),
    "never sampled": lambda p, q: (p, q - 1e4 * (p == p.amax(-1, keepdim=True))),
}


@pytest.mark.parametrize("case", HARD)
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_divergences_of_hard_logits_to_1e_6(group: dist.ProcessGroup, case: str, temperature: float) -> None:
    """The logits are the weights themselves, so that they have no rounding of their own."""
    generator = torch.Generator().manual_seed(0)
    logits = HARD[case](*torch.randn(2, TOKENS, VOCAB, generator=generator))
    hidden, weights = torch.eye(TOKENS), [rows.T.contiguous().requires_grad_() for rows in logits]
    given = hidden, weights[0], torch.zeros(TOKENS).long()
    found = token_divergences(hidden, weights[0], hidden, weights[1], vocab=VOCAB, temperature=temperature, group=group)
    wanted, want = exact_divergences(given, (hidden, weights[1]), temperature=temperature)
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-7, check_dtype=False)
    found.sum().backward()
    want.sum().backward()
    atol = 1e-6 * max(float(want.max()), 1.0)  # the gradient is a difference to the divergence
    torch.testing.assert_close(grad(weights[0]), grad(wanted[1]), rtol=1e-6, atol=atol, check_dtype=False)


def test_a_model_does_not_diverge_from_itself(group: dist.ProcessGroup) -> None:
    hidden, weight, _ = inputs(30.0)
    same = hidden.detach(), weight.detach()
    found = token_divergences(hidden, weight, *same, vocab=VOCAB, temperature=0.6, group=group)
    found.sum().backward()
    assert not found.any()
    assert not grad(hidden).any()
    assert not grad(weight).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "chunks", "collective", "times"), [("logprobs", 2, "allreduce_", 2), ("divergences", 3, "allgather_", 1)]
)
def test_memory_and_collectives_do_not_grow_with_chunks(
    group: dist.ProcessGroup, kind: str, chunks: int, collective: str, times: int, dtype: torch.dtype
) -> None:
    """The peak is the gradients, some chunks of float32 logits, and a few numbers a token."""
    vocab, tokens, chunk_bytes = 4096, 512, 8 * 4 * 4096
    hidden, weight = (torch.randn(rows, 4, dtype=dtype).requires_grad_() for rows in (tokens, vocab))
    options: dict[str, Any] = {"vocab": vocab, "temperature": 0.9, "group": group, "chunk_bytes": chunk_bytes}
    targets, reference = torch.randint(vocab, (tokens,)), (hidden.detach().flip(0), weight.detach().flip(0))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        if kind == "logprobs":
            weighted_sum(token_logprobs(hidden, weight, targets, **options)).backward()
        else:
            token_divergences(hidden, weight, *reference, **options).sum().backward()
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    events = seen.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    peak = max(accumulate(change for _, change in changes))
    gradients = 4 * weight.numel() + hidden.nbytes + (weight.nbytes if dtype != torch.float32 else 0)
    most = gradients + chunks * chunk_bytes + 160 * tokens
    assert chunk_bytes < peak <= most, f"{peak / chunk_bytes:.2f} chunks"
    names = [event.name() for event in events if event.name().startswith("c10d::")]
    assert names == [f"c10d::{collective}"] * times


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_with_parts_agree_with_the_whole(ranks: int, tmp_path: Path) -> None:
    """Of 5 tokens in rows of two, the last of four ranks has padding alone."""
    # Only the server pays for importing torch and Megatron; the ranks are forked from it.
    multiprocessing.set_forkserver_preload(["megarl.model_engine.logprobs"])
    start_processes(compare_rank, (ranks, tmp_path / "store"), nprocs=ranks, start_method="forkserver")


def compare_rank(rank: int, ranks: int, store: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
    assert dist.group.WORLD is not None
    vocab = 5
    shard = -(-vocab // ranks)
    mine = slice(rank * shard, (rank + 1) * shard)
    hidden, weight, targets = inputs(3.0, vocab=vocab, padded=ranks * shard)
    wanted, want_values = exact((hidden, weight, targets), vocab=vocab, temperature=0.6)
    part = weight.detach()[mine].clone().requires_grad_()
    values = token_logprobs(
        hidden, part, targets, vocab=vocab, temperature=0.6, group=dist.group.WORLD, chunk_bytes=3 * 4 * shard
    )
    weighted_sum(values).backward()
    weighted_sum(want_values).backward()
    dist.all_reduce(grad(hidden))
    got = [*values, grad(hidden), grad(part)]
    for tensor, want in zip(got, [*want_values, grad(wanted[0]), grad(wanted[1])[mine]], strict=True):
        torch.testing.assert_close(tensor, want, rtol=1e-5, atol=2e-5, check_dtype=False)
    hidden, weight, targets = inputs(3.0, vocab=vocab, padded=ranks * shard)
    reference = reference_inputs(vocab=vocab, padded=ranks * shard)
    wanted, divergences = exact_divergences((hidden, weight, targets), reference, vocab=vocab, temperature=0.6)
    part = weight.detach()[mine].clone().requires_grad_()
    others = reference[0], reference[1].detach()[mine]
    found = token_divergences(
        hidden, part, *others, vocab=vocab, temperature=0.6, group=dist.group.WORLD, chunk_bytes=3 * 4 * shard
    )
    found.sum().backward()
    divergences.sum().backward()
    dist.all_reduce(grad(hidden))
    for tensor, want in zip(
        [found, grad(hidden), grad(part)], [divergences, grad(wanted[0]), grad(wanted[1])[mine]], strict=True
    ):
        torch.testing.assert_close(tensor, want, rtol=1e-5, atol=2e-5, check_dtype=False)
    dist.destroy_process_group()

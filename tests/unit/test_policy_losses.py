"""Policy losses, divergences and mismatch weights: values and gradients against loops in float64; and what must not
change them."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms import LOSSES, losses
from megarl.algorithms.divergence import adapted_coefficient, kl_estimate
from megarl.algorithms.losses import PolicyTokens
from megarl.algorithms.mismatch import importance_weights
from megarl.algorithms.preference import bradley_terry
from megarl.algorithms.shaping import overlong_penalty

fixed = settings(derandomize=True, deadline=None)  # the same examples each time; the machine may be busy

SEEDS = range(4)
OPTIONS: list[tuple[str, dict[str, float]]] = [
    ("ppo", {}),
    ("ppo", {"clip_low": 0.1, "clip_high": 0.3}),
    ("ppo", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 1.5}),
    ("gspo", {"clip_low": 0.05, "clip_high": 0.1}),
    ("gmpo", {"clip": 0.2}),
    ("cispo", {"clip_low": 0.1, "clip_high": 0.2}),
    ("sapo", {"temperature": 1.0, "temperature_negative": 1.5}),
    ("policy_gradient", {}),
]


@dataclass(frozen=True)
class Row:
    """One sequence: prompt tokens, of which nothing is learned, and a response."""

    prompt: int
    new: list[float]
    old: list[float]
    advantage: float


def rows_of(seed: int) -> list[Row]:
    source = random.Random(seed)
    rows = []
    for _ in range(6):
        old = [source.uniform(-4, -0.1) for _ in range(source.randint(0, 7))]
        new = [min(value + source.gauss(0, 0.3), -1e-3) for value in old]
        rows.append(Row(source.randint(1, 3), new, old, source.choice([0.0, source.gauss(0, 1)])))
    return rows


def packed(rows: list[Row], new: Tensor) -> PolicyTokens:
    """Where nothing is predicted, old log-probabilities are 0 and new ones whatever the model makes of padding."""
    old, advantages, mask, sequence, places = [], [], [], [], []
    for number, row in enumerate(rows):
        places += range(len(mask) + row.prompt, len(mask) + row.prompt + len(row.new))
        old += [0.0] * row.prompt + row.old
        advantages += [0.0] * row.prompt + [row.advantage] * len(row.new)
        mask += [0.0] * row.prompt + [1.0] * len(row.new)
        sequence += [number] * (row.prompt + len(row.new))
    logprobs = torch.full((len(mask),), -1000.0, dtype=torch.float64).index_put(
        (torch.tensor(places, dtype=torch.long),), new
    )
    values = (torch.tensor(x, dtype=torch.float64) for x in (old, advantages, mask))
    return PolicyTokens(logprobs, *values, torch.tensor(sequence), len(rows))


def leaf(rows: list[Row]) -> Tensor:
    return torch.tensor([value for row in rows for value in row.new], dtype=torch.float64, requires_grad=True)


def clamp(value: Tensor, low: float, high: float) -> Tensor:
    return torch.where(
        value < low, torch.full_like(value, low), torch.where(value > high, torch.full_like(value, high), value)
    )


# --- the objectives, one sequence at a time: the sum over its tokens, each sequence divided by its length


def ppo(
    new: Tensor, old: Tensor, a: float, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = math.inf
) -> Tensor:
    total = new.new_zeros(())
    for t in range(len(new)):
        ratio = (new[t] - old[t]).exp()
        gain = torch.min(ratio * a, clamp(ratio, 1 - clip_low, 1 + clip_high) * a)
        if a < 0 and math.isfinite(dual_clip):
            gain = torch.max(gain, torch.tensor(dual_clip * a, dtype=torch.float64))
        total = total - gain / len(new)
    return total


def gspo(new: Tensor, old: Tensor, a: float, *, clip_low: float, clip_high: float) -> Tensor:
    ratio = ((new - old).sum() / len(new)).exp()
    return -torch.min(ratio * a, clamp(ratio, 1 - clip_low, 1 + clip_high) * a)


def gmpo(new: Tensor, old: Tensor, a: float, *, clip: float) -> Tensor:
    """The clipped ratio of a token is the one that makes r A smaller; all within exp(-clip) and exp(clip)."""
    product = new.new_ones(())
    for t in range(len(new)):
        ratio = (new[t] - old[t]).exp()
        bounded = clamp(ratio, math.exp(-clip), math.exp(clip))
        product = product * (torch.min(ratio, bounded) if a > 0 else torch.max(ratio, bounded))
    return -a * product ** (1 / len(new))


def cispo(new: Tensor, old: Tensor, a: float, *, clip_low: float, clip_high: float) -> Tensor:
    weights = [
        min(max(math.exp(float(n.detach()) - float(o)), 1 - clip_low), 1 + clip_high)
        for n, o in zip(new, old, strict=True)
    ]
    return -sum((w * a * n for w, n in zip(weights, new, strict=True)), new.new_zeros(())) / len(new)


def sapo(new: Tensor, old: Tensor, a: float, *, temperature: float, temperature_negative: float) -> Tensor:
    t = temperature if a > 0 else temperature_negative
    return -sum(
        (4 / t * a / (1 + (-t * ((n - o).exp() - 1)).exp()) for n, o in zip(new, old, strict=True)), new.new_zeros(())
    ) / len(new)


def policy_gradient(new: Tensor, old: Tensor, a: float) -> Tensor:
    return -(a * new).mean()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=[f"{n}-{len(o)}" for n, o in OPTIONS])
def test_values_and_gradients_are_those_of_the_equations(name: str, options: dict[str, Any], seed: int) -> None:
    rows = rows_of(seed)
    new, again = leaf(rows), leaf(rows)
    found, cut = getattr(losses, name)(packed(rows, new), **options)
    weights = torch.cat(
        [new.new_tensor([0.0] * row.prompt + [1 / max(len(row.new), 1)] * len(row.new)) for row in rows]
    )
    total = (found * weights).sum()
    parts = list(again.split([len(row.new) for row in rows]))
    one = globals()[name]
    wanted = sum(
        (
            one(part, torch.tensor(row.old, dtype=torch.float64), row.advantage, **options)
            for row, part in zip(rows, parts, strict=True)
            if row.new
        ),
        torch.zeros((), dtype=torch.float64),
    )
    torch.testing.assert_close(total, wanted, rtol=1e-6, atol=1e-7)
    total.backward()
    wanted.backward()
    torch.testing.assert_close(new.grad, again.grad, rtol=1e-6, atol=1e-7)
    assert cut.shape == found.shape
    assert set(cut.tolist()) <= {0.0, 1.0}


# --- what changes nothing


def corrected(level: str, action: str, tokens: PolicyTokens) -> losses.Loss:
    """The policy gradient of tokens that another engine has sampled; of how likely they were there, old ones tell."""
    sampled = (tokens.old_logprobs + 0.5 * torch.sin(7 * tokens.old_logprobs)) * tokens.mask
    weights, outside = importance_weights(tokens, sampled, level=level, action=action, low=0.7, high=1.3)  # type: ignore[arg-type]
    return losses.policy_gradient(tokens)[0] * weights, outside


EVERY = {f"{name}-{len(options)}": partial(LOSSES[name], **options) for name, options in OPTIONS} | {
    f"{level}-{action}": partial(corrected, level, action)
    for level in ("token", "sequence", "geometric")
    for action in ("truncate", "mask", "reject")
}
every = pytest.mark.parametrize("name", EVERY)


def row_of(prompt: int, tokens: list[tuple[float, float]], advantage: float) -> Row:
    return Row(prompt, [old + gap for old, gap in tokens], [old for old, _ in tokens], advantage)


batches = st.lists(
    st.builds(
        row_of,
        st.integers(1, 3),
        st.lists(st.tuples(st.floats(-4, -1), st.floats(-0.9, 0.9)), max_size=5),
        st.sampled_from([-1.3, 0.0, 0.6]),
    ),
    min_size=1,
    max_size=6,
)
sources = st.integers(0, 1000).map(random.Random)


def token_weights(rows: list[Row]) -> Tensor:
    """Some weight of each response token, which is not the same everywhere; 0 of all others."""
    weights = [[0.0] * row.prompt + [0.3 + abs(old) for old in row.old] for row in rows]
    return torch.tensor([weight for row in weights for weight in row], dtype=torch.float64)


def part_of(tokens: PolicyTokens, own: Tensor, total: Callable[[Tensor], Tensor]) -> PolicyTokens:
    fields = (tokens.logprobs, tokens.old_logprobs, tokens.advantages, tokens.mask, tokens.sequence)
    return PolicyTokens(*(field[own] for field in fields), tokens.sequences, total)


def on_ranks(count: int, run: Callable[[int, Callable[[Tensor], Tensor]], Tensor]) -> list[Tensor]:
    """What each rank's `run` gives; each is a thread, and given the sum over all of them as ranks would be."""
    barrier, shared = threading.Barrier(count, timeout=20), [torch.empty(0)] * count

    def total(rank: int, values: Tensor) -> Tensor:
        shared[rank] = values
        barrier.wait()
        summed = torch.stack(shared).sum(0)
        barrier.wait()
        return summed

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda rank: run(rank, partial(total, rank)), range(count)))


def assert_same(found: Tensor, new: Tensor, wanted: Tensor, again: Tensor) -> None:
    """Two losses have one value and one gradient."""
    torch.testing.assert_close(found, wanted)
    found.backward()
    wanted.backward()
    torch.testing.assert_close(new.grad, again.grad)


@every
@settings(fixed, max_examples=8)
@given(batches, st.integers(1, 4), st.integers(1, 3), sources)
def test_order_micro_batches_and_ranks_do_not_matter(
    name: str, rows: list[Row], parts: int, ranks: int, source: random.Random
) -> None:
    """Sequences lie anywhere in any of the micro-batches, and their tokens on any of the context-parallel ranks."""
    function, new, again = EVERY[name], leaf(rows), leaf(rows)
    responses = list(new.split([len(row.new) for row in rows]))
    owners = [source.randrange(parts) for _ in rows]
    found = []
    for part in range(parts):
        numbers = [number for number, owner in enumerate(owners) if owner == part]
        source.shuffle(numbers)
        mine = [rows[number] for number in numbers] or [Row(1, [], [], 0.0)]  # as of padding alone
        tokens = packed(mine, torch.cat([new[:0], *(responses[number] for number in numbers)]))
        weights, rank_of = token_weights(mine), torch.tensor([source.randrange(ranks) for _ in tokens.mask])

        def run(rank: int, total: Callable[[Tensor], Tensor], *, given: Any = (tokens, weights, rank_of)) -> Tensor:
            tokens, weights, rank_of = given
            own = (rank_of == rank).nonzero()[:, 0]
            return (function(part_of(tokens, own, total))[0] * weights[own]).sum()

        found += on_ranks(ranks, run)
    wanted = (function(packed(rows, again))[0] * token_weights(rows)).sum()
    assert_same(torch.stack(found).sum(), new, wanted, again)


@every
@settings(fixed, max_examples=8)
@given(batches, st.integers(0, 9), st.sampled_from([1.0, 1e4, 1e30]), sources)
def test_padding_does_not_matter_whatever_it_holds(
    name: str, rows: list[Row], count: int, size: float, source: random.Random
) -> None:
    """Between any tokens of any sequence, or as a sequence of its own."""
    function, new, again = EVERY[name], leaf(rows), leaf(rows)
    tokens, weights = packed(rows, new), token_weights(rows)
    length = len(weights) + count
    kept = torch.tensor(sorted(source.sample(range(length), len(weights))), dtype=torch.long)

    def padded(values: Tensor, size: float) -> Tensor:
        noise = [size * source.uniform(-1, 1) for _ in range(length)]
        return torch.tensor(noise, dtype=values.dtype).index_put((kept,), values)

    numbers = torch.tensor([source.randrange(len(rows) + 1) for _ in range(length)])
    logprobs = padded(tokens.logprobs, 1e3)
    logprobs.retain_grad()
    inputs = PolicyTokens(
        logprobs,
        padded(tokens.old_logprobs, size),
        padded(tokens.advantages, 1.0),
        padded(tokens.mask, 0.0),
        numbers.index_put((kept,), tokens.sequence),
        len(rows) + 1,
    )
    found, cut = function(inputs)
    expected, expected_cut = function(packed(rows, again))
    torch.testing.assert_close((found[kept], cut[kept]), (expected, expected_cut))
    assert_same((found * padded(weights, 0.0)).sum(), new, (expected * weights).sum(), again)
    assert logprobs.grad is not None
    assert not logprobs.grad[inputs.mask == 0].any(), "NaN is not 0 either"


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=[f"{n}-{len(o)}" for n, o in OPTIONS])
@settings(fixed, max_examples=8)
@given(batches)
def test_on_fresh_samples_all_are_the_policy_gradient(name: str, options: dict[str, Any], batch: list[Row]) -> None:
    """Ratios are exactly 1, nothing is cut, and the gradient is -A for each token."""
    rows = [Row(row.prompt, row.old, row.old, row.advantage) for row in batch]
    new = leaf(rows)
    tokens = packed(rows, new)
    assert torch.equal(tokens.log_ratio, torch.zeros_like(tokens.log_ratio))
    found, cut = getattr(losses, name)(tokens, **options)
    assert not cut.any()
    found.sum().backward()
    wanted = torch.tensor([-row.advantage for row in rows for _ in row.new], dtype=torch.float64)
    torch.testing.assert_close(new.grad, wanted)


def test_every_loss_is_tested() -> None:
    assert {name for name, _ in OPTIONS} == set(LOSSES)


# --- values


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_value_loss_is_the_larger_of_two(clip: float | None) -> None:
    source = random.Random(0)
    triples = [(source.gauss(0, 1), source.gauss(0, 1), source.gauss(0, 1)) for _ in range(50)]
    value, old, target = (torch.tensor(x, dtype=torch.float64) for x in zip(*triples, strict=True))
    found, _ = losses.value_loss(value, old, target, clip=clip)
    for v, o, r, loss in zip(value.tolist(), old.tolist(), target.tolist(), found.tolist(), strict=True):
        near = v if clip is None else min(max(v, o - clip), o + clip)
        assert loss == pytest.approx(max((v - r) ** 2, (near - r) ** 2) / 2)


# --- divergence


def test_the_estimates_of_the_divergence() -> None:
    """Over all tokens of a small distribution, weighted by probability: k1 and k3 are exact, k3 never negative."""
    generator = torch.Generator().manual_seed(0)
    policy, reference = torch.randn(2, 9, generator=generator, dtype=torch.float64).log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((policy.exp() * kl_estimate(policy, reference, kind)).sum(), exact)
    assert (kl_estimate(policy, reference, "k3") >= 0).all()
    assert kl_estimate(policy, reference, "k2").tolist() == pytest.approx(
        [(p - q) ** 2 / 2 for p, q in zip(policy.tolist(), reference.tolist(), strict=True)]
    )


def test_the_gradient_of_k2_is_that_of_the_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(9, generator=generator, dtype=torch.float64).log_softmax(-1)
    policy = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    (found,) = torch.autograd.grad((policy.detach().exp() * kl_estimate(policy, reference, "k2")).sum(), logits)
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize(("kl", "factor"), [(6.0, 1.0), (6.6, 1.01), (60.0, 1.02), (0.0, 0.98), (5.4, 0.99)])
def test_the_coefficient_follows_the_target(kl: float, factor: float) -> None:
    assert adapted_coefficient(0.5, kl, target=6.0, horizon=1000.0, sequences=100) == pytest.approx(0.5 * factor)


# --- mismatch


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("action", ["truncate", "mask", "reject"])
def test_weights_of_what_another_engine_sampled(level: Any, action: Any, seed: int) -> None:
    rows = rows_of(seed)
    tokens = packed(rows, leaf(rows))
    noise = torch.randn(len(tokens.mask), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    sampled = tokens.old_logprobs + 0.4 * noise * tokens.mask
    low, high = 0.7, 1.3
    weights, outside = importance_weights(tokens, sampled, level=level, action=action, low=low, high=high)
    for number, row in enumerate(rows):
        own = ((tokens.sequence == number) & (tokens.mask > 0)).nonzero()[:, 0].tolist()
        logs = [float(tokens.old_logprobs[t] - sampled[t]) for t in own]
        for t, log in zip(own, logs, strict=True):
            ratio = math.exp({"token": log, "sequence": sum(logs), "geometric": sum(logs) / len(logs)}[level])
            inside = low <= ratio <= high
            wanted = {"truncate": min(ratio, high), "mask": ratio * inside, "reject": float(inside)}[action]
            assert float(weights[t]) == pytest.approx(wanted)
            assert bool(outside[t]) == (ratio > high if action == "truncate" else not inside)
        assert len(own) == len(row.new)
    assert not weights[tokens.mask == 0].any()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@settings(fixed, max_examples=8)
@given(batches)
def test_where_both_agree_every_weight_is_one(level: Any, rows: list[Row]) -> None:
    tokens = packed(rows, leaf(rows))
    for action in ("truncate", "mask", "reject"):
        weights, outside = importance_weights(tokens, tokens.old_logprobs, level=level, action=action)  # type: ignore[arg-type]
        assert torch.equal(weights, tokens.mask)
        assert not outside.any()


# --- lengths, preferences


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (60, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (120, -1.0)]
)
def test_overlong_answers_are_punished_softly(length: int, penalty: float) -> None:
    assert float(overlong_penalty(torch.tensor([length]), limit=100, buffer=20)) == pytest.approx(penalty)


def test_preferences() -> None:
    source = random.Random(0)
    for _ in range(20):
        chosen, rejected, margin, centring = (source.gauss(0, 2) for _ in range(4))
        found = bradley_terry(
            torch.tensor([chosen], dtype=torch.float64),
            torch.tensor([rejected], dtype=torch.float64),
            margin,
            centring=centring,
        )
        wanted = math.log1p(math.exp(-(chosen - rejected - margin))) + centring * (chosen + rejected) ** 2
        assert float(found) == pytest.approx(wanted)

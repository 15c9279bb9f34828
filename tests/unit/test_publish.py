"""Publication against an engine that keeps what it is sent, and engines that do it wrong."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.checkpoint_engine import PublishError, check_agreement, clear_score_bias, publish
from megarl.checkpoint_engine.publish import checksum
from megarl.config import ModelShape, Rope
from megarl.weights import model_parameters

SHAPE = ModelShape("qwen3", 2, 16, 4, 2, 4, 24, 65, 64, 1e-6, Rope(), True, qk_norm=True)


class Source:
    """A few parameters a bucket."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.parameters = [(p, [torch.randn(size) for size in p.hf_shapes]) for p in model_parameters(SHAPE, 1)]

    def hf_buckets(self, limit_bytes: int) -> Iterator[list[Any]]:
        for start in range(0, len(self.parameters), 3):
            yield self.parameters[start : start + 3]


class Engine:
    """Holds the fused shards of `ranks` ranks, as SGLang would; `spoil` names a parameter that it gets wrong."""

    def __init__(self, ranks: int, spoil: str = "") -> None:
        self.ranks, self.spoil, self.calls, self.tensors = ranks, spoil, [], {}  # type: ignore[var-annotated]

    def begin_update(self) -> None:
        self.calls.append("begin")

    def load_bucket(self, payloads: list[bytes], version: int) -> None:
        assert len(payloads) == self.ranks
        self.calls.append(version)
        self.tensors.update(pickle.loads(payloads[-1]))  # noqa: S301 (what SGLang does)

    def end_update(self) -> None:
        self.calls.append("end")

    def checksums(self) -> list[dict[str, str]]:
        sums: list[dict[str, str]] = [{} for _ in range(self.ranks)]
        for parameter in model_parameters(SHAPE, 1):
            parts = [self.tensors[name] + (parameter.engine == self.spoil) for name in parameter.hf]
            for rank in range(self.ranks):
                sums[rank][parameter.engine] = checksum(parameter.layout.engine_shard(parts, rank, self.ranks))
        return sums


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_buckets_arrive_between_begin_and_end(ranks: int) -> None:
    source, engine = Source(), Engine(ranks)
    digest = publish(source, engine, version=7, engine_ranks=ranks, device="cpu")
    assert digest == publish(source, Engine(ranks), version=7, engine_ranks=ranks, device="cpu")
    assert engine.calls == ["begin", *[7] * -(-len(source.parameters) // 3), "end"]
    for parameter, parts in source.parameters:
        for name, part in zip(parameter.hf, parts, strict=True):
            assert torch.equal(engine.tensors[name], part)


def test_a_wrong_tensor_is_named() -> None:
    spoiled = Engine(2, spoil="model.layers.1.mlp.gate_up_proj.weight")
    with pytest.raises(PublishError, match=r"version 3: rank 0 .* in 1 of 18 .*layers\.1\.mlp\.gate_up_proj"):
        publish(Source(), spoiled, version=3, engine_ranks=2, device="cpu")


def test_on_gpus_the_engines_are_compared_with_one_another() -> None:
    good, bad = Engine(1), Engine(1, spoil="model.norm.weight")
    digests = ["", *(publish(Source(), e, version=3, engine_ranks=1, device="cuda") for e in (good, bad))]
    with pytest.raises(PublishError, match=r"ranks \[1\] and \[2\]"):
        check_agreement(digests, 3)
    check_agreement(["", digests[1], digests[1]], 3)


def test_what_has_no_known_place_in_the_engine_is_not_compared() -> None:
    """The rest still is: here one parameter of the table has no engine name, and the engine holds it all the same."""
    source = Source()
    parameter, parts = source.parameters[0]
    source.parameters[0] = replace(parameter, engine=None), parts
    assert publish(source, Engine(2, spoil=parameter.engine), version=1, engine_ranks=2, device="cpu")
    with pytest.raises(PublishError, match=r"in 1 of 17 .*norm"):
        publish(source, Engine(2, spoil="model.norm.weight"), version=1, engine_ranks=2, device="cpu")


class Scorer(Engine):
    """A reward model's engine, whose `bias` is what it was made with or sent; None if it has none."""

    def __init__(self, ranks: int, bias: Tensor | None) -> None:
        super().__init__(ranks)
        self.tensors = {} if bias is None else {"score.bias": bias}

    def checksums(self) -> list[dict[str, str]]:
        return [{name: checksum(tensor) for name, tensor in self.tensors.items()}] * self.ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_bias_of_a_score_that_no_checkpoint_has_is_cleared(ranks: int) -> None:
    engine = Scorer(ranks, torch.ones(1))
    clear_score_bias(engine, torch.float32, "cpu")
    assert (engine.tensors["score.bias"].item(), engine.calls) == (0.0, ["begin", 0, "end"])


def test_where_a_score_has_no_bias_nothing_is_sent() -> None:
    engine = Scorer(1, None)
    clear_score_bias(engine, torch.float32, "cpu")
    assert engine.calls == []


def test_a_bias_that_is_not_cleared_is_an_error() -> None:
    engine = Scorer(1, torch.ones(1, dtype=torch.bfloat16))
    engine.load_bucket = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(PublishError, match="is not 0 in its engine"):
        clear_score_bias(engine, torch.bfloat16, "cpu")


def test_a_rank_without_an_engine_only_takes_part() -> None:
    assert publish(Source(), None, version=1, engine_ranks=1, device="cpu") == ""


def test_checksum_is_the_head_of_sha256() -> None:
    tensor = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert checksum(tensor.T) == hashlib.sha256(tensor.T.contiguous().numpy().tobytes()).hexdigest()[:16]

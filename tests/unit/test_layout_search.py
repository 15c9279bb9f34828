"""The search finds what an exhaustive one finds, adds phases up as modes do, and says why nothing fits."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from megarl.config import Layout, ModelShape, RecipeError, engine_problems, layout_problems
from megarl.layout import (
    GENERATIONS,
    KNOWN,
    MEGARL,
    Ask,
    Choice,
    Counts,
    Lengths,
    Machine,
    Request,
    Rollouts,
    Training,
    Work,
    decoder,
    memory,
    planned,
    search,
    step_time,
    trainings,
)
from megarl.layout.search import _Joint
from megarl.simulator import GPUS

QWEN3_8B = KNOWN["qwen3-8b"]
H100 = Machine(GPUS["H100"], GENERATIONS["H100"])
EQUAL = Work((8192,) * 64, linear=40_000)


def rollouts(shape: ModelShape = QWEN3_8B, prompts: int = 16, cap: int = 1024, **mode: Any) -> Work:
    groups = Lengths().responses(cap, prompts, 8)
    lengths = tuple(group.prompt + length for group in groups.groups for length in group.lengths)
    linear = shape.active_parameters / (shape.layers * shape.heads * shape.head_dim)
    return Work(lengths, linear, scored=1, frozen=1, rollouts=Rollouts(groups, **mode))


def request(work: Work, nodes: int = 2, shape: ModelShape = QWEN3_8B, **more: Any) -> Request:
    return Request(shape, H100, nodes, 8, work, **more)


def test_it_finds_the_best_of_all_trainings() -> None:
    ask, times = Ask(QWEN3_8B, H100, 16, EQUAL), []
    model, powers = decoder(QWEN3_8B), (1, 2, 4, 8, 16)
    for tensor, pipeline, interleave, context in product(powers[:4], powers, (1, 2, 3, 4, 6), powers[:4]):
        for recompute in ("none", "selective", "full"):
            layout = Layout(
                tensor=tensor,
                pipeline=pipeline,
                interleave=interleave,
                context=context,
                recompute=recompute,  # type: ignore[arg-type]
                overlap=True,
            )
            if layout_problems(layout, QWEN3_8B, 16):
                continue
            software = replace(MEGARL, data_overlap=True)
            base = Training(model, layout, 16, 8192, 64, sequence_parallel=tensor > 1, software=software)
            for size in (*powers, 32, 64):
                one = replace(base, micro_batch=size)
                if interleave > 1 and one.micro_batches % pipeline:
                    continue
                if size * one.data <= 64 and max(part.total for part in memory(one)) <= ask.room:
                    times.append(step_time(one, H100).seconds)
    found = trainings(ask, Counts())
    assert found[0].seconds == pytest.approx(min(times))
    seconds = [one.seconds for one in found]
    assert seconds == sorted(seconds)
    assert all(one.memory.total <= ask.room for one in found)


def test_every_training_is_counted_once() -> None:
    counts = Counts()
    found = trainings(Ask(QWEN3_8B, H100, 16, EQUAL), counts)
    assert counts.asked == counts.too_large + len(found)
    assert len({(one.training.layout, one.max_tokens) for one in found}) == len(found)
    rounds = [one.training for one in found if one.training.layout.interleave > 1]
    assert rounds
    assert not any(one.micro_batches % one.layout.pipeline for one in rounds), "stages take turns in groups"
    layouts = {one.training.layout.model_copy(update={"recompute": "none"}).model_dump_json() for one in found}
    assert len(layouts) <= counts.layouts - counts.indivisible


def test_what_is_fixed_stays() -> None:
    fixed = {"tensor": 4, "recompute": "full", "overlap": False, "max_tokens_per_rank": 16_384}
    found = trainings(Ask(QWEN3_8B, H100, 16, EQUAL, fixed=fixed), Counts())
    assert {(one.training.layout.tensor, one.training.layout.recompute, one.max_tokens) for one in found} == {
        (4, "full", 16_384)
    }
    assert not any(one.training.layout.overlap or one.training.software.data_overlap for one in found)
    chosen = search(request(rollouts(), fixed={"placement": "disaggregated", "train_ranks": 8, "tensor_parallel": 4}))
    assert {(one.placement, one.train_gpus, one.serving and one.serving.tensor) for one in chosen.ranked} == {
        ("disaggregated", 8, 4)
    }


def test_uneven_sequences_take_longer_than_even_ones() -> None:
    """As many tokens and as much attention, but one sequence is most of a rank's work."""
    fixed = {"tensor": 2, "pipeline": 1, "context": 1}
    even = trainings(Ask(QWEN3_8B, H100, 8, Work((2048,) * 16, 40_000), fixed=fixed), Counts())[0]
    uneven = Work((16_384, *(1024,) * 16), 40_000)
    found = trainings(Ask(QWEN3_8B, H100, 8, uneven, fixed=fixed), Counts())[0]
    assert found.seconds > 1.7 * even.seconds


def test_a_critic_and_a_reference_need_memory_and_time() -> None:
    sizes = {"tensor": 8, "pipeline": 2, "interleave": 1, "context": 1, "recompute": "none"}
    ask = Ask(QWEN3_8B, H100, 16, EQUAL, fixed={**sizes, "max_tokens_per_rank": 8192})
    (plain,) = trainings(ask, Counts())
    (both,) = trainings(replace(ask, work=replace(EQUAL, critic=True, frozen=1, scored=3)), Counts())
    held = plain.memory
    assert both.memory.others == pytest.approx(2 * held.weights + held.gradients + held.optimizer)
    assert both.update_s == pytest.approx(2 * plain.update_s, rel=0.1)
    assert plain.score_s == 0
    assert both.score_s == pytest.approx(plain.update_s, rel=0.35), "three forward passes are about one update"


@pytest.mark.parametrize("mode", [{}, {"max_lag": 1}, {"max_lag": 4, "interrupt": True}])
def test_phases_add_up_as_placements_and_modes_do(mode: dict[str, Any]) -> None:
    found = search(request(rollouts(**mode)))
    for one in found.ranked:
        phases = one.phases
        training = phases.score + phases.update
        together = one.placement == "disaggregated" and mode
        busy = max(phases.rollout, training) if together else phases.rollout + training
        assert one.seconds == pytest.approx(busy + phases.publish)
        assert one.serving is not None
        assert not engine_problems(QWEN3_8B, one.serving.tensor, one.serving.expert)
        engines = one.serving.count * one.serving.tensor
        assert engines == (16 if one.placement == "colocated" else 16 - one.train_gpus)
        if one.placement == "colocated":
            used = one.trained.memory.total + one.serving.fraction * H100.gpu.memory
            assert used < 1.06 * H100.gpu.memory
    if mode == {"max_lag": 1}:
        assert {one.placement for one in found.ranked} == {"disaggregated"}, "the recipe would be refused"


def test_one_of_each_kind_is_ranked_and_none_that_is_refused() -> None:
    def check(choice: Choice) -> None:
        if choice.placement == "colocated":
            raise RecipeError("not together")

    ranked = search(request(rollouts(), check=check)).ranked
    assert {one.placement for one in ranked} == {"disaggregated"}
    assert len({one.kind for one in ranked}) == len(ranked)
    with pytest.raises(ValueError, match="not together"):
        search(request(rollouts(), check=check, fixed={"placement": "colocated"}))


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2", "llama3.1-405b"])
def test_many_nodes_are_split_so_that_the_model_can_be_divided(name: str) -> None:
    shape = KNOWN[name]
    splits = _Joint(request(rollouts(), nodes=128, shape=shape))._splits()
    assert len(splits) == 12
    useful = [split for split in splits if math.gcd(split, shape.experts.count if shape.experts else shape.layers) >= 6]
    assert len(useful) >= 8


def test_making_room_for_each_other_helps() -> None:
    stays = search(request(rollouts(), fixed={"placement": "colocated"})).ranked[0]
    moves = search(request(rollouts(), fixed={"placement": "colocated"}, offload=True)).ranked[0]
    assert moves.phases.offload > 0 == stays.phases.offload
    assert stays.serving is not None
    assert moves.serving is not None
    assert moves.serving.fraction > stays.serving.fraction


def test_the_publication_is_that_of_the_reshard_plan() -> None:
    asked = request(rollouts())
    best = search(asked).ranked[0]
    exact = planned(asked, best)
    assert exact.phases.rollout == best.phases.rollout
    assert 0 < exact.phases.publish < 10 * best.phases.publish


def test_a_large_mixture_is_searched_with_its_experts() -> None:
    shape = KNOWN["deepseek-v3"]
    counts = Counts()
    work = Work((4096,) * 2048, 40_000)
    best = trainings(Ask(shape, H100, 512, work), counts)[0].training.layout
    assert best.expert > 8, "671e9 parameters do not fit otherwise"
    assert counts.asked > 500


def test_the_impossible_is_refused_with_what_would_do() -> None:
    with pytest.raises(ValueError, match=r"no layout fits: .* GB on a GPU, which has 81 GB; 2 nodes are enough"):
        search(Request(QWEN3_8B, H100, 1, 1, EQUAL))
    with pytest.raises(ValueError, match="over 16 GPUs: .*tensor: 5 does not divide the model's attention heads"):
        search(request(EQUAL, fixed={"tensor": 5}))
    with pytest.raises(ValueError, match="not with engines that hold the model and the longest response"):
        search(request(rollouts(), fixed={"placement": "colocated", "mem_fraction_static": 0.01}))
    with pytest.raises(ValueError, match="no engines can be made of 16 GPUs"):
        search(request(rollouts(), fixed={"tensor_parallel": 3}))
    with pytest.raises(ValueError, match=r"without mode\.interrupt needs GPUs of its own"):
        search(request(rollouts(max_lag=1), fixed={"placement": "colocated"}))


def test_better_plans_come_first() -> None:
    ranked: tuple[Choice, ...] = search(request(rollouts())).ranked
    assert [one.seconds for one in ranked] == sorted(one.seconds for one in ranked)
    assert ranked[0].seconds < search(request(rollouts(), nodes=1)).ranked[0].seconds

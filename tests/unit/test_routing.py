"""Experts lie at their tokens in a micro-batch, and routers choose as DeepSeek-V2 and V3 do."""

from __future__ import annotations

import random

import pytest
import torch
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from megarl.config import Experts
from megarl.model_engine import TokenSequence
from megarl.model_engine.microbatch import Alignment, collate
from megarl.model_engine.routing import Choice, check_choices
from tests.families import family_config

CPU = torch.device("cpu")
LAYERS, ACTIVE = 3, 2


def experts_of(token: int) -> torch.Tensor:
    """Precision that tell tokens apart."""
    return token * 100 + torch.arange(LAYERS * ACTIVE).reshape(LAYERS, ACTIVE)


def sequence_of(tokens: list[int], known: int) -> TokenSequence:
    experts = torch.stack([experts_of(token) for token in tokens])[:known] if known else None
    return TokenSequence(tokens, 1, {}, experts)


@pytest.mark.parametrize("context", [1, 2, 4])
@pytest.mark.parametrize("equal", [False, True])
def test_experts_lie_at_their_tokens(context: int, equal: bool) -> None:
    """On the context-parallel ranks together each token is once, with its experts and its sequence's length."""
    source = random.Random(0)
    tokens = iter(source.sample(range(1, 1000), 200))
    lengths = {2: 1, 5: 3, 40: 39, 17: 0, 9: 8}  # tokens, and how many of them have experts
    sequences = [sequence_of([next(tokens) for _ in range(length)], known) for length, known in lengths.items()]
    known = {
        token: place < have
        for sequence, have in zip(sequences, lengths.values(), strict=True)
        for place, token in enumerate(sequence.input_ids)
    }
    length_of = {token: len(s.input_ids) - 1 for s in sequences for token in s.input_ids}
    seen = []
    for rank in range(context):
        for batch in collate(sequences, [[3, 0, 4], [1, 2], []], Alignment(context, rank, 2), CPU, equal=equal):
            routing = batch.packing.routing
            assert routing.experts.shape == (len(batch.input_ids), LAYERS, ACTIVE)
            assert (routing.batch_sequences, routing.batch_tokens) == (5, sum(lengths) - 5)
            assert int(routing.sequence.max()) < routing.sequences
            for place, token in enumerate(batch.input_ids.tolist()):
                if token == 0:
                    assert routing.length[place] == 0
                    assert (routing.experts[place] == -1).all()
                    continue
                seen.append(token)
                assert routing.length[place] == length_of[token]
                expected = experts_of(token) if known[token] else torch.full((LAYERS, ACTIVE), -1)
                assert torch.equal(routing.experts[place].long(), expected)
            for number in range(routing.sequences):
                of_one = routing.length[(routing.sequence == number) & (routing.length > 0)]
                assert len(set(of_one.tolist())) <= 1
    assert sorted(seen) == sorted(token for s in sequences for token in s.input_ids[:-1])


def test_without_experts_to_replay_there_are_none() -> None:
    (batch,) = collate([sequence_of([1, 2, 3], 0)], [[0]], Alignment(1, 0, 1), CPU, equal=False)
    assert batch.packing.routing.experts is None


@pytest.mark.parametrize(("active", "groups"), [(2, 1), (3, 1), (4, 1), (2, 2), (4, 2), (6, 2), (2, 3), (6, 3)])
def test_groups_are_chosen_as_deepseek_does(active: int, groups: int) -> None:
    sizes = {"n_routed_experts": 16, "n_group": 4, "topk_group": groups, "num_experts_per_tok": active}
    hidden = torch.randn(200, 32, generator=torch.Generator().manual_seed(0))
    for kind, family, scored_by in (
        (DeepseekV2TopkRouter, "deepseek_v2", "best"),
        (DeepseekV3TopkRouter, "deepseek_v3", "two_best"),
    ):
        gate = kind(family_config(family, **sizes))
        torch.nn.init.normal_(gate.weight)
        logits, _, expected = gate(hidden)
        scores = logits.softmax(-1) if scored_by == "best" else logits.sigmoid()
        found, chosen = Choice(scored_by).get_replay_topk(scores, active, 4, groups, None)
        assert torch.equal(chosen.sort()[0], expected.sort()[0])
        assert torch.equal(found, scores.gather(1, chosen))


def test_given_experts_are_taken_with_the_scores_of_their_own() -> None:
    scores = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.1, 0.4, 0.2, 0.3]], requires_grad=True)
    choice = Choice("best")
    choice.given = torch.tensor([[2, 0], [-1, -1]], dtype=torch.int32)
    found, chosen = choice.get_replay_topk(scores, 2, None, None, None)
    assert chosen.tolist() == [[2, 0], [1, 3]]
    torch.testing.assert_close(found, torch.tensor([[0.2, 0.1], [0.4, 0.3]]))
    found.sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(3, 2, 2), r"\[3, 2, 2\], but the model's layers with experts and active experts are \[3, 2\]"),
        (torch.tensor([0, 8]).expand(4, 3, 2), "2 different numbers below 8"),
        (torch.tensor([5, 5]).expand(4, 3, 2), "2 different numbers below 8"),
    ],
)
def test_experts_that_are_not_the_models_are_refused(given: torch.Tensor, message: str) -> None:
    experts = Experts(count=8, active=2, ffn=16, layers=(1, 2, 3))
    with pytest.raises(ValueError, match=message):
        check_choices([given.int()], experts)


def test_free_experts_are_not_checked() -> None:
    check_choices([torch.full((4, 3, 2), -1)], Experts(count=8, active=2, ffn=16, layers=(1, 2, 3)))


def test_a_model_without_experts_replays_none() -> None:
    with pytest.raises(ValueError, match="but the model has none"):
        check_choices([torch.zeros(4, 3, 2).int()], None)

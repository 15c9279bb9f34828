"""One step's groups: which scores make which advantages, and what is refused."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config import RecipeError, RlRecipe, load_recipe
from megarl.model_engine import Metrics
from megarl.trainer.rollout_batch import Models, RolloutBatch
from megarl.transfer_queue import Delivery
from megarl.types import GroupHeader, Offer, TrajectoryHeader, VersionSpan
from tests.small_job import write_small_job

ANSWERS = {"math": [1.0, 0.0, 1.0, 0.0], "chat": [0.0, 0.0, 0.0, 1.0]}
LENGTHS = [3, 1, 2, 2]


class RewardModel:
    """Scores a sequence by its length, or as it is told."""

    def __init__(self, spoilt: float | None = None) -> None:
        self.spoilt = spoilt

    def scores(self, sequences: list[Any]) -> torch.Tensor:
        scores = torch.tensor([float(sequence.response_length) for sequence in sequences])
        if self.spoilt is not None:
            scores[-1] = self.spoilt
        return scores


class Headers(Delivery):
    """All that is known before anything is read; nothing is."""

    def __init__(self, groups: list[GroupHeader], step: int = 0) -> None:
        nobody: Any = None
        super().__init__(Offer(step, groups, "", "", {}), nobody)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_job(tmp_path_factory.mktemp("job"))


def scored(job: Path, *overrides: str, model: RewardModel | None = None, samples: int = 4) -> RolloutBatch:
    recipe = load_recipe(job / "rl.yaml", ["algorithm.advantage.type=dr_grpo", *overrides])
    assert isinstance(recipe, RlRecipe)
    groups = [
        GroupHeader(
            i,
            dataset,
            2,
            [
                TrajectoryHeader(n, (1, n), [VersionSpan(0, 0, n)], "stop", {"answer": score})
                for n, score in list(zip(LENGTHS, ANSWERS[dataset], strict=True))[:samples]
            ],
        )
        for i, dataset in enumerate(ANSWERS)
    ]
    policy: Any = None  # one update a step and no reference: it is not asked
    rewards: Any = {"taste": model} if model else {}
    batch = RolloutBatch(Headers(groups), recipe, 0.0)
    batch.score(Models(policy, rewards=rewards))
    return batch


TASTE = "reward.sources.taste={type: model, model: {path: m}, weight: 0.5, datasets: [chat]}"


def test_each_group_is_compared_by_the_sources_of_its_dataset(job: Path) -> None:
    batch = scored(job, TASTE, "reward.sources.answer.weight=2.0", model=RewardModel())
    rewards = [2.0, 0.0, 2.0, 0.0, *(2 * a + 0.5 * n for a, n in zip(ANSWERS["chat"], LENGTHS, strict=True))]
    assert batch.rewards.tolist() == rewards
    for number, sequence in enumerate(batch.sequences):
        group = rewards[number // 4 * 4 :][:4]
        expected = [rewards[number] - sum(group) / 4] * LENGTHS[number % 4]
        assert sequence.columns["advantage"].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_a_score_that_is_not_finite_ends_the_run_with_its_source(job: Path, spoilt: float) -> None:
    with pytest.raises(FloatingPointError, match=r"reward\.sources\.taste gave a score that is not finite"):
        scored(job, TASTE, model=RewardModel(spoilt))


@pytest.mark.parametrize(
    ("body", "shapes"), [("outcomes.totals", r"\[\[8\]\]"), ("(outcomes.totals, 1)", r"\[\[8\], 'int'\]")]
)
def test_an_own_advantage_of_another_shape_is_refused(
    job: Path, body: str, shapes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong_shape.py").write_text(f"def advantage(outcomes):\n    return {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wrong_shape", raising=False)
    with pytest.raises(RecipeError, match=rf"wrong_shape:advantage gave {shapes}; expected 1 of the shape \[16\]"):
        scored(job, "algorithm.advantage={type: own, function: 'wrong_shape:advantage'}")
    sys.modules.pop("wrong_shape", None)


def test_the_overlong_penalty_is_logged_beside_the_reward(job: Path) -> None:
    batch = scored(job, "rollout.max_new_tokens=4", "reward.overlong_buffer=2")
    logged = batch.statistics(Metrics({"tokens": 16.0, "mismatch": 0.0, "current": 0.0}, {"mismatch": 0.0}))
    assert (logged["reward"], logged["overlong_penalty"]) == (3 / 8, -0.5 / 4)  # one in four has 3 tokens


def test_a_group_of_one_has_no_signal_of_its_own(job: Path) -> None:
    batch = scored(job, samples=1)
    logged = batch.statistics(Metrics({"tokens": 6.0, "mismatch": 0.0, "current": 0.0}, {"mismatch": 0.0}))
    assert logged["groups_with_signal"] == 0.0
    assert "overlong_penalty" not in logged


def test_trainer_and_engine_are_compared_on_tokens_of_the_same_weights(job: Path) -> None:
    recipe = load_recipe(job / "rl.yaml", [])
    assert isinstance(recipe, RlRecipe)
    spans = [[VersionSpan(0, 0, 3)], [VersionSpan(0, 0, 2), VersionSpan(1, 2, 3)], [VersionSpan(1, 0, 3)]]
    trajectories = [TrajectoryHeader(3, (1, 1), versions, "stop", {"answer": 0.0}) for versions in spans]
    delivery = Headers([GroupHeader(0, "", 2, trajectories)], step=1)
    batch = RolloutBatch(delivery, recipe, 0.0)
    assert [sequence.columns["current"].tolist() for sequence in batch.sequences] == [[0, 0, 0], [0, 0, 1], [1, 1, 1]]
    tokens = len(batch.sequences) * 3
    micro: Any = SimpleNamespace(
        columns={
            "current": torch.cat([sequence.columns["current"] for sequence in batch.sequences]),
            "engine_logprob": torch.tensor([-9.0] * 5 + [-1.5] * 3 + [-2.0]),
        },
        mask=torch.ones(tokens),
    )
    policy: Any = SimpleNamespace(observe=lambda _, gap: Metrics(*gap(micro, torch.full((tokens,), -1.0), None)[1:]))
    batch.rewards, batch._scores = torch.zeros(3), {}
    logged = batch.statistics(batch.mismatch(policy))
    assert logged["mismatch/logprob_max"] == 1.0
    assert logged["mismatch/logprob_mean"] == (3 * 0.5 + 1.0) / 4


def test_where_all_tokens_are_of_older_weights_nothing_is_compared(job: Path) -> None:
    logged = scored(job).statistics(Metrics({"tokens": 16.0, "mismatch": 0.0, "current": 0.0}, {"mismatch": 0.0}))
    assert not any(name.startswith("mismatch") for name in logged)

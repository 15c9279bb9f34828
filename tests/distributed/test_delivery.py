"""Ranks that fetch what they read of a step compute what ranks that have all of it compute, bit for bit."""

from __future__ import annotations

import msgspec
import pytest

from tests.distributed import delivery
from tests.distributed.launch import run
from tests.families import write_model

pytestmark = pytest.mark.distributed

LAYOUTS = {2: {"dp2": {}, "tp2": {"tensor": 2}, "cp2": {"context": 2}, "pp2": {"pipeline": 2}}}
RECIPE = """type: rl
steps: 1
run_dir: run
model: {path: policy}
data: {train: none.jsonl, test: none.jsonl}
batch: {prompts: 4, group_size: 4}
rollout: {max_new_tokens: 40}
optimizer: {learning_rate: 1e-2}
reward: {sources: {answer: {type: exact_match}, taste: {type: model, model: {path: reward}}}}
algorithm: {minibatches: 2, kl: {coefficient: 0.1}, correction: {type: importance}}
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, delivery.Found]:
    path = tmp_path_factory.mktemp("delivery")
    write_model("qwen3", path / "policy")
    write_model("qwen3", path / "reward", head="reward", num_labels=1, pad_token_id=0)
    (path / "rl.yaml").write_text(RECIPE)
    seen: dict[str, delivery.Found] = {}
    for ranks, layouts in LAYOUTS.items():
        plan = delivery.Plan(
            recipe=path / "rl.yaml",
            policy=path / "policy",
            reward=path / "reward",
            layouts=layouts,
            out=path / f"{ranks}.json",
        )
        plan.write(path / f"{ranks}.plan")
        run("mpirun", ranks, "tests.distributed.payload_delivery", path / f"{ranks}.plan", log=path / f"{ranks}.log")
        seen |= msgspec.json.decode(plan.out.read_bytes(), type=dict[str, delivery.Found])
    return seen


@pytest.mark.parametrize("layout", [name for layouts in LAYOUTS.values() for name in layouts])
def test_results_are_those_of_whole_groups(layout: str, found: dict[str, delivery.Found]) -> None:
    one = found[layout]
    assert one.delivered == one.whole
    gap, rewards, first, second, before, after = one.whole
    assert (
        gap[0] == len(before) == len(after) == sum(len(t.output_ids) for g in delivery.groups() for t in g.trajectories)
    )
    assert len(rewards) == delivery.PROMPTS * delivery.SAMPLES
    assert first[0] > 0
    assert second[0] > 0
    assert before != after


def test_a_data_parallel_rank_is_sent_its_share(found: dict[str, delivery.Found]) -> None:
    """A step's passes over all sequences are planned alike, so that a rank reads in them the same ones."""
    everything = list(range(delivery.PROMPTS * delivery.SAMPLES))
    for name in ("tp2", "cp2", "pp2"):
        assert [sent["input_ids"] for sent in found[name].fetched] == [everything] * 2
    first, second = (sent["input_ids"] for sent in found["dp2"].fetched)
    assert sorted({*first, *second}) == everything
    assert len(first) < len(everything) > len(second)
    assert [set(sent) for sent in found["dp2"].fetched] == [{"input_ids", "engine_logprob"}] * 2

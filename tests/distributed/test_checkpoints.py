"""A checkpoint of any family goes on at another layout: the same losses and gradient norms as without the change."""

from __future__ import annotations

import json

import msgspec
import pytest

from tests.distributed.launch import run
from tests.distributed.payload_checkpoints import OTHERS
from tests.families import write_model

pytestmark = pytest.mark.distributed

# family, the layout that saves, the layout that goes on; all on 4 ranks
CASES = [
    ("glm4_moe", {"pipeline": 4}, {"tensor": 2, "expert": 2}),  # the first stage has no experts
    ("qwen3_moe_mixed", {"pipeline": 2, "expert": 2}, {"context": 2, "pipeline": 2}),
    ("deepseek_v3", {"tensor": 2, "expert_tensor": 2, "expert": 2}, {"pipeline": 4}),
    ("gpt_oss", {"tensor": 2, "expert": 2}, {"pipeline": 2, "interleave": 2, "expert": 2}),
    ("gemma3", {"pipeline": 2}, {"overlap": True}),  # embeddings tied over stages, in data-parallel buckets
    ("qwen2", {"overlap": True}, {"tensor": 2, "context": 2}),
]


Seen = dict[str, list[list[list[float]]]]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Seen, list[list[str]]]:
    directory = tmp_path_factory.mktemp("checkpoints")
    for family, _, _ in CASES:
        write_model(family, directory / family, pad_token_id=0)
    write_model("glm4_moe", directory / "fewer_layers", num_hidden_layers=2)
    write_model("qwen2", directory / "smaller_vocabulary", vocab_size=90)
    write_model("mixtral", directory / "mixtral")
    plan = directory / "plan.json"
    plan.write_text(json.dumps([[str(directory / family), saved, loaded] for family, saved, loaded in CASES]))
    run("mpirun", 4, "tests.distributed.payload_checkpoints", plan, log=directory / "log")
    found, refused = msgspec.json.decode((directory / "plan.seen").read_bytes())
    return {family: both for (family, _, _), both in zip(CASES, found, strict=True)}, refused


@pytest.mark.parametrize("family", [family for family, _, _ in CASES])
def test_a_checkpoint_goes_on_at_another_layout(family: str, report: tuple[Seen, list[list[str]]]) -> None:
    went_on, resumed = report[0][family]
    for expected, found in zip(went_on, resumed, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_checkpoint_that_is_damaged_or_of_another_model_is_refused(report: tuple[Seen, list[list[str]]]) -> None:
    for rank in report[1]:
        for (_, _, saved, message), found in zip(OTHERS, rank, strict=True):
            assert f"{saved}/checkpoint " in found
            assert message in found

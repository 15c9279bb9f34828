"""The converter and Megatron read each other's checkpoints, whatever layout they are saved or loaded at."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from megarl.weights import compare, convert, open_source
from tests.distributed.launch import run
from tests.families import write_model

pytestmark = pytest.mark.distributed

LAYOUTS = {
    "tensor, pipeline": {"tensor": 2, "pipeline": 2},
    "experts": {"tensor": 2, "expert_tensor": 2, "expert": 2},
    "pipeline, experts": {"pipeline": 2, "expert": 2},
    "experts, whole": {"tensor": 2, "expert": 2},
    "interleaved": {"pipeline": 2, "interleave": 2},
}
CASES = {
    "llama": "tensor, pipeline",
    "qwen2": "interleaved",  # biases
    "qwen3_moe_mixed": "pipeline, experts",
    "deepseek_v3": "experts",
    "gpt_oss": "experts, whole",
    "gemma3": "tensor, pipeline",
}
"""One for each structure of layers."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """For each family under its name: hf, megatron made of it, a checkpoint of an engine, and what that exported."""
    directory = tmp_path_factory.mktemp("convert")
    for family in CASES:
        write_model(family, directory / family / "hf")
        convert(open_source(directory / family / "hf"), directory / family / "megatron", to="megatron", workers=1)
    plan = directory / "plan.json"
    plan.write_text(json.dumps([[str(directory / family), LAYOUTS[layout]] for family, layout in CASES.items()]))
    run("mpirun", 4, "tests.distributed.payload_convert", plan, log=directory / "log")
    wrong = msgspec.json.decode((directory / "plan.seen").read_bytes())
    return directory, dict(zip(CASES, wrong, strict=True))


@pytest.mark.parametrize("family", CASES)
def test_megatron_loads_what_the_converter_writes(family: str, models: tuple[Path, dict[str, list[str]]]) -> None:
    assert not models[1][family]


@pytest.mark.parametrize("family", CASES)
def test_the_converter_exports_what_megatron_saves(
    family: str, models: tuple[Path, dict[str, list[str]]], tmp_path: Path
) -> None:
    own = models[0] / family
    convert(open_source(own / "checkpoint", own / "hf"), tmp_path / "hf", to="hf", workers=1)
    assert not compare(open_source(tmp_path / "hf"), open_source(own / "exported"), workers=1)
    assert compare(open_source(tmp_path / "hf"), open_source(own / "hf"), workers=1)  # an update has changed them

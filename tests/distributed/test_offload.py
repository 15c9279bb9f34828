"""Parts of the engine go to the host and come back: nothing else changes, and no memory is lost.

All cases run in one launch of two ranks.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.distributed.launch import run
from tests.distributed.offload_plan import Case, Plan, Report
from tests.families import write_model

pytestmark = pytest.mark.distributed

CASES = {
    "tp2_float32": ("qwen3", "float32", {"tensor": 2}),
    "tp2_bfloat16": ("qwen3", "bfloat16", {"tensor": 2}),
    "dp2_float32": ("qwen3", "float32", {}),
    "dp2_bfloat16": ("qwen3", "bfloat16", {}),
    "dp2_overlap": ("qwen3", "bfloat16", {"overlap": True}),
    # buffers of experts beside the dense ones, and a float32 buffer that is no parameter
    "ep2_bfloat16": ("deepseek_v3", "bfloat16", {"expert": 2}),
}
CHECKPOINTS = ("tp2_float32", "ep2_bfloat16")
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("offload")
    families = {family for family, _, _ in CASES.values()}
    for family in families:
        # a large vocabulary, so that a copy that is not freed shows in the resident set
        write_model(family, directory / family, vocab_size=16384)
    cases = {
        name: Case(directory / family, dtype, layout, checkpoint=name in CHECKPOINTS)
        for name, (family, dtype, layout) in CASES.items()
    }
    plan = Plan(cases, directory)
    for name in CASES:
        (directory / name).mkdir()
    plan.write(directory / "plan.json")
    run("mpirun", 2, "tests.distributed.payload_offload", directory / "plan.json", log=directory / "log")
    return directory


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def report(case: str, out: Path) -> Report:
    return msgspec.json.decode((out / case / "report.json").read_bytes(), type=Report)


def test_cycles_change_no_bit_of_a_run(report: Report) -> None:
    assert report.cycled == report.plain
    assert len(set(report.plain.weights)) == len(report.plain.losses)  # it did train


@pytest.mark.parametrize("saved", CHECKPOINTS)
def test_a_checkpoint_is_the_same_after_cycles(saved: str, out: Path) -> None:
    """All of it but the index, whose entries lie in the order of a set."""
    files = [
        {file.name: file.read_bytes() for file in (out / saved / which).iterdir() if file.name != ".metadata"}
        for which in ("plain", "cycled")
    ]
    assert sum(name.endswith(".distcp") for name in files[0]) == 4
    assert files[0].keys() == files[1].keys()
    assert [name for name in files[0] if files[0][name] != files[1][name]] == []


def test_the_device_is_empty_while_the_parts_are_away(report: Report) -> None:
    assert all(report.there.device.values())
    assert not any(report.away.device.values())
    assert report.back.device == report.there.device
    # gradients are not kept; the host's memory is, for the next time
    assert report.there.host == 0
    assert report.away.host == report.back.host == report.there.device_total - report.there.device["gradients"]


def test_the_optimizer_has_what_adam_needs(case: str, report: Report) -> None:
    """Moments, and main weights where these are not the parameters themselves, of each rank's share."""
    per_weight, weight = (12, 2) if "float32" not in case else (8, 4)
    if case != "ep2_bfloat16":  # whose experts are not shared between ranks as all else is
        shares = 2 if case.startswith("dp2") else 1
        weights = report.there.device["parameters"] / weight
        assert report.there.device["optimizer"] == pytest.approx(per_weight * weights / shares, rel=0.01)
        assert report.there.device["gradients"] == pytest.approx(4 * weights, rel=0.01)


def test_a_second_time_in_a_row_nothing_happens(report: Report) -> None:
    assert report.again == [0, 0, 0, 0]


def test_memory_does_not_grow(report: Report) -> None:
    assert report.end.tensor_bytes == report.warm.tensor_bytes
    assert report.end.resident_bytes < report.warm.resident_bytes + 4 * MEGABYTE
    assert report.there.device_total > 4 * MEGABYTE, "a copy that is not freed would not show"


def test_using_what_is_away_is_refused(report: Report) -> None:
    all_parts = '"parameters", "gradients", "optimizer"'
    needed = {
        "update without gradients": '"gradients"',
        "update": all_parts,
        "logprobs": '"parameters"',
        "weights": '"parameters"',
        "hf_buckets": '"parameters"',
        "shard": '"parameters"',
        "export_hf": '"parameters"',
        "save": '"parameters", "optimizer"',
        "load": '"parameters", "optimizer"',
        "save without optimizer": '"optimizer"',
    }
    assert report.refusals.keys() == needed.keys()
    for use, parts in needed.items():
        assert report.refusals[use].endswith(f" needs what has been offloaded: call onload({parts}) first")


def test_a_frozen_model_has_parameters_only(report: Report) -> None:
    assert report.frozen[0] == report.frozen[1]
    assert report.frozen_there.device["gradients"] == report.frozen_there.device["optimizer"] == 0
    assert report.frozen_there.device["parameters"] > 0
    assert report.frozen_away.device_total == 0

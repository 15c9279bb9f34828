"""Ranks measure a machine, by whichever launcher, and a step can be predicted from what they found."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.config import Layout, RecipeError
from megarl.layout import Table, Training, read_table, step_time
from megarl.rollout_engine import EngineError
from tests.distributed.launch import Launcher, run
from tests.unit.test_layout_calibration import small
from tools import calibrate_machine
from tools.calibrate_machine import ROWS, SENT, WIDTHS, check_model, group_sizes, rising

pytestmark = pytest.mark.distributed


KINDS = ("all_gather", "reduce_scatter", "all_to_all")
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MORE = {
    "intermediate_size": 128,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
CONFIG = json.dumps({"architectures": ["Qwen3ForCausalLM"], **SIZES, **MORE})


def calibrated(launcher: Launcher, ranks_per_node: int, directory: Path) -> Table:
    """By four ranks."""
    file = directory / "machine.json"
    payload = "tests.distributed.payload_calibration"
    run(launcher, 4, payload, file, str(ranks_per_node), log=directory / "log")
    return read_table(file)


def test_ranks_measure_themselves_and_their_groups(tmp_path: Path) -> None:
    table = calibrated("mpirun", 4, tmp_path)
    assert [load.ranks for load in table.loads] == [1, 2, 4]
    assert table.ranks_per_node == 4
    for load in table.loads:
        assert load.gemm.keys() == load.attention.keys() == {"fp32", "bf16"}
        assert len(load.gemm["fp32"].seconds) == len(ROWS["cpu"]) * len(WIDTHS["cpu"]) ** 2
    groups = {(one.kind, one.ranks, one.busy) for one in table.exchanges}
    wanted = {(kind, size, busy) for kind in KINDS for size, busy in ((2, 2), (2, 4), (4, 4))}
    assert groups == wanted | {("send", 2, 2), ("send", 2, 4)}
    assert all(one.nodes == 1 and len(one.points) == len(SENT["cpu"]) for one in table.exchanges)
    for ranks, layout in ((1, Layout()), (2, Layout(pipeline=2)), (4, Layout(tensor=2)), (4, Layout(context=4))):
        training = Training(small(), layout, ranks, 512, 8, precision="fp32")
        assert step_time(training, table.machine(ranks, "fp32")).seconds > 0


def test_groups_on_two_nodes_are_measured_too(tmp_path: Path) -> None:
    """The nodes are this machine's halves."""
    table = calibrated("torchrun", 2, tmp_path)
    assert [load.ranks for load in table.loads] == [1, 2]
    groups = {(one.kind, one.ranks, one.nodes) for one in table.exchanges}
    wanted = {(kind, *size) for kind in KINDS for size in ((2, 1), (2, 2), (4, 2))}
    assert groups == wanted | {("send", 2, 1), ("send", 2, 2)}
    assert table.machine(16).collective_s(1e6, 16, 1) > 0


@pytest.mark.parametrize(
    ("config", "complaint"),
    [(None, "no Hugging Face model: it has no config.json"), ("{", "not JSON"), (CONFIG, "it has no weights")],
)
def test_what_is_no_model_is_told_before_anything_is_measured(
    config: str | None, complaint: str, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises((ValueError, RecipeError), match=complaint):
        check_model(tmp_path)


def test_an_engine_that_ends_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: Any, **__: Any) -> Any:
        address = SimpleNamespace(url="http://127.0.0.1:9")  # where nothing listens
        child = SimpleNamespace(process=SimpleNamespace(pid=os.getpid()))
        return SimpleNamespace(wait_healthy=lambda: 0.0, address=address, child=child)

    monkeypatch.setattr(calibrate_machine, "Engine", ended)
    guard = SimpleNamespace(stop_children=lambda: None)
    with pytest.raises(EngineError, match="no longer answered while it was measured"):
        calibrate_machine.measure_engine(Path("model"), torch.device("cpu"), guard)  # type: ignore[arg-type]


def test_which_groups_are_measured() -> None:
    assert rising(1) == [1]
    assert rising(6) == [1, 2, 6]
    assert rising(8) == [1, 2, 4, 8]
    assert list(group_sizes(4, 1)) == [(2, 1), (4, 1)]
    # one rank of each node, and whole nodes
    assert list(group_sizes(4, 4)) == [(2, 1), (4, 1), (2, 2), (8, 2), (4, 4), (16, 4)]

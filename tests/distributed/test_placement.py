"""Two of four ranks train, and the others have engines only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import Launcher, run
from tests.families import write_model

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_weights_reach_engines_of_ranks_that_do_not_train(launcher: Launcher, tmp_path: Path) -> None:
    write_model("qwen3", tmp_path / "model", pad_token_id=0)
    run(launcher, 4, "tests.distributed.payload_placement", tmp_path, log=tmp_path / "log")

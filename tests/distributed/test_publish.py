"""Publications between four ranks: engines hold bit by bit what they should, and what goes wrong is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launch import run

pytestmark = pytest.mark.distributed


def test_weights_reach_every_engine_or_it_is_named(tmp_path: Path) -> None:
    run("mpirun", 4, "tests.distributed.payload_publish", tmp_path, log=tmp_path / "log")

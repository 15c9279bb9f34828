"""What several test directories share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs import ROOT


@pytest.fixture(scope="session")
def addition(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The carry-addition task with its untrained model, made by the script that users run."""
    out = tmp_path_factory.mktemp("addition") / "data"
    subprocess.run([sys.executable, "launch/prepare_carry_addition.py", str(out)], cwd=ROOT, check=True)
    return out


@pytest.fixture(scope="session")
def rl_overrides(addition: Path) -> list[str]:
    """Turns launch/recipes/carry_addition_rl.yaml into a small job on the untrained model."""
    return [
        f"model.path={addition}/model",
        f"data.train={addition}/train.jsonl",
        f"data.test={addition}/test.jsonl",
        "batch.prompts=4",
        "batch.group_size=4",
        "rollout.max_new_tokens=16",
        "evaluation.problems=8",
        "checkpoint.final=false",
        "optimizer.warmup_steps=0",
    ]

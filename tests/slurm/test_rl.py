"""The real job: GRPO on two nodes, a rank on each, the model split over both; an SGLang engine on each, or on both."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.observe import read_metrics
from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]

ROOT = Path(__file__).resolve().parents[2]
JOB_S = 400
MOST_LOGPROB_DIFFERENCE = 1e-4


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights, and problems that it solves now and then: name the digit 1 last."""
    directory = tmp_path_factory.mktemp("task") / "carry_addition"
    subprocess.run([sys.executable, ROOT / "launch/prepare_carry_addition.py", directory], check=True)
    config = AutoConfig.from_pretrained(directory / "model")
    config.intermediate_size = 256  # on a CPU, SGLang pads a rank's part to a multiple of 32
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory / "model")
    (directory / "train.jsonl").write_text('{"prompt": "70+93=", "answer": "1"}\n{"prompt": "6+9=", "answer": "1"}\n')
    return directory


def submit(cluster: Cluster, task: Path, run_dir: Path, *arguments: str, control: str) -> int:
    """A job of the quickstart's recipe on `task`, submitted from the repository but logging beside `run_dir`."""
    overrides = [
        f"model.path={task / 'model'}",
        f"data.train={task / 'train.jsonl'}",
        f"data.test={task / 'test.jsonl'}",
        f"run_dir={run_dir}",
        "batch.prompts=8",
        "rollout.max_new_tokens=48",
        r"reward.sources.answer.pattern=(\d)",
        "optimizer.learning_rate=1e-3",
        "optimizer.warmup_steps=0",
        "evaluation.problems=8",
    ]
    return cluster.submit(
        ROOT / "slurm/rl.sbatch",
        "launch/recipes/carry_addition_rl.yaml",
        *overrides,
        *arguments,
        options=["--nodes=2", f"--output={run_dir}-%j.out"],
        env={"MEGARL_CONTROL": control},
        cwd=ROOT,
    )


def check_rows(rows: list[dict[str, Any]], steps: int) -> None:
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    # steps that learn: else the engines would agree with the trainer without ever getting new weights
    assert all(row["grad_norm"] > 0 for row in rows), rows
    assert all(row["mismatch/logprob_max"] <= MOST_LOGPROB_DIFFERENCE for row in rows), rows


def test_three_steps_on_two_nodes(cluster: Cluster, task: Path, tmp_path: Path) -> None:
    """With one engine that spans them."""
    run_dir = tmp_path / "run"
    job = submit(cluster, task, run_dir, "steps=3", "rollout.tensor_parallel=2", control="tcp")

    assert cluster.wait(job, JOB_S) == "COMPLETED", cluster.output(job)
    assert "control plane tcp" in cluster.output(job)
    check_rows(read_metrics(run_dir), 3)
    assert (run_dir / "hf/model.safetensors").exists()


def test_usr1_saves_and_a_later_job_goes_on(cluster: Cluster, task: Path, tmp_path: Path) -> None:
    """With the other control plane, so that this is also a run on two nodes with that."""
    run_dir = tmp_path / "run"
    job = submit(cluster, task, run_dir, "steps=1000", control="mpi")
    end = time.monotonic() + JOB_S
    while not read_metrics(run_dir):
        assert time.monotonic() < end, cluster.output(job)
        assert not cluster.has_ended(job), cluster.output(job)
        time.sleep(0.2)
    cluster.signal(job)

    assert cluster.wait(job, JOB_S) == "COMPLETED", cluster.output(job)
    assert "control plane mpi" in cluster.output(job)
    done = len(read_metrics(run_dir))
    assert (run_dir / f"checkpoints/step_{done:06d}/run_state.json").exists(), cluster.output(job)

    job = submit(cluster, task, run_dir, f"steps={done + 2}", "--resume", control="mpi")
    assert cluster.wait(job, JOB_S) == "COMPLETED", cluster.output(job)
    check_rows(read_metrics(run_dir), done + 2)
    assert (run_dir / "hf/model.safetensors").exists()

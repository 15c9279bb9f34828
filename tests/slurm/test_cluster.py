"""The job script and the cluster below it, with a stand-in for the training program."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """\
type: sft
steps: 1
model: {path: no_model}
data: {train: no_data.jsonl}
batch: {sequences: 1}
optimizer: {learning_rate: 1e-4}
"""
TWO_NODES = ["--nodes=2"]
JOB_S = 60


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The job scripts as they are, and the stand-in where they expect launch/train.py."""
    root = tmp_path / "a repository"
    (root / "launch").mkdir(parents=True)
    shutil.copytree(ROOT / "slurm", root / "slurm")
    shutil.copy(ROOT / "launch/lib.sh", root / "launch/lib.sh")
    shutil.copy(ROOT / "tests/slurm/payload/train.py", root / "launch/train.py")
    (root / ".venv").symlink_to(ROOT / ".venv")
    (root / "toy.yaml").write_text(RECIPE)
    return root


def ranks(run_dir: Path, world: int = 2) -> list[dict[str, Any]]:
    return [json.loads((run_dir / f"rank_{rank}.json").read_text()) for rank in range(world)]


def until(condition: Callable[[], bool], what: str, timeout_s: float = JOB_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.1)


def processes_of(directory: Path) -> list[bytes]:
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(file.read_bytes())
    return [line for line in lines if bytes(directory) in line]


def test_a_second_cluster_comes_and_goes(cluster: Cluster, tmp_path: Path) -> None:
    def machine() -> tuple[str, str]:
        links = subprocess.run(["ip", "-brief", "link"], check=True, capture_output=True, text=True).stdout
        return links, Path("/etc/hosts").read_text()

    before = machine()
    second = Cluster(tmp_path / "second")
    for _ in range(2):
        second.call("start")
    assert sorted(second.call("run", "srun", "--nodes=2", "hostname").split()) == ["node1", "node2"]
    assert processes_of(second.directory)
    second.call("run", "sbatch", "--output=/dev/null", "--wrap=sleep 1000")
    for _ in range(2):
        second.call("stop")
        assert not processes_of(second.directory)
    assert machine() == before
    with pytest.raises(RuntimeError, match="no cluster runs"):
        second.call("run", "sinfo")


def test_a_cluster_ends_with_its_directory(cluster: Cluster, tmp_path: Path) -> None:
    second = Cluster(tmp_path / "second")
    second.call("start", "1")
    shutil.rmtree(second.directory)
    until(lambda: not processes_of(second.directory), "it has ended", 10)


@pytest.mark.parametrize(("control", "action"), [("", "mpi"), ("mpi", "mpi"), ("tcp", "store")])
def test_two_nodes_talk(cluster: Cluster, repository: Path, control: str, action: str) -> None:
    env = {"MEGARL_TEST_ACTION": action, "MEGARL_CONTROL": control}
    job = cluster.submit(
        repository / "slurm/rl.sbatch", "toy.yaml", "batch.sequences=2", options=TWO_NODES, env=env, cwd=repository
    )

    assert cluster.wait(job, JOB_S) == "COMPLETED", cluster.output(job)
    run_dir = f"runs/toy-{job}"
    for rank, row in enumerate(ranks(repository / run_dir)):
        assert row == {
            "hosts": ["node1", "node2"],
            "token": "from 0",
            "host": f"node{rank + 1}",
            "control": control or "mpi",
            "arguments": ["toy.yaml", "batch.sequences=2", f"run_dir={run_dir}"],
        }


def start(cluster: Cluster, repository: Path, action: str, *options: str) -> tuple[int, Path]:
    """A job on two nodes whose ranks are up and doing `action`."""
    job = cluster.submit(
        repository / "slurm/rl.sbatch",
        "toy.yaml",
        "run_dir=run",
        options=[*TWO_NODES, *options],
        env={"MEGARL_TEST_ACTION": action, "MEGARL_CONTROL": "tcp"},
        cwd=repository,
    )
    files = [repository / f"run/rank_{rank}.json" for rank in range(2)]
    until(lambda: all(file.exists() for file in files) or cluster.has_ended(job), "both ranks are up")
    assert all(file.exists() for file in files), cluster.output(job)
    return job, repository / "run"


def test_usr1_reaches_both_ranks(cluster: Cluster, repository: Path) -> None:
    job, run_dir = start(cluster, repository, "until_signal")
    cluster.signal(job)

    assert cluster.wait(job, JOB_S) == "COMPLETED", cluster.output(job)
    assert all(row["signalled"] for row in ranks(run_dir))


def test_time_limit_announces_itself(cluster: Cluster, repository: Path) -> None:
    job, run_dir = start(cluster, repository, "until_signal", "--time=00:01:00", "--signal=B:USR1@50")

    assert cluster.wait(job, 2 * JOB_S) == "COMPLETED", cluster.output(job)
    assert all(row["signalled"] for row in ranks(run_dir))


def test_a_failing_rank_ends_the_job(cluster: Cluster, repository: Path) -> None:
    (repository / "run").mkdir()
    old = {"time": 0, "rank": 0, "cause": "of an earlier job"}
    (repository / "run/failure.jsonl").write_text(json.dumps(old) + "\n")
    job, _ = start(cluster, repository, "fail")

    assert cluster.wait(job, JOB_S) == "FAILED"
    assert cluster.show(job, "ExitCode") != "0:0"
    assert cluster.output(job).splitlines()[-1] == "megarl: the run failed: rank 1: engine 1 ran out of memory"
    until(lambda: not cluster.processes("node1") + cluster.processes("node2"), "nothing is left on the nodes", 10)


def test_cancel_leaves_nothing(cluster: Cluster, repository: Path) -> None:
    job, _ = start(cluster, repository, "until_signal")
    assert any("train.py" in line for line in cluster.processes("node2"))
    cluster.cancel(job)

    assert cluster.wait(job, JOB_S) == "CANCELLED"
    until(lambda: not cluster.processes("node1") + cluster.processes("node2"), "nothing is left on the nodes", 10)


def test_a_dead_node_ends_the_job(cluster: Cluster, repository: Path) -> None:
    job, _ = start(cluster, repository, "until_signal")
    try:
        cluster.call("crash", "node2")
        assert cluster.wait(job, 2 * JOB_S) == "NODE_FAIL", cluster.output(job)
        until(lambda: not cluster.processes("node1"), "nothing is left on the surviving node", 10)
    finally:
        cluster.call("start")
    assert sorted(cluster.call("run", "srun", "--nodes=2", "hostname").split()) == ["node1", "node2"]


def test_submitted_from_elsewhere(cluster: Cluster, repository: Path, tmp_path: Path) -> None:
    """Slurm says where the script came from; relative paths are those of the directory of submission."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "toy.yaml").write_text(RECIPE)
    env = {"MEGARL_TEST_ACTION": "mpi"}
    job = cluster.submit(repository / "slurm/rl.sbatch", "toy.yaml", env=env, cwd=elsewhere)

    assert cluster.wait(job, JOB_S) == "COMPLETED", cluster.output(job)
    assert (elsewhere / f"runs/toy-{job}/rank_0.json").exists()


def test_a_copied_script_finds_the_repository_it_is_submitted_from(
    cluster: Cluster, repository: Path, tmp_path: Path
) -> None:
    mine = Path(shutil.copy(ROOT / "slurm/rl.sbatch", tmp_path / "mine.sbatch"))
    job = cluster.submit(mine, "toy.yaml", env={"MEGARL_TEST_ACTION": "mpi"}, cwd=repository)

    assert cluster.wait(job, JOB_S) == "COMPLETED", cluster.output(job)


def test_a_script_without_its_repository_says_so(cluster: Cluster, tmp_path: Path) -> None:
    lonely = Path(shutil.copy(ROOT / "slurm/rl.sbatch", tmp_path / "lonely.sbatch"))
    job = cluster.submit(lonely, "toy.yaml", cwd=tmp_path)

    assert cluster.wait(job, JOB_S) == "FAILED"
    assert f"no slurm/lib.sh near {lonely} or in {tmp_path}" in cluster.output(job)


def test_a_wrong_recipe_ends_the_job_before_its_step(cluster: Cluster, repository: Path) -> None:
    job = cluster.submit(repository / "slurm/rl.sbatch", "toy.yaml", "steps=none", options=TWO_NODES, cwd=repository)

    assert cluster.wait(job, JOB_S) == "FAILED"
    assert "integer" in cluster.output(job)

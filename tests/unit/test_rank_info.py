"""Which rank am I, in the environment of each launcher."""

from __future__ import annotations

import pytest

from megarl.runtime import RankInfo, rank_info

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "5",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
# what a batch script sees itself: one task that is no rank
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "7"}
SRUN = BATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "3",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        pytest.param({}, RankInfo(0, 1, 0, 1, "tcp"), id="alone"),
        pytest.param(MPIRUN, RankInfo(5, 8, 1, 4, "mpi"), id="mpirun"),
        pytest.param(TORCHRUN, RankInfo(3, 4, 1, 2, "tcp"), id="torchrun"),
        pytest.param(SRUN, RankInfo(6, 7, 0, 1, "tcp"), id="srun"),
        pytest.param(SRUN | {"PMIX_RANK": "6"}, RankInfo(6, 7, 0, 1, "mpi"), id="srun with PMIx"),
        pytest.param(BATCH, RankInfo(0, 1, 0, 1, "tcp"), id="in a batch script"),
        # mpirun starts its daemons on the other nodes with srun, so its ranks see a step that is not theirs
        pytest.param(SRUN | MPIRUN, RankInfo(5, 8, 1, 4, "mpi"), id="mpirun within a Slurm job"),
        pytest.param(SRUN | TORCHRUN, RankInfo(3, 4, 1, 2, "tcp"), id="torchrun within srun"),
        pytest.param(MPIRUN | {"MEGARL_CONTROL": "tcp"}, RankInfo(5, 8, 1, 4, "tcp"), id="mpirun, told tcp"),
        pytest.param(SRUN | {"MEGARL_CONTROL": "mpi"}, RankInfo(6, 7, 0, 1, "mpi"), id="srun, told mpi"),
        pytest.param(TORCHRUN | {"MEGARL_CONTROL": ""}, RankInfo(3, 4, 1, 2, "tcp"), id="told nothing"),
    ],
)
def test_rank(env: dict[str, str], expected: RankInfo) -> None:
    assert rank_info(env) == expected


@pytest.mark.parametrize(
    ("spec", "node", "tasks"),
    [
        ("4", 0, 4),
        ("2(x3),1", 0, 2),
        ("2(x3),1", 2, 2),
        ("2(x3),1", 3, 1),
        ("1,2(x2),12(x10)", 2, 2),
        ("1,2(x2),12(x10)", 12, 12),
    ],
)
def test_tasks_of_a_node(spec: str, node: int, tasks: int) -> None:
    env = SRUN | {"SLURM_STEP_TASKS_PER_NODE": spec, "SLURM_NODEID": str(node)}
    assert rank_info(env).ranks_per_node == tasks


@pytest.mark.parametrize("env", [{}, MPIRUN, TORCHRUN, SRUN], ids=["alone", "mpirun", "torchrun", "srun"])
def test_an_unknown_plane_is_refused(env: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="MEGARL_CONTROL=zmq: expected mpi or tcp"):
        rank_info(env | {"MEGARL_CONTROL": "zmq"})


def test_a_list_of_tasks_that_is_not_understood_is_named() -> None:
    with pytest.raises(ValueError, match=r"SLURM_STEP_TASKS_PER_NODE=2\(x3\),many: not understood at 'many'"):
        rank_info(SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x3),many"})

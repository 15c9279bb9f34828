"""Which rank am I: read from the environment that mpirun, srun or torchrun made."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RankInfo:
    """One process of the job. `local_rank` counts the `ranks_per_node` of this node; `control` is the plane to join."""

    rank: int
    world: int
    local_rank: int
    ranks_per_node: int
    control: Literal["mpi", "tcp"]


def launcher_pid(env: Mapping[str, str] = os.environ) -> int | None:
    """The process that started this rank, if a launcher did and it is not outside of the rank's container."""
    names = ("TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", "OMPI_COMM_WORLD_RANK")
    return (os.getppid() or None) if any(name in env for name in names) else None


def rank_info(env: Mapping[str, str] = os.environ) -> RankInfo:
    """The rank described by `env`; without a launcher, rank 0 of 1.

    MEGARL_CONTROL=mpi or tcp overrides the plane that the launcher suggests.
    """
    if "TORCHELASTIC_RUN_ID" in env:
        names, control = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "tcp"
    elif "SLURM_STEP_ID" in env and "SLURM_PROCID" in env and "OMPI_COMM_WORLD_LOCAL_RANK" not in env:
        # SLURM_PROCID alone is also set in the batch script itself, which is no rank
        control = "mpi" if "PMIX_RANK" in env else "tcp"
        return RankInfo(
            rank=int(env["SLURM_PROCID"]),
            world=int(env["SLURM_STEP_NUM_TASKS"]),
            local_rank=int(env["SLURM_LOCALID"]),
            ranks_per_node=_tasks_on_node(env["SLURM_STEP_TASKS_PER_NODE"], int(env["SLURM_NODEID"])),
            control=_choice(env, control),
        )
    elif "OMPI_COMM_WORLD_RANK" in env:
        names = (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        )
        control = "mpi"
    else:
        return RankInfo(0, 1, 0, 1, _choice(env, "tcp"))
    rank, world, local_rank, local_world = (int(env[name]) for name in names)
    return RankInfo(rank, world, local_rank, local_world, _choice(env, control))


def _choice(env: Mapping[str, str], suggested: str) -> Literal["mpi", "tcp"]:
    value = env.get("MEGARL_CONTROL") or suggested
    if value not in ("mpi", "tcp"):
        raise ValueError(f"MEGARL_CONTROL={value}: expected mpi or tcp")
    return value  # type: ignore[return-value]


def _tasks_on_node(spec: str, node: int) -> int:
    """Slurm's run-length list such as "2(x3),1": tasks on nodes 0, 1, 2 are 2, on node 3 it is 1."""
    counts: list[int] = []
    for part in spec.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={spec}: not understood at {part!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node]

"""One rank of the control plane's conformance suite; what it saw is written to rank_N.json.

Its arguments are where to write and a port where a second TCP plane may listen. test_control_plane.py starts three.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import pickle
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from megarl.runtime import ControlPlane, RankInfo, connect, init_process_groups, rank_info
from megarl.runtime.control.mpi import MpiControlPlane

LARGE_BYTES = 20_000_000
STUCK_S = 100  # then every rank says where
DEADLINE_S, LATE_S = 2.0, 6.0  # an MPI plane takes 2 s more to find out who is missing


class Report(msgspec.Struct):
    rank: int
    name: str
    values: list[float]


class Trap:
    """Unpickling this writes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._path,))


def conform(control: ControlPlane, directory: Path) -> dict[str, Any]:
    """What every plane must do alike."""
    rank = control.rank
    seen: dict[str, Any] = {"rank": rank, "world": control.world}
    mine = {"from": rank} if rank == 0 else None
    seen["broadcast"] = control.broadcast(mine, dict[str, int], what="a dictionary")
    seen["others' value is ignored"] = control.broadcast(f"of rank {rank}", str, what="a word")
    own = Report(rank, "r" * rank, [rank / 3] * rank)
    seen["allgather"] = [msgspec.to_builtins(part) for part in control.allgather(own, Report, what="reports")]
    seen["none"] = control.allgather(None, type(None), what="nothing")
    large = os.urandom(LARGE_BYTES) if rank == 0 else b""
    received = control.broadcast(large, bytes, what="a large payload")
    seen["large"] = [len(part) for part in control.allgather(received, bytes, what="large payloads")]
    hashes = control.allgather(hashlib.sha256(received).hexdigest(), str, what="their hashes")
    seen["large is the same"] = len({*hashes}) == 1
    trap = pickle.dumps(Trap(directory / f"executed-{rank}"))
    parts = [control.broadcast(trap, bytes, what="a trap"), *control.allgather(trap, bytes, what="traps")]
    seen["traps arrive as bytes"] = all(isinstance(part, bytes) and part.startswith(b"\x80") for part in parts)
    seen["wrong type"] = wrong_type(control)
    seen["barrier"] = barrier(control)
    return seen


def wrong_type(control: ControlPlane) -> str:
    try:
        control.broadcast("text", int, what="a number")
    except msgspec.ValidationError as error:
        return str(error)
    return "accepted"


def barrier(control: ControlPlane) -> bool:
    """Whether no rank left the barrier before the last one came."""
    came = []
    for late in range(control.world):
        if control.rank == late:
            time.sleep(0.2)
        arrived = time.time()
        control.barrier("the barrier")
        left = time.time()
        came.append(
            min(control.allgather(left, float, what="leaving"))
            >= max(control.allgather(arrived, float, what="arriving"))
        )
    return all(came)


def torch_group(control: ControlPlane) -> float:
    """A sum over all ranks, by a process group that met through the plane."""
    init_process_groups(control, torch.device("cpu"), one_node=True, deadline_s=60)
    total = torch.tensor(float(control.rank + 1))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def keys_left(control: ControlPlane, info: RankInfo) -> int:
    """Keys that hundred rounds leave in the store of a TCP plane, beyond what was there before."""
    if info.control != "tcp":
        return 0
    store = control.torch_store().underlying_store
    before = store.num_keys()
    control.barrier("before the rounds")
    for turn in range(100):
        control.broadcast(turn, int, what="a round")
    left = store.num_keys() - before
    control.barrier("counted")
    return left


def deadline(hasty: ControlPlane, patient: ControlPlane, late: int) -> dict[str, Any]:
    """What a rank is told when `late` comes too late."""
    patient.barrier("all are here")
    start = time.monotonic()
    if hasty.rank == late:
        time.sleep(LATE_S)
        # over MPI, those who gave up have left their barrier behind, but not the exchange that follows it
        arrive = hasty._wait if isinstance(hasty, MpiControlPlane) else hasty.barrier
        arrive("the missing rank")
        return {}
    try:
        hasty.barrier("the missing rank")
    except TimeoutError as error:
        return {"error": str(error), "seconds": time.monotonic() - start}
    return {"error": "none"}


def main(out: str, port: str) -> None:
    faulthandler.dump_traceback_later(STUCK_S)
    directory = Path(out)
    info = rank_info()
    control = connect(info, 120)
    seen = conform(control, directory) | {"control": info.control, "sum": torch_group(control)}
    seen["keys left"] = keys_left(control, info)
    # a second TCP plane is one as under srun without PMIx: rank 0 serves the store itself
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    os.environ["MASTER_PORT"] = port
    hasty = connect(info, DEADLINE_S)
    seen["late"] = {late: deadline(hasty, control, late) for late in (2, 0)}
    (directory / f"rank_{info.rank}.json").write_text(json.dumps(seen))
    control.barrier("all are done")
    if info.control == "tcp":
        hasty.close()
    control.close()

"""Stands in for launch/train.py in the tests of the job script: a rank that does one of the things below.

MEGARL_TEST_ACTION chooses it. What a rank has to tell goes to the run directory, as `rank_N.json`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

if "--check" in sys.argv:
    sys.exit()
RANK = int(os.environ["SLURM_PROCID"])
WORLD = int(os.environ["SLURM_STEP_NUM_TASKS"])
RUN_DIR = Path(next(word for word in sys.argv if word.startswith("run_dir=")).removeprefix("run_dir="))


def report(**facts: Any) -> None:
    RUN_DIR.mkdir(parents=True, exist_ok=True)
    facts |= {"host": socket.gethostname(), "control": os.environ["MEGARL_CONTROL"], "arguments": sys.argv[1:]}
    new = RUN_DIR / f"rank_{RANK}.new"
    new.write_text(json.dumps(facts))
    new.rename(RUN_DIR / f"rank_{RANK}.json")


def mpi() -> None:
    """Exchange host names over MPI."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    report(hosts=world.allgather(socket.gethostname()), token=world.bcast("from 0" if RANK == 0 else None))


def store() -> None:
    """Exchange host names over torch's TCP store at the address that the job script chose."""
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = TCPStore(address, port, WORLD, is_master=RANK == 0, timeout=timedelta(seconds=60))
    shared.set(f"host {RANK}", socket.gethostname())
    hosts = [shared.get(f"host {rank}").decode() for rank in range(WORLD)]
    if RANK == 0:
        shared.set("token", "from 0")
    report(hosts=hosts, token=shared.get("token").decode())
    shared.add("read", 1)
    while RANK == 0 and shared.add("read", 0) < WORLD:  # it serves the others
        time.sleep(0.05)


def until_signal() -> None:
    """Train until USR1, then finish."""
    signals: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: signals.append(number))
    report(ready=True)
    while not signals:
        time.sleep(0.05)
    report(signalled=True)


def fail() -> None:
    """Rank 1 leaves a cause and exits with 3; the others would go on for ever."""
    report(ready=True)
    if RANK == 1:
        while not all((RUN_DIR / f"rank_{rank}.json").exists() for rank in range(WORLD)):
            time.sleep(0.05)
        row = {"time": time.time(), "rank": RANK, "cause": "engine 1 ran out of memory"}
        with (RUN_DIR / "failure.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        sys.exit(3)
    time.sleep(3600)


ACTIONS = {"mpi": mpi, "store": store, "until_signal": until_signal, "fail": fail}
ACTIONS[os.environ["MEGARL_TEST_ACTION"]]()

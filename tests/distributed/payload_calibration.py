"""One rank that measures the machine as fast as it can.

Its arguments are the file that rank 0 writes, and how many ranks are taken for those of one node.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.layout import write_table
from megarl.runtime import connect, init_process_groups, rank_info
from tools.calibrate_machine import calibrate

DEADLINE_S = 240.0


def main(file: str, ranks_per_node: str) -> None:
    info, each = rank_info(), int(ranks_per_node)
    # some launchers number a node's ranks in another order
    info = replace(info, ranks_per_node=each, local_rank=each - 1 - info.rank % each)
    control, device = connect(info, DEADLINE_S), torch.device("cpu")
    init_process_groups(control, device, one_node=True, deadline_s=DEADLINE_S)
    table = calibrate(info, control, device, interval_s=1e-6)
    tables = control.allgather(table.name, str, what="tables")
    assert set(tables) == {table.name}
    if info.rank == 0:
        write_table(Path(file), table)
    dist.destroy_process_group()
    control.close()

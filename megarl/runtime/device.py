"""The device of this rank and the torch process group that spans the ranks."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from megarl.runtime.control import ControlPlane
    from megarl.runtime.rank import RankInfo


def choose_device(info: RankInfo) -> torch.device:
    """This rank's GPU if there is one, else the CPU."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    # Slurm and containers often show a rank its own GPU only
    device = torch.device("cuda", info.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def init_process_group(control: ControlPlane, device: torch.device, *, one_node: bool, deadline_s: float) -> None:
    """Make torch's default process group of all ranks: NCCL on GPUs, gloo on CPUs."""
    import torch.distributed

    if one_node:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo listens on the interface of the host's name
    torch.distributed.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=control.torch_store(),
        rank=control.rank,
        world_size=control.world,
        timeout=timedelta(seconds=deadline_s),
    )

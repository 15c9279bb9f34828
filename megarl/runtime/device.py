"""The device of this rank, and the torch process groups: of the ranks that train, and of all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup, Store, Work

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


class Links:
    """By which any two ranks of the job exchange tensors, also those that do not train."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def start(self, moves: Sequence[tuple[bool, torch.Tensor, int]]) -> list[Work]:
        """Send (True) each tensor to its rank, or receive it from there: one or more, all at once.

        Returns what to wait for: one for each move, or one for all.
        """
        group = self._group
        # NCCL would else do one after the other, and two ranks that first send to each other wait for ever
        together = group._get_backend(self._device).supports_coalescing
        if together:
            group._start_coalescing(self._device)
        works = [(group.send if send else group.recv)([tensor], peer, 0) for send, tensor, peer in moves]
        return [group._end_coalescing(self._device)] if together else works


def init_process_groups(
    control: ControlPlane, device: torch.device, *, one_node: bool, deadline_s: float, train_ranks: int | None = None
) -> Links:
    """Make torch's default process group of the first `train_ranks` ranks (none: of all), and links between all ranks.

    They are of NCCL on GPUs, of gloo on CPUs. Megatron takes the whole default group for the ranks that train. So a
    rank that does not train has none, and if there are such ranks, the links have a group of their own.
    """
    import torch.distributed as dist

    if one_node:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo listens on the interface of the host's name
    train, store = control.world if train_ranks is None else train_ranks, control.torch_store()
    if control.rank < train:
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            store=dist.PrefixStore("train", store),
            rank=control.rank,
            world_size=train,
            timeout=timedelta(seconds=deadline_s),
        )
    if train < control.world:
        return Links(group_of_all(control, store, device, timedelta(seconds=deadline_s)), device)
    default = dist.group.WORLD
    assert default is not None
    return Links(default, device)


def group_of_all(control: ControlPlane, store: Store, device: torch.device, timeout: timedelta) -> ProcessGroup:
    """One that torch has no name for, since its named groups are all parts of the default one."""
    import torch.distributed as dist

    place = dist.PrefixStore("all", store), control.rank, control.world
    group, kinds = dist.ProcessGroup(*place), dist.ProcessGroup.BackendType
    if device.type == "cpu":
        group._set_default_backend(kinds.GLOO)
        group._register_backend(device, kinds.GLOO, dist.ProcessGroupGloo(*place, timeout))
    else:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        backend = dist.ProcessGroupNCCL(*place, options)
        backend.eager_connect_single_device(device)  # later on only some of the ranks may have anything to exchange
        group._set_default_backend(kinds.NCCL)
        group._register_backend(device, kinds.NCCL, backend)
    return group

"""The control plane and its two transports."""

from __future__ import annotations

from megarl.runtime.control.base import ControlPlane
from megarl.runtime.rank import RankInfo

__all__ = ["ControlPlane", "connect"]


def connect(info: RankInfo, deadline_s: float) -> ControlPlane:
    """Join the control plane that `info` names; returns when this rank is connected."""
    if info.control == "mpi":
        from megarl.runtime.control.mpi import MpiControlPlane

        return MpiControlPlane(info, deadline_s)
    from megarl.runtime.control.tcp import TcpControlPlane

    return TcpControlPlane(info, deadline_s)

"""The ground under every rank: who it is, its device and groups, the control plane, children, signals and logs.

Alone reads the environment and makes process groups and child processes; other rooms are handed the result. Imports
torch and MPI only inside the functions that need them, since children and login nodes import this door too.
"""

from megarl.runtime.children import Child, child_command, child_environment, start_child, without_usr1
from megarl.runtime.control import ControlPlane, connect
from megarl.runtime.device import Links, choose_device, init_process_groups
from megarl.runtime.guard import FAILURE_FILE, Guard
from megarl.runtime.lifeline import die_with_parent
from megarl.runtime.logs import LOGGER, setup_logging
from megarl.runtime.network import hold_port, node_address
from megarl.runtime.rank import RankInfo, launcher_pid, rank_info

__all__ = [
    "FAILURE_FILE",
    "LOGGER",
    "Child",
    "ControlPlane",
    "Guard",
    "Links",
    "RankInfo",
    "child_command",
    "child_environment",
    "choose_device",
    "connect",
    "die_with_parent",
    "hold_port",
    "init_process_groups",
    "launcher_pid",
    "node_address",
    "rank_info",
    "setup_logging",
    "start_child",
    "without_usr1",
]

"""Control plane over MPI: under mpirun, or srun --mpi=pmix."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from megarl.runtime.control.base import ControlPlane
from megarl.runtime.control.tcp import bound_store
from megarl.runtime.network import node_address

if TYPE_CHECKING:
    from torch.distributed import Store

    from megarl.runtime.rank import RankInfo

_POLL_S = 0.001
_ROLL_CALL_S = 2.0
_ROLL_CALL_TAG = 77


class MpiControlPlane(ControlPlane):
    """mpi4py's communicator of all ranks, carrying bytes.

    Open MPI spins at full speed inside a blocking call and would starve the engines, so every wait is a non-blocking
    barrier that is polled, and the collective itself starts when all have arrived.
    """

    def __init__(self, info: RankInfo, deadline_s: float) -> None:
        """Raises ValueError: MPI sees another number of ranks than the launcher says."""
        # imported here because importing it is MPI_Init, which only a rank may do
        from mpi4py import MPI

        # payloads are bytes already: nothing is pickled or unpickled
        MPI.pickle.__init__(bytes, bytes, None)  # type: ignore[misc]
        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        self._deadline_s = deadline_s
        self.rank, self.world = self._comm.rank, self._comm.size
        if self.world != info.world:
            raise ValueError(
                f"the launcher started {info.world} ranks, but MPI sees {self.world}: under Slurm start them with"
                " --mpi=pmix, or set MEGARL_CONTROL=tcp"
            )

    def _broadcast(self, payload: bytes, what: str) -> bytes:
        self._wait(what)
        return self._comm.bcast(payload)

    def _allgather(self, payload: bytes, what: str) -> list[bytes]:
        self._wait(what)
        return self._comm.allgather(payload)

    def _wait(self, what: str) -> None:
        request, end = self._comm.Ibarrier(), time.monotonic() + self._deadline_s
        while not request.Test():
            if time.monotonic() > end:
                raise TimeoutError(f"{what}: waited {self._deadline_s:.0f} s for {self._missing()}")
            time.sleep(_POLL_S)

    def _missing(self) -> str:
        """Who is not waiting: those that come here report to rank 0, which sees who did not."""
        self._comm.isend(b"", 0, _ROLL_CALL_TAG)
        if self.rank != 0:
            time.sleep(_ROLL_CALL_S)
            return "other ranks; rank 0 names them, unless it is missing itself"
        present, end = {0}, time.monotonic() + _ROLL_CALL_S
        while time.monotonic() < end:
            status = self._mpi.Status()
            message = self._comm.improbe(self._mpi.ANY_SOURCE, _ROLL_CALL_TAG, status)
            if message is None:
                time.sleep(_POLL_S)
            else:
                message.recv()
                present.add(status.source)
        return f"ranks {sorted(set(range(self.world)) - present)}"

    def close(self) -> None:
        self.barrier("end of the job")
        self._mpi.Finalize()  # mpirun takes a rank that ends without it for a crash

    def torch_store(self) -> Store:
        hosts = self.allgather(socket.gethostname(), str, what="exchange of host names")
        timeout = timedelta(seconds=self._deadline_s)
        if self.rank == 0:
            address = node_address(hosts)
            store = bound_store(address, 0, timeout)
            self.broadcast(f"{address} {store.port}", str, what="rendezvous")
            return store
        from torch.distributed import TCPStore

        address, port = self.broadcast(None, str, what="rendezvous").split()
        return TCPStore(address, int(port), is_master=False, timeout=timeout)

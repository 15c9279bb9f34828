"""Control plane over torch's TCP store: under torchrun, under srun without PMIx, or for a single process."""

from __future__ import annotations

import os
import socket
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING

from megarl.runtime.control.base import ControlPlane
from megarl.runtime.network import LOOPBACK

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

    from megarl.runtime.rank import RankInfo

_CHUNK_BYTES = 4 << 20  # the store drops the connection of a client that sends it a value of more than 8 MiB


def bound_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """A TCP store served by this process on `address` alone; by itself torch would listen on every interface."""
    from torch.distributed import TCPStore

    listener = socket.create_server((address, port))
    port = listener.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )


class TcpControlPlane(ControlPlane):
    """Each call is a numbered round; a rank writes its value under the round and its rank."""

    def __init__(self, info: RankInfo, deadline_s: float) -> None:
        from torch.distributed import PrefixStore, TCPStore

        self.rank, self.world = info.rank, info.world
        self._deadline_s, self._round = deadline_s, 0
        self._written: deque[list[str]] = deque()  # keys of this rank's last rounds
        timeout = timedelta(seconds=deadline_s)
        address, port = os.environ.get("MASTER_ADDR", LOOPBACK), int(os.environ.get("MASTER_PORT", 0))
        if info.world > 1 and not port:
            raise ValueError("MASTER_ADDR and MASTER_PORT must be set for the TCP control plane of several ranks")
        # torchrun's agent already serves a store on this port
        served_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if info.rank == 0 and not served_by_agent:
            store: Store = bound_store(socket.gethostbyname(address), port, timeout)
        else:
            store = TCPStore(address, port, is_master=False, timeout=timeout)
        self._base = store
        self._store = PrefixStore("megarl", store)

    def _broadcast(self, payload: bytes, what: str) -> bytes:
        return self._exchange(payload, what, read=range(1))[0]

    def _allgather(self, payload: bytes, what: str) -> list[bytes]:
        return self._exchange(payload, what, read=range(self.world))

    def _exchange(self, payload: bytes, what: str, read: range) -> list[bytes]:
        """All write; all wait for all, so that a round's keys can be deleted two rounds later."""
        self._round += 1
        self._written.append(self._write(f"{self._round}/{self.rank}", payload))
        self._await([f"{self._round}/{rank}" for rank in range(self.world)], what)
        values = [self._read(f"{self._round}/{rank}") for rank in read]
        if self._round > 2:
            for key in self._written.popleft():
                self._store.delete_key(key)
        return values

    def _write(self, key: str, payload: bytes) -> list[str]:
        """Set `key` to the number of further keys and the first chunk, when those keys are set; returns all keys."""
        first, *rest = [payload[i : i + _CHUNK_BYTES] for i in range(0, max(len(payload), 1), _CHUNK_BYTES)]
        keys = [f"{key}/{number}" for number in range(len(rest))]
        for name, chunk in zip(keys, rest, strict=True):
            self._store.set(name, chunk)  # type: ignore[arg-type]  # torch's stub knows only text
        self._store.set(key, len(rest).to_bytes(4) + first)  # type: ignore[arg-type]
        return [*keys, key]

    def _read(self, key: str) -> bytes:
        head = self._store.get(key)
        rest = (self._store.get(f"{key}/{number}") for number in range(int.from_bytes(head[:4])))
        return b"".join([head[4:], *rest])

    def _await(self, keys: list[str], what: str) -> None:
        from torch.distributed import DistStoreError

        # one wait, since torch prints a warning whenever one times out; the guard's thread attends to signals meanwhile
        try:
            self._store.wait(keys, timedelta(seconds=self._deadline_s))
        except DistStoreError:
            missing = [int(key.split("/")[-1]) for key in keys if not self._store.check([key])]
            raise TimeoutError(f"{what}: waited {self._deadline_s:.0f} s for ranks {missing}") from None

    def close(self) -> None:
        self.barrier("end of the job")
        self._store.set(f"left/{self.rank}", "")
        if self.rank == 0:  # its store must outlive the others' last look at it
            self._await([f"left/{rank}" for rank in range(self.world)], "end of the job")

    def torch_store(self) -> Store:
        from torch.distributed import PrefixStore

        return PrefixStore("torch", self._base)

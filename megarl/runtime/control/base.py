"""The control plane: small objects and barriers between ranks. One interface, over MPI or torch's TCP store.

Values travel as msgpack and are decoded to a stated type, so nothing from the network is unpickled. Every wait has a
deadline and its error names the missing ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeVar

import msgspec

if TYPE_CHECKING:
    from torch.distributed import Store

T = TypeVar("T")


class ControlPlane(ABC):
    """All ranks must make the same calls in the same order. `what` names the call in a deadline's error."""

    rank: int
    world: int

    def broadcast(self, value: T | None, kind: type[T], *, what: str) -> T:
        """Rank 0's `value` on every rank; the others' argument is ignored."""
        payload = msgspec.msgpack.encode(value) if self.rank == 0 else b""
        return msgspec.msgpack.decode(self._broadcast(payload, what), type=kind)

    def allgather(self, value: T, kind: type[T], *, what: str) -> list[T]:
        """Every rank's `value`, in rank order, on every rank."""
        parts = self._allgather(msgspec.msgpack.encode(value), what)
        return [msgspec.msgpack.decode(part, type=kind) for part in parts]

    def barrier(self, what: str) -> None:
        """Return once every rank has come here."""
        self._allgather(b"", what)

    @abstractmethod
    def _broadcast(self, payload: bytes, what: str) -> bytes: ...

    @abstractmethod
    def _allgather(self, payload: bytes, what: str) -> list[bytes]: ...

    @abstractmethod
    def close(self) -> None:
        """Leave the plane at the end of a job, when every rank does; no call may follow."""

    @abstractmethod
    def torch_store(self) -> Store:
        """A torch store that all ranks share, for `torch.distributed.init_process_group`."""

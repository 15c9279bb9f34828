"""A rank's end of the transfer queue: fetches the fields of the sequences that it reads, and each but once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from megarl.transfer_queue.service import Fetch, Keys
from megarl.transfer_queue.shelf import FIELDS
from megarl.types import GroupHeader, Offer

Array = npt.NDArray[np.number]

_FIRST_WAIT_SHARE = 1 / 128
"""Of the deadline, for an answer, before a request is repeated; then twice as long each time."""


class QueueError(RuntimeError):
    """The queue refused a request, or was not reached in time."""


class QueueClient:
    """One connection to the queue's server, made anew where it fails. For one thread."""

    def __init__(self, keys: Keys, *, deadline_s: float) -> None:
        """`keys` are the job's for clients; after `deadline_s` without an answer a request is given up."""
        self._keys, self._deadline_s = keys, deadline_s
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._connected_to = ("", "")

    def fetch(self, offer: Offer, wanted: Mapping[str, Sequence[int]]) -> dict[str, list[Array]]:
        """Of each field the arrays of the `wanted` sequences, by their numbers; writable, and nobody else's.

        Raises QueueError: there is no such step, field or sequence, or no answer within the deadline.
        """
        request = msgspec.msgpack.encode(Fetch(offer.step, {field: list(numbers) for field, numbers in wanted.items()}))
        begun, wait_s = time.monotonic(), self._deadline_s * _FIRST_WAIT_SHARE
        while (left_s := begun + self._deadline_s - time.monotonic()) > 0:
            socket = self._connect(offer)
            socket.send(request)
            if socket.poll(round(1000 * min(wait_s, left_s))):
                return self._read(offer, wanted, socket.recv_multipart(copy=False))
            self.close()  # an answer that still comes would be taken for the next one's
            wait_s *= 2
        raise QueueError(
            f"the transfer queue at {offer.endpoint} has not answered for {self._deadline_s:g} s, asked for"
            f" {sum(map(len, wanted.values()))} arrays of step {offer.step + 1}: see logs/coordinator.log, and whether"
            " this node reaches that address"
        )

    def close(self) -> None:
        """Hang up; the next request connects again."""
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    def _connect(self, offer: Offer) -> zmq.Socket[bytes]:
        place = (offer.endpoint, offer.server_key)
        if self._connected_to != place:
            self.close()
        if self._socket is None:
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.linger = 0
            self._socket.curve_publickey, self._socket.curve_secretkey = (key.encode() for key in self._keys)
            self._socket.curve_serverkey = offer.server_key.encode()
            self._socket.connect(offer.endpoint)
            self._connected_to = place
        return self._socket

    def _read(
        self, offer: Offer, wanted: Mapping[str, Sequence[int]], reply: Sequence[zmq.Frame]
    ) -> dict[str, list[Array]]:
        error, *frames = reply
        if error.bytes:
            raise QueueError(f"the transfer queue at {offer.endpoint} refused a request: {error.bytes.decode()}")
        rest = iter(frames)
        return {
            field: [np.frombuffer(next(rest).buffer, FIELDS[field]) for _ in numbers]
            for field, numbers in wanted.items()
        }


class Delivery:
    """One step's groups on one rank: the headers of all, and of each sequence what was asked for.

    Sequences count through the groups, from 0. What was fetched is kept.
    """

    def __init__(self, offer: Offer, client: QueueClient) -> None:
        self._offer, self._client = offer, client
        self._there: dict[str, dict[int, Array]] = {}

    @property
    def step(self) -> int:
        return self._offer.step

    @property
    def groups(self) -> list[GroupHeader]:
        return self._offer.groups

    def load(self, wanted: Mapping[str, Sequence[int]]) -> dict[str, list[Array]]:
        """As `QueueClient.fetch`, but only for what is not there yet."""
        missing = {
            field: [number for number in numbers if number not in self._there.get(field, {})]
            for field, numbers in wanted.items()
        }
        if any(missing.values()):
            for field, arrays in self._client.fetch(self._offer, missing).items():
                self._there.setdefault(field, {}).update(zip(missing[field], arrays, strict=True))
        return {field: [self._there[field][number] for number in numbers] for field, numbers in wanted.items()}

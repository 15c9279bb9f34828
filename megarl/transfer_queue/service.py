"""The queue as ranks reach it: rank 0 is told a step's headers, and each rank fetches the fields of what it reads.

It lives in the coordinator's event loop. A request is one frame, a `Fetch` in msgpack; the answer is one frame with an
error's text, empty if there is none, and then one frame for each array, raw. All is encrypted and authenticated by
CurveZMQ (ZeroMQ RFC 26): the server's keys are made here and only the public one leaves the process, and of clients
only those with the job's key pair are let in (by RFC 27, ZAP, in which libzmq asks about each that connects). Requests
read and change nothing, so a client may repeat them.
"""

from __future__ import annotations

import asyncio
import traceback
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import zmq
import zmq.asyncio
from zmq.utils import z85

from megarl.transfer_queue.counters import Counters
from megarl.transfer_queue.shelf import Shelf
from megarl.types import Group, Offer

_IO_THREADS = 4
"""They encrypt, each about half a gigabyte a second."""


class Keys(NamedTuple):
    """A CURVE key pair, in the letters of Z85."""

    public: str
    secret: str

    @classmethod
    def new(cls) -> Keys:
        return cls(*(key.decode() for key in zmq.curve_keypair()))


class Fetch(msgspec.Struct, forbid_unknown_fields=True):
    """Asks for fields of a step: by field, the numbers of the sequences."""

    step: int
    wanted: dict[str, list[int]]


class QueueServer:
    """Has the steps that ranks fetch from. Use as an async context manager."""

    def __init__(self, counters: Counters, *, host: str, client_key: str, run_dir: Path) -> None:
        """Serve at the address `host` who has the secret of the public `client_key`.

        The queue's `counters` learn what is sent, and are written to `run_dir` at each step.
        """
        self._counters, self._run_dir, self._shelf = counters, run_dir, Shelf()
        self._context = zmq.asyncio.Context(_IO_THREADS)
        self._door = self._context.socket(zmq.REP)
        self._client_key, keys = z85.decode(client_key), Keys.new()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.curve_server = True
        self._socket.curve_secretkey = keys.secret.encode()
        self._host, self._server_key = host, keys.public

    async def __aenter__(self) -> Self:
        self._door.bind("inproc://zeromq.zap.01")  # as RFC 27 names it; before anyone can knock
        self._socket.bind(f"tcp://{self._host}:*")
        self._endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._tasks = [asyncio.create_task(self._admit()), asyncio.create_task(self._serve())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def offer(self, step: int, groups: list[Group]) -> Offer:
        """From now on, until two steps later, ranks can fetch from these groups, which were taken for `step`."""
        headers = await asyncio.to_thread(self._shelf.put, step, groups)
        await asyncio.to_thread(self._counters.write, self._run_dir)
        return Offer(step, headers, self._endpoint, self._server_key, self._counters.step)

    async def _admit(self) -> None:
        while True:
            version, request, _, _, _, mechanism, *credentials = await self._door.recv_multipart()
            known = mechanism == b"CURVE" and credentials == [self._client_key]
            await self._door.send_multipart([version, request, b"200" if known else b"400", b"", b"", b""])

    async def _serve(self) -> None:
        while True:
            client, *request = await self._socket.recv_multipart()
            error, arrays = self._answer(request)
            await self._socket.send_multipart([client, error.encode(), *arrays], copy=False)
            self._counters.sent(sum(map(len, arrays)))

    def _answer(self, request: list[bytes]) -> tuple[str, list[bytes]]:
        try:
            (payload,) = request
            fetch = msgspec.msgpack.decode(payload, type=Fetch)
            return "", self._shelf.read(fetch.step, fetch.wanted)
        except (ValueError, msgspec.DecodeError) as error:
            return str(error), []
        except Exception as error:  # noqa: BLE001  one request's, whatever it is; others are still to be served
            traceback.print_exc()
            return f"the queue's server failed: {error!r}", []

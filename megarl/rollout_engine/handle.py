"""Rank 0's end of the coordinator: starts it, and asks."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

import msgspec

from megarl.config import RlRecipe
from megarl.rollout_engine import channel
from megarl.rollout_engine.engine import EngineAddress
from megarl.runtime import Guard, start_child
from megarl.types import WeightVersion

# Shares of runtime.deadline_s: who waits for whom gives up first from the inside out, so that the error names the one
# that hangs. Ranks that wait for rank 0 have all of it.
ENGINE_SHARE = 0.8
COORDINATOR_SHARE = 0.9


class CoordinatorError(RuntimeError):
    """The coordinator said why it cannot go on, or was gone."""


class CoordinatorHandle:
    """A running coordinator. Requests are answered one at a time."""

    def __init__(
        self,
        target: str,
        recipe: RlRecipe,
        scorers: dict[str, EngineAddress],
        key: str,
        *,
        queue: Mapping[str, str],
        max_positions: int,
        guard: Guard,
        log: Path,
        failed_requests: Path,
        journal: Path,
    ) -> None:
        """Start the process that runs `target` ("package.module:function"); `guard` ends the rank when it ends.

        `queue` are the options of its queue's server.
        """
        self._deadline_s = recipe.runtime.deadline_s * COORDINATOR_SHARE
        self._socket, theirs = socket.socketpair()
        config = {
            "recipe": recipe.model_dump(mode="json"),
            "scorers": msgspec.to_builtins(scorers),
            "key": key,
            "queue": queue,
            "max_positions": max_positions,
            "failed_requests": str(failed_requests),
            "journal": str(journal),
            "channel_fd": theirs.fileno(),
        }
        with theirs:
            self.child = start_child(
                target,
                config,
                name="coordinator",
                log=log,
                pass_fds=[theirs.fileno()],
            )
        guard.watch(self.child)

    def serve(self, engines: dict[int, EngineAddress], *, published: WeightVersion | None) -> None:
        """Requests go to these engines, by number, from now on; `published` is a new version that they have."""
        self._send(channel.Serve(engines, published))

    def generate(self) -> None:
        """Rollouts may start, as many as the version allows that was published last."""
        self._send(channel.Generate())

    def saved(self, step: int) -> None:
        """A checkpoint has `step` finished steps."""
        self._send(channel.Saved(step))

    def ask(self, request: channel.Take | channel.Look | channel.Drain | channel.Evaluate) -> channel.Reply:
        """What was asked for, or that it is not there yet."""
        self._send(request)
        self._socket.settimeout(self._deadline_s)
        reply = channel.decode_reply(self._receive(channel.HEADER.unpack(self._receive(channel.HEADER.size))[0]))
        if isinstance(reply, channel.Failed):
            raise CoordinatorError(reply.cause)
        return reply

    def _send(self, request: channel.Request) -> None:
        try:
            self._socket.sendall(channel.frame(request))
        except OSError as error:
            raise CoordinatorError(f"the coordinator is gone ({error}); see {self.child.log}") from error

    def _receive(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                part = self._socket.recv(min(count - len(data), 1 << 20))
            except TimeoutError:
                raise CoordinatorError(
                    f"the coordinator (pid {self.child.process.pid}) has not answered for {self._deadline_s:.0f} s;"
                    f" see {self.child.log}"
                ) from None
            if not part:
                raise CoordinatorError(f"the coordinator hung up; see {self.child.log}")
            data += part
        return bytes(data)

"""Request and reply between rank 0 and its coordinator: msgpack frames over a socket pair of theirs alone."""

from __future__ import annotations

import asyncio
import struct

import msgspec

from megarl.rollout_engine.engine import EngineAddress
from megarl.types import Offer, WeightVersion

HEADER = struct.Struct("!Q")


class Serve(msgspec.Struct, tag=True):
    """Ask these engines, by number, from now on; all hold the same version of the weights. No reply.

    `published` is a new version, with which goes on what was held.
    """

    engines: dict[int, EngineAddress]
    published: WeightVersion | None


class Generate(msgspec.Struct, tag=True):
    """Ask for as many groups as the version allows that was published last. No reply."""


class Take(msgspec.Struct, tag=True):
    """The groups of `step` are wanted. Reply: Taken, or after so many seconds Waiting; then ask again."""

    step: int
    wait_s: float


class Saved(msgspec.Struct, tag=True):
    """A checkpoint has `step` finished steps. No reply."""

    step: int


class Look(msgspec.Struct, tag=True):
    """Which engines were lost meanwhile? Reply: Waiting."""


class Drain(msgspec.Struct, tag=True):
    """Finish all groups that are under way. Reply: Drained, or after so many seconds Waiting; then ask again."""

    wait_s: float


class Evaluate(msgspec.Struct, tag=True):
    """Answer the held-out problems. Reply: Evaluation, or after so many seconds Waiting; then ask again."""

    wait_s: float


class Lost(msgspec.Struct):
    """An engine that died or makes no progress; it is not asked any more."""

    number: int
    address: EngineAddress
    cause: str


class Waiting(msgspec.Struct, tag=True):
    """What was asked for is not there yet, but not given up. `lost` are engines that were lost meanwhile."""

    lost: list[Lost]


class Taken(msgspec.Struct, tag=True):
    """`metrics` are what is logged of the step's rollouts; `asked` counts the prompts that it took."""

    offer: Offer
    asked: int
    metrics: dict[str, float]
    reward_timeouts: int
    reward_crashes: int


class Drained(msgspec.Struct, tag=True):
    """No group is under way."""


class Sample(msgspec.Struct):
    """One answer to one held-out problem, and what the row's first rule says of it."""

    prompt: str
    answer: str
    response: str
    score: float


class Evaluation(msgspec.Struct, tag=True):
    """Share of held-out problems with a score above 0, at temperature 1 and greedy; the first temperature-1 samples."""

    accuracy: float
    accuracy_greedy: float
    mean_length: float
    samples: list[Sample]


class Failed(msgspec.Struct, tag=True):
    """The coordinator cannot go on."""

    cause: str


Request = Serve | Generate | Saved | Take | Look | Drain | Evaluate
Reply = Taken | Drained | Evaluation | Waiting | Failed

encode = msgspec.msgpack.encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """The next one; None: rank 0 has hung up."""
    try:
        (length,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    except asyncio.IncompleteReadError:
        return None
    return decode_request(await reader.readexactly(length))


def frame(message: Request | Reply) -> bytes:
    """A message with its length in front."""
    payload = encode(message)
    return HEADER.pack(len(payload)) + payload

"""Request and reply between rank 0 and its coordinator: msgpack frames over a socket pair of theirs alone."""

from __future__ import annotations

import struct

import msgspec

from megarl.rollout_engine.engine import EngineAddress
from megarl.types import Group, WeightVersion

HEADER = struct.Struct("!Q")


class Serve(msgspec.Struct, tag=True):
    """Ask these engines from now on; all hold the same version of the weights. No reply."""

    engines: list[EngineAddress]


class Generate(msgspec.Struct, tag=True):
    """The engines hold `version`: generate what it should train on. No reply."""

    version: WeightVersion


class Take(msgspec.Struct, tag=True):
    """Wait for the groups of `step`. Reply: Taken."""

    step: int


class Evaluate(msgspec.Struct, tag=True):
    """Answer the held-out problems. Reply: Evaluation."""


class Taken(msgspec.Struct, tag=True):
    """`generation_s` is the time from the Generate until the last group was scored, `asked` the prompts it took."""

    groups: list[Group]
    asked: int
    generation_s: float
    reward_timeouts: int
    reward_crashes: int


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


Request = Serve | Generate | Take | Evaluate
Reply = Taken | Evaluation | Failed

encode = msgspec.msgpack.encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def frame(message: Request | Reply) -> bytes:
    """A message with its length in front."""
    payload = encode(message)
    return HEADER.pack(len(payload)) + payload

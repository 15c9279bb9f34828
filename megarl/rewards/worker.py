"""One reward worker: a process that scores responses one after the other and may be killed at any moment.

Started by `pool.py`, spoken to over stdin and stdout. Each message to it is 4 bytes of length (little-endian) and that
many of msgpack: first one `Setup`, then [rule, response, answer] for each item. Each answer is 8 bytes, a little-endian
double: first READY once the rules are loaded, then one score for each item, in order, as soon as it is known. The
worker ends when stdin closes. An exception in a rule ends it too: the pool counts that and scores the item 0.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
from typing import Any, BinaryIO

import msgspec

from megarl.config import FLOAT_MAX
from megarl.rewards.rules import build_rule

LENGTH = struct.Struct("<I")
SCORE = struct.Struct("<d")
READY = 1.0
# math-verify with sympy needs a tenth of it; a hostile expression could take the node's
ADDRESS_SPACE_BYTES = 2 << 30
WARM_UP = ("The answer is $1$.", "1")


class Setup(msgspec.Struct, frozen=True):
    """What a worker is told first: the rules by name, as plain values."""

    rules: dict[str, dict[str, Any]]


def main() -> None:
    """Score until stdin closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches every process of the terminal; the pool decides
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies, requests = _take_stdout(), _take_stdin()
    setup = _receive(requests)
    if setup is None:
        return
    options = msgspec.msgpack.decode(setup, type=Setup).rules
    rules = {name: build_rule(option) for name, option in options.items()}
    for name, option in options.items():
        if option["type"] != "own":  # the library's first use takes most of a second
            rules[name](*WARM_UP)
    os.write(replies, SCORE.pack(READY))
    decode = msgspec.msgpack.Decoder(tuple[str, str, str]).decode
    while (request := _receive(requests)) is not None:
        name, response, answer = decode(request)
        score = float(rules[name](response, answer))
        if not abs(score) <= FLOAT_MAX:
            raise ValueError(f"rule {name} gave {score}, expected a number of float32")
        os.write(replies, SCORE.pack(score))


def message(content: Any) -> bytes:
    """`content` as one message to a worker."""
    body = msgspec.msgpack.encode(content)
    return LENGTH.pack(len(body)) + body


def _take_stdout() -> int:
    """A private descriptor for replies; what libraries print goes to stderr from now on."""
    replies = os.dup(1)
    os.dup2(2, 1)
    return replies


def _take_stdin() -> BinaryIO:
    """A private stream of requests; what rules start would else read them."""
    requests = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return os.fdopen(requests, "rb")


def _receive(stream: BinaryIO) -> bytes | None:
    """The next message, or None when the stream has ended."""
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(header)
    body = stream.read(length)
    return body if len(body) == length else None

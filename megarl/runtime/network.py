"""Addresses and ports of this node, as the other ranks reach them."""

from __future__ import annotations

import socket

LOOPBACK = "127.0.0.1"


def node_address(hosts: list[str]) -> str:
    """The address at which the other ranks reach this node: loopback if all `hosts` (one a rank) are one machine."""
    if len(set(hosts)) == 1:
        return LOOPBACK
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise ValueError(
            f"this node's name {name!r} has no address ({error}); other nodes could not reach it"
        ) from error
    if address.startswith("127."):
        raise ValueError(
            f"this node's name {name!r} resolves to {address}, which other nodes cannot reach; mend /etc/hosts or DNS"
        )
    return address


def listen(address: str) -> socket.socket:
    """A socket that listens on `address` and a port that the operating system chose."""
    listener = socket.create_server((address, 0))
    listener.set_inheritable(False)
    return listener


def free_port(address: str) -> int:
    """A port that was free on `address` a moment ago, for servers that cannot be handed a socket."""
    with listen(address) as listener:
        return int(listener.getsockname()[1])

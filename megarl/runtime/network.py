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


def hold_port(address: str) -> socket.socket:
    """A socket whose port nobody is given while it lives, for a server that cannot be handed a socket.

    It does not listen, so a server that binds the port by number with SO_REUSEADDR, as servers do, still gets it;
    connections going out and servers that ask the operating system for any port do not.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    return holder

"""Addresses and ports: others can reach what we name, and strangers cannot reach more."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket

import pytest

from megarl.runtime import hold_port, node_address
from megarl.runtime.network import LOOPBACK, listen


@pytest.mark.parametrize("hosts", [["a"], ["a", "a", "a"]])
def test_one_machine_speaks_to_itself(hosts: list[str]) -> None:
    assert node_address(hosts) == LOOPBACK


def test_several_machines_need_an_address_that_is_not_loopback() -> None:
    """Whatever this machine is called: an address of its own that others can use, or an error with its name."""
    name = socket.gethostname()
    try:
        address = node_address([name, "another"])
    except ValueError as error:
        assert repr(name) in str(error)  # noqa: PT017 - either outcome is right, depending on the machine
    else:
        assert not ipaddress.ip_address(address).is_loopback


def test_a_listener_is_bound_to_its_address_alone() -> None:
    with listen(LOOPBACK) as listener:
        address, port = listener.getsockname()
        assert address == LOOPBACK
        assert not os.get_inheritable(listener.fileno())
        with socket.create_connection((LOOPBACK, port), timeout=5):
            pass
        # all of 127.0.0.0/8 is this machine
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)


def test_a_held_port_is_kept_for_its_server() -> None:
    with hold_port(LOOPBACK) as held:
        assert not os.get_inheritable(held.fileno())
        address = held.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)
        with socket.socket() as other, pytest.raises(OSError, match=os.strerror(errno.EADDRINUSE)):
            other.bind(address)
        with socket.create_server(address) as server:  # sets SO_REUSEADDR, as servers do
            assert server.getsockname() == address


def test_many_held_ports_differ() -> None:
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(hold_port(LOOPBACK)).getsockname()[1] for _ in range(500)]
    assert len(set(ports)) == len(ports)

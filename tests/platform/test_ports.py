"""Ports that a launcher reserves for a server in another process."""

from __future__ import annotations

import errno
import os
import socket
import struct

import pytest

from collective.platform import held_port

#: Addresses at which another program could listen.
ADDRESSES = [
    pytest.param(socket.AF_INET, "127.0.0.1", id="loopback"),
    pytest.param(socket.AF_INET, "127.0.0.2", id="another loopback address"),
    pytest.param(socket.AF_INET, "0.0.0.0", id="all addresses"),
    pytest.param(socket.AF_INET6, "::", id="all IPv6 addresses"),
]
# From <linux/in.h>; an option of Linux 6.3. The lower half is the first port, the upper the last.
IP_LOCAL_PORT_RANGE = 51


def bound(family: socket.AddressFamily, address: str, port: int) -> None:
    with socket.socket(family) as thief:
        thief.bind((address, port))


def only(thief: socket.socket, port: int) -> None:
    """Let the kernel choose no other port than ``port`` for a socket."""
    try:
        thief.setsockopt(
            socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port << 16 | port)
        )
    except OSError:
        pytest.skip("this kernel has no IP_LOCAL_PORT_RANGE")


@pytest.mark.parametrize(("family", "address"), ADDRESSES)
def test_held_port_refuses_another_program(family: socket.AddressFamily, address: str) -> None:
    with held_port() as port, pytest.raises(OSError, match="in use"):
        bound(family, address, port)


@pytest.mark.parametrize("reuse", [0, 1])
def test_held_port_is_not_chosen_for_a_server(reuse: int) -> None:
    with held_port() as port, socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        only(thief, port)
        with pytest.raises(OSError, match="in use"):
            thief.bind(("127.0.0.1", 0))


def test_held_port_is_not_chosen_for_a_connection() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        held_port() as port,
        socket.socket() as thief,
    ):
        only(thief, port)
        with pytest.raises(OSError, match=os.strerror(errno.EADDRNOTAVAIL)):
            thief.connect(server.getsockname())


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_held_port_admits_its_server(address: str) -> None:
    with (
        held_port() as port,
        socket.create_server((address, port)) as server,
        socket.create_connection(("127.0.0.1", port), timeout=10),
    ):
        server.settimeout(10)
        server.accept()[0].close()


@pytest.mark.parametrize("libuv", [True, False])
def test_held_port_admits_store_of_torch(libuv: bool) -> None:
    dist = pytest.importorskip("torch.distributed")
    with held_port() as port:
        served = dist.TCPStore("127.0.0.1", port, is_master=True, use_libuv=libuv)
        served.set("key", "value")
        client = dist.TCPStore("127.0.0.1", port, is_master=False, use_libuv=libuv)
        assert client.get("key") == b"value"


def test_held_port_without_ipv6_is_held_for_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_ipv6", False)
    with held_port() as port, pytest.raises(OSError, match="in use"):
        bound(socket.AF_INET, "127.0.0.1", port)


def test_held_port_is_free_afterwards() -> None:
    with held_port() as port:
        pass
    bound(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET, "", port)

"""Network interfaces of this host, and the address at which other hosts reach it."""

from __future__ import annotations

import ctypes
import json
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from collective.errors import ConfigError, RendezvousError
from collective.start import network
from collective.start.network import Interface, address_of, address_toward, interfaces, own_address
from tests.support.network_hosts import Hosts, needs_hosts

ETH = Interface("eth0", ("10.1.0.4", "fd00::4", "fe80::4"), up=True, loopback=False)
LO = Interface("lo", ("127.0.0.1", "::1"), up=True, loopback=True)


@pytest.fixture
def these(monkeypatch: pytest.MonkeyPatch):
    """Return a function that replaces this host's interfaces, without a usable name or route."""

    def give(*replacements: Interface) -> None:
        monkeypatch.setattr(network, "interfaces", lambda: list(replacements))
        monkeypatch.setattr(network, "_of_own_name", list)
        monkeypatch.setattr(network, "_of_default_route", list)

    return give


def test_interfaces_contains_loopback_marked_as_such() -> None:
    (loopback,) = [entry for entry in interfaces() if "127.0.0.1" in entry.addresses]
    assert loopback.loopback
    assert loopback.up
    assert {entry.name for entry in interfaces()} >= {name for _, name in socket.if_nameindex()}


def test_interfaces_matches_output_of_ip_address() -> None:
    try:
        listed = subprocess.run(["ip", "-j", "address"], capture_output=True, check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("no ip(8) here that writes JSON")
    # Other tests create and remove interfaces, which may happen between the two listings.
    for entry in json.loads(listed.stdout):
        if entry["link_type"] == "ether" and not entry["ifname"].startswith(("eth", "en")):
            continue
        (interface,) = [
            candidate for candidate in interfaces() if candidate.name == entry["ifname"]
        ]
        assert set(interface.addresses) == {info["local"] for info in entry["addr_info"]}
        assert interface.up == ("UP" in entry["flags"])
        assert interface.loopback == ("LOOPBACK" in entry["flags"])


def test_address_of_loopback_returns_127_0_0_1() -> None:
    (loopback,) = [entry.name for entry in interfaces() if "127.0.0.1" in entry.addresses]
    assert address_of(loopback) == "127.0.0.1"


def test_address_of_prefers_ipv4_and_ignores_link_local_addresses(these) -> None:
    these(LO, ETH, Interface("ib0", ("fd00::5", "fe80::5"), up=True, loopback=False))
    assert address_of("eth0") == "10.1.0.4"
    assert address_of("ib0") == "fd00::5"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("eth7", "no interface of that name"),
        ("eth1", "it is down"),
        ("eth2", "no address"),
        ("eth3", "no address"),
    ],
)
def test_address_of_unusable_interface_raises_and_lists_interfaces(these, name, fault) -> None:
    these(
        ETH,
        Interface("eth1", ("10.1.0.5",), up=False, loopback=False),
        Interface("eth2", (), up=True, loopback=False),
        Interface("eth3", ("fe80::6",), up=True, loopback=False),
    )
    with pytest.raises(ConfigError, match=fault) as caught:
        address_of(name)
    assert "eth0 (10.1.0.4, fd00::4, fe80::4), eth1 (10.1.0.5, down)" in str(caught.value)
    assert "COLLECTIVE_INTERFACE" in str(caught.value)


def test_address_toward_this_host_is_loopback() -> None:
    assert address_toward("127.0.0.1", 80) == "127.0.0.1"
    assert address_toward("localhost", 80) in ("127.0.0.1", "::1")


def test_address_toward_unknown_name_raises_rendezvous_error() -> None:
    with pytest.raises(RendezvousError, match=r"no-such-host\.invalid.*does not resolve"):
        address_toward("no-such-host.invalid", 80)


def test_own_address_belongs_to_an_interface() -> None:
    assert own_address() in {address for entry in interfaces() for address in entry.addresses}


def test_own_address_prefers_name_then_route_then_any(these, monkeypatch) -> None:
    ib = Interface("ib0", ("10.2.0.4",), up=True, loopback=False)
    ppp = Interface("ppp0", ("10.3.0.4",), up=True, loopback=False)
    these(LO, ETH, ib, ppp)
    assert own_address() == "10.1.0.4"
    monkeypatch.setattr(network, "_of_default_route", lambda: ["10.2.0.4"])
    assert own_address() == "10.2.0.4"
    # Debian's address for its own name, an address of another host now, and the right address.
    monkeypatch.setattr(network, "_of_own_name", lambda: ["127.0.1.1", "10.9.9.9", "10.3.0.4"])
    assert own_address() == "10.3.0.4"


def test_own_address_of_host_with_loopback_alone_is_loopback(these) -> None:
    these(LO, Interface("eth0", ("10.1.0.4",), up=False, loopback=False))
    assert own_address() == "127.0.0.1"


def test_own_address_and_address_toward_agree_between_hosts(tmp_path: Path) -> None:
    needs_hosts()
    with Hosts(2, tmp_path) as hosts:
        program = (
            "from collective.start.network import *; "
            "print(own_address(), address_of('eth0'), address_toward('host0', 1))"
        )
        job = hosts.start([(1, [sys.executable, "-c", program], {})])
        assert job.succeed().split() == [hosts.hosts[1].address] * 3


@pytest.mark.parametrize(
    ("family", "address", "packed"),
    [
        (socket.AF_INET, "10.1.2.3", bytes(2) + socket.inet_aton("10.1.2.3")),
        (socket.AF_INET6, "fd00::7", bytes(6) + socket.inet_pton(socket.AF_INET6, "fd00::7")),
        (17, "", bytes(20)),  # an address of the link layer
    ],
)
def test_address_is_read_in_layout_of_system(family: int, address: str, packed: bytes) -> None:
    memory = ctypes.create_string_buffer(struct.pack("H", family) + packed, 32)
    pointer = ctypes.cast(memory, ctypes.POINTER(network._Address))
    assert network._text(pointer) == address

"""Network interfaces of this host, and the address at which other hosts reach it."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
from collections.abc import Iterator
from typing import NamedTuple

from collective.errors import ConfigError, RendezvousError

# From <net/if.h>.
_IFF_UP = 0x1
_IFF_LOOPBACK = 0x8
# Addresses reserved for documentation (RFC 5737, RFC 3849): only the default route leads there.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")


class Interface(NamedTuple):
    """Network interface of this host.

    Attributes:
        name: name such as ``eth0``.
        addresses: IPv4 before IPv6, link-local addresses last; without prefix length or scope.
        up: whether the interface is switched on.
        loopback: whether the interface only leads to this host.
    """

    name: str
    addresses: tuple[str, ...]
    up: bool
    loopback: bool


def interfaces() -> list[Interface]:
    """Return the network interfaces of this host (network namespace), in the system's order."""
    addresses: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    flags: dict[str, int] = {}
    for name, flag, address in _entries():
        flags[name] = flag
        own = addresses.setdefault(name, [])
        if address and address not in own:
            own.append(address)
    return [
        Interface(
            name,
            tuple(sorted(own, key=_preference)),
            bool(flags.get(name, 0) & _IFF_UP),
            bool(flags.get(name, 0) & _IFF_LOOPBACK),
        )
        for name, own in addresses.items()
    ]


def address_of(interface: str) -> str:
    """Return the first IPv4 address of an interface, or else a global IPv6 address.

    Raises:
        ConfigError: there is no such interface, it is down, or it has no usable address. The text
            lists the interfaces of this host.
    """
    there = {found.name: found for found in interfaces()}
    found = there.get(interface)
    addresses = [a for a in found.addresses if not _is_link_local(a)] if found else []
    if found is not None and found.up and addresses:
        return addresses[0]
    if found is None:
        fault = "this host has no interface of that name"
    elif not found.up:
        fault = "it is down"
    else:
        fault = "it has no address that other hosts could use; link-local ones are not used"
    listed = ", ".join(
        f"{other.name} ({', '.join(other.addresses) or 'no address'}{'' if other.up else ', down'})"
        for other in there.values()
    )
    raise ConfigError(
        f"interface: {interface!r}; {fault}; {socket.gethostname()} has {listed}. Set "
        "COLLECTIVE_INTERFACE to one of them, or leave it unset."
    )


def address_toward(host: str, port: int) -> str:
    """Return the local address from which this host would reach ``host``, without sending.

    Raises:
        RendezvousError: ``host`` does not resolve, or no route leads there.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise RendezvousError(
            f"rendezvous: host {host!r} does not resolve on {socket.gethostname()}: {error}. "
            "Correct the name, or give an address."
        ) from error
    refusal: OSError | None = None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)  # with UDP, the kernel only looks up the route
            except OSError as error:
                refusal = error
                continue
            local: str = probe.getsockname()[0]
            return local.partition("%")[0]
    raise RendezvousError(
        f"rendezvous: no route from {socket.gethostname()} to {host!r}: {refusal}. Connect the "
        "hosts, or set an address of that host that this host can reach (`collective doctor` "
        "lists the addresses of the host on which it runs)."
    ) from refusal


def own_address() -> str:
    """Return the address at which other hosts most likely reach this one.

    This is the address of the host's own name, which the name service of a cluster knows. If that
    is not an address of an interface here, it is the address of the default route, or else that of
    the first interface that is up. A host that has only loopback gets ``"127.0.0.1"``.
    """
    there = [
        address
        for found in interfaces()
        if found.up and not found.loopback
        for address in found.addresses
        if not _is_link_local(address)
    ]
    for candidate in (*_of_own_name(), *_of_default_route(), *there):
        if candidate in there:
            return candidate
    return "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is localhost or a loopback address, such as 127.0.0.1 or ::1."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _of_own_name() -> Iterator[str]:
    # Debian's /etc/hosts maps the own name to a loopback address, so the result may be useless.
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return
    for *_, address in found:
        yield str(address[0])


def _of_default_route() -> Iterator[str]:
    for elsewhere in _ELSEWHERE:
        try:
            yield address_toward(elsewhere, 9)
        except RendezvousError:
            continue


def _preference(address: str) -> tuple[bool, bool]:
    parsed = ipaddress.ip_address(address)
    return _is_link_local(address), parsed.version == 6


def _is_link_local(address: str) -> bool:
    return ipaddress.ip_address(address).is_link_local


# -- getifaddrs(3): names, flags and addresses in one call -------------------------------------
#
# psutil lists the interfaces, too. It would be a dependency for this one call.


class _Address(ctypes.Structure):
    """First fields of struct sockaddr_in and sockaddr_in6."""

    _fields_ = (
        ("family", ctypes.c_ushort),
        ("port", ctypes.c_ushort),
        ("inet", ctypes.c_ubyte * 4),  # in sockaddr_in6 this is the flow label
        ("inet6", ctypes.c_ubyte * 16),
    )


class _InterfaceAddress(ctypes.Structure):
    """First fields of struct ifaddrs of <ifaddrs.h>, up to the address."""


_InterfaceAddress._fields_ = (
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_Address)),
)


def _entries() -> Iterator[tuple[str, int, str]]:
    """Yield name, flags and an IP address or an empty text, for every entry of the list."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_InterfaceAddress)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    try:
        entry = first
        while entry:
            fields = entry.contents
            yield os.fsdecode(fields.name), int(fields.flags), _text(fields.address)
            entry = fields.next
    finally:
        libc.freeifaddrs(first)


def _text(pointer: ctypes._Pointer[_Address]) -> str:
    if not pointer:
        return ""
    address = pointer.contents
    if address.family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, bytes(address.inet))
    if address.family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, bytes(address.inet6))
    return ""

"""TCP sockets for the rendezvous of ranks on several hosts: to listen, and to connect."""

from __future__ import annotations

import errno
import socket
import time

from collective.deadline import Deadline
from collective.errors import RendezvousError

from .network import interfaces, is_loopback
from .rendezvous import Endpoint

__all__ = ["CONNECT_S", "listen", "reach", "refuses"]

#: Seconds for one connection attempt. This is longer than a connection across the world takes;
#: a lost packet costs a second.
CONNECT_S = 3.0
_RETRY_S = 0.1


def listen(endpoint: Endpoint, spans_hosts: bool) -> socket.socket | None:
    """Return a socket that listens at ``endpoint`` and nowhere else; None if the port is in use.

    Args:
        endpoint: an address of this host, or a name for one.
        spans_hosts: whether ranks of other hosts have to reach the socket.

    Raises:
        RendezvousError: the address does not belong to this host, or may not be used.
    """
    addresses = [address for _, address in _resolve(endpoint)]
    # Debian maps the host's own name to a loopback address, which other hosts cannot reach.
    if spans_hosts and not is_loopback(endpoint.host) and all(map(is_loopback, addresses)):
        addresses = ["0.0.0.0"]
    refusal: OSError | None = None
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, endpoint.port))
            listener.listen(socket.SOMAXCONN)
            return listener
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                return None
            refusal = error
    own = ", ".join(address for interface in interfaces() for address in interface.addresses)
    raise RendezvousError(
        f"rendezvous: rank 0 cannot listen at {endpoint} ({endpoint.origin}): {refusal}. Rank 0 "
        f"runs on {socket.gethostname()}, whose addresses are {own}. Set the host on which rank 0 "
        "runs, and a port that it may use."
    ) from refusal


def _resolve(endpoint: Endpoint) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RendezvousError(
            f"rendezvous: host {endpoint.host!r} ({endpoint.origin}) does not resolve on "
            f"{socket.gethostname()}: {error}. Correct the name, or give the address of the host "
            "of rank 0."
        ) from error
    return [(family, str(address[0])) for family, *_, address in found]


def refuses(endpoint: Endpoint) -> bool:
    """Return whether no process listens at ``endpoint`` any more: its host refuses connections.

    False after any other answer, and without an answer: the server may still be alive.
    """
    try:
        addresses = _resolve(endpoint)
    except RendezvousError:
        return False
    for family, address in addresses:
        try:
            if _listens(family, address, endpoint.port, Deadline(CONNECT_S)):
                return False
        except ConnectionRefusedError:
            continue
        except OSError:
            return False
    return True


def _listens(family: int, address: str, port: int, deadline: Deadline) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(max(0.01, deadline.left()))
        probe.connect((address, port))
        # Without a listener, a connection to a port of this host may connect to itself.
        return bool(probe.getsockname() != probe.getpeername())


def reach(endpoint: Endpoint, deadline: Deadline) -> str:
    """Wait until a server listens at ``endpoint``, and return the address that answers.

    The client of torch's TCPStore could wait, too, but it writes pages to standard error.
    """
    while True:
        reason = "no address"
        for family, address in _resolve(endpoint):
            try:
                if _listens(family, address, endpoint.port, deadline.within(CONNECT_S)):
                    return address
            except OSError as error:
                reason = str(error)
        if deadline.expired:
            break
        time.sleep(_RETRY_S)
    server = "torchrun's agent" if endpoint.served else "rank 0"
    remedy = "Start it, or correct the address; a firewall may also block the connection."
    if is_loopback(endpoint.host):
        remedy = "Only ranks of the same host reach this address: set the address of rank 0's host."
    raise RendezvousError(
        f"rendezvous: no server answered at {endpoint} ({endpoint.origin}) within "
        f"{deadline.seconds:g} s: {reason}; {server} serves there, but has not started, has "
        f"ended or is unreachable. {remedy}"
    )

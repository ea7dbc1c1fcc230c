"""Where ranks of several hosts meet: listening there, and getting through to it."""

from __future__ import annotations

import errno
import socket
import time

from collective.deadline import Deadline
from collective.errors import RendezvousError

from .network import interfaces, is_loopback
from .rendezvous import Endpoint

__all__ = ["CONNECT_S", "listen", "reach", "refuses"]

#: Longer than a connection across the world takes. A lost packet costs a second.
CONNECT_S = 3.0
_RETRY_S = 0.1


def listen(endpoint: Endpoint, spans_hosts: bool) -> socket.socket | None:
    """Return a socket that listens at ``endpoint`` and nowhere else; None if the port is in use.

    Args:
        endpoint: an address of this host, or a name for one.
        spans_hosts: whether ranks of other hosts have to reach it.

    Raises:
        RendezvousError: it is none of this host's, or may not be used.
    """
    addresses = [address for _, address in _resolve(endpoint)]
    # Debian gives a host's own name a loopback address, under which no other host finds it.
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
    own = ", ".join(address for each in interfaces() for address in each.addresses)
    raise RendezvousError(
        f"rendezvous: rank 0 cannot listen at {endpoint} ({endpoint.origin}): {refusal}; it runs "
        f"on {socket.gethostname()}, which has {own}. Name the host that rank 0 runs on, and a "
        "port that it may use."
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
    """Tell whether nobody listens at ``endpoint`` any more: its host refuses a connection there.

    False after any other answer, or none: who served there may live.
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
        # Without a listener a port of this host may connect to itself.
        return bool(probe.getsockname() != probe.getpeername())


def reach(endpoint: Endpoint, deadline: Deadline) -> str:
    """Wait until somebody listens at ``endpoint`` and return the address that answers.

    torch's client of the agent's store could wait, too, but writes pages to standard error.
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
    server = "torchrun's agent serves there" if endpoint.served else "rank 0 serves there"
    remedy = "Start it, or correct the address; a firewall may be in the way."
    if is_loopback(endpoint.host):
        remedy = "This address leads to the same host only: ranks of several need another."
    raise RendezvousError(
        f"rendezvous: nobody answered at {endpoint} ({endpoint.origin}) within "
        f"{deadline.seconds:g} s: {reason}; {server}, and has not come. {remedy}"
    )

"""Rendezvous store for ranks on several hosts: rank 0 or the launcher serves it; NumPy is enough.

Ranks connect to the store as they connect to the monitor's hub
(:mod:`collective.control.link`): the server reads no request before the peer has proved
that it knows the key. Without a secret, the key is derived from the public name of the launch.
Such a key keeps out other programs and other launches, but no attacker.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import threading
import time
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence, Set

from collective.control.link import (
    KeyDiffersError,
    Link,
    Message,
    Tls,
    close_in_children,
    connect,
)
from collective.control.ports import Ports, listening
from collective.control.secret import COMPARE, Secret
from collective.control.server import LONGEST_MESSAGE, Losses, RefusedError, Server, Values, ask
from collective.control.store import Store
from collective.deadline import Deadline
from collective.errors import RendezvousError

from .network import interfaces, is_loopback
from .rendezvous import Endpoint

#: Seconds for one connection attempt. This is longer than a connection across the world takes;
#: a lost packet costs a second.
CONNECT_S = 3.0
_RETRY_S = 0.1
# How long a launcher waits for the end of its server's thread.
_END_S = 2.0
# A server that takes longer will never answer: its host is off, or its network is cut.
_ANSWER_S = 30.0
# Bounds of the number of ranks that the server accepts. The lower one holds even if this
# process may open only few descriptors.
_ROOM_LEAST, _ROOM_MOST = 128, 1 << 16

# Servers in this process with their keys, by host and port. A server lives as long as the process,
# because the next init() meets there too.
_serving: dict[tuple[str, int], tuple[bytes, Server]] = {}
os.register_at_fork(after_in_child=_serving.clear)


class _AskingStore(Store):
    """Store whose values are those of a server, which answers questions."""

    @abstractmethod
    def _ask(self, kind: str, key: str, value: bytes | None = None) -> bytes | None:
        """Return the answer to a question about a key."""

    def set(self, key: str, value: bytes) -> None:
        self._ask("set", key, value)

    def try_get(self, key: str) -> bytes | None:
        return self._ask("get", key)

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        won = self._ask("put", key, value)
        assert won is not None
        return won

    def delete(self, key: str) -> None:
        self._ask("delete", key)


class TcpStore(_AskingStore):
    """Connection of a rank to the store that rank 0 or the launcher serves.

    Args:
        endpoint: address of the server.
        secret: secret that all ranks share; a public value if the job has none.
        serve: whether this process serves the store.
        server: the serving process, in words.
        spans_hosts: whether ranks of other hosts have to reach the server.
        deadline: moment by which the server must have accepted this rank.
        tls: TLS contexts for the connection, or None.

    Raises:
        RendezvousError: the port is in use, the host's name is wrong, no server answers, or the
            server that answers does not know the secret.
    """

    # Also if the launcher serves. Then the ranks' standbys never serve, because the ranks end with
    # the launcher. But they tell which processes have ended after rank 0 has.
    served_by_rank = True

    # Longer than the default: a poll is a round trip, and a thousand ranks may poll one server.
    _poll_last = 0.05

    def __init__(
        self,
        endpoint: Endpoint,
        secret: Secret,
        *,
        serve: bool,
        spans_hosts: bool,
        deadline: Deadline,
        server: str = "rank 0",
        tls: Tls | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._served_by = server
        self._key = secret.key("store")
        self._tls = tls
        self._asking = threading.Lock()
        self._announced: frozenset[tuple[str, int]] = frozenset()
        self._server = _serve(endpoint, self._key, spans_hosts, tls) if serve else None
        # The server may have refused connections to an earlier communicator.
        self._refused_before = self._refused()
        self._address, link = self._connect(deadline)
        self._use(link)

    def __str__(self) -> str:
        return str(self._endpoint)

    def has_ended(self) -> bool:
        return refuses(self._endpoint)

    def refusals(self) -> tuple[Counter[str], Counter[str]] | None:
        if self._server is None:
            return None
        mistaken, refused = self._refused()
        return mistaken - self._refused_before[0], refused - self._refused_before[1]

    def _refused(self) -> tuple[Counter[str], Counter[str]]:
        if self._server is None:
            return Counter(), Counter()
        return Counter(dict(self._server.mistaken)), Counter(dict(self._server.refused))

    def announced(self) -> Set[tuple[str, int]]:
        # A thread that is asking receives announcements, too.
        if self._asking.acquire(blocking=False):
            try:
                # The link may be closed, or its server gone: the next question connects again.
                with contextlib.suppress(EOFError, OSError, ValueError):
                    for message in self._link.arrived():
                        self._hear(message)
            finally:
                self._asking.release()
        return self._announced

    def _hear(self, message: Message) -> None:
        """Note the processes of an announcement; ignore late answers."""
        self._announced |= {(str(host), int(pid)) for host, pid in message.get("lost", ())}

    def close(self) -> None:
        self._link.close()

    def _use(self, link: Link) -> None:
        self._link = link
        # A store that is dropped without being closed leaves no connection behind.
        weakref.finalize(self, link.close).atexit = False

    def _poll(self, key: str, deadline: Deadline) -> bytes | None:
        # A caller with a short deadline must not wait the full _ANSWER_S for a server that is
        # stopped.
        patience = min(max(deadline.left(), CONNECT_S), _ANSWER_S)
        return self._ask("get", key, deadline=Deadline(patience))

    def _ask(
        self, kind: str, key: str, value: bytes | None = None, deadline: Deadline | None = None
    ) -> bytes | None:
        """Return the server's answer."""
        if deadline is None:
            deadline = Deadline(_ANSWER_S)
        with self._asking:
            try:
                try:
                    return ask(self._link, kind, key, value, deadline, self._hear)
                except (EOFError, OSError, ValueError) as error:
                    # Only the kernel's own timeout (ETIMEDOUT) has an errno. It means that the
                    # connection is lost; without one, the deadline has passed.
                    if isinstance(error, TimeoutError) and error.errno is None:
                        raise TimeoutError(f"no answer within {deadline.seconds:.3g} s") from None
                    # The connection may have broken since its last use. All requests are
                    # idempotent, so the rank connects again and repeats the request.
                    self._link.close()
                    self._use(self._connect_again(deadline))
                    return ask(self._link, kind, key, value, deadline, self._hear)
            except RefusedError as error:
                raise RendezvousError(
                    f"rendezvous: {kind} of {key!r} at {self._endpoint}: {error}."
                ) from error
            except (EOFError, OSError, ValueError) as error:
                raise RendezvousError(
                    f"rendezvous: {kind} of {key!r} at {self._endpoint} failed: {error}. "
                    f"{self._served_by.capitalize()} serves this store, and it has ended or is "
                    f"unreachable. Keep {self._served_by} running for as long as other ranks "
                    "connect or make groups."
                ) from error

    def _connect(self, deadline: Deadline) -> tuple[str, Link]:
        """Return the server's address and a link to the server, waiting until it listens.

        Raises:
            RendezvousError: no server has accepted this rank by the deadline.
        """
        refusal: Exception | None = None
        while True:
            address = f"{reach(self._endpoint, deadline)} {self._endpoint.port}"
            try:
                return address, self._link_to(address, deadline)
            except (EOFError, OSError) as error:
                # The peer may be the server of an earlier launch that is about to end. The last
                # attempt has no time left, so an earlier one says more about the key.
                refusal = refusal if isinstance(refusal, KeyDiffersError) else error
                if deadline.expired:
                    raise _refused(self._endpoint, self._served_by, deadline, refusal) from error
                time.sleep(_RETRY_S)

    def _connect_again(self, deadline: Deadline) -> Link:
        """Return another link to the server.

        Raises:
            EOFError, OSError: no server accepts this rank by the deadline, or it has ended.
        """
        while True:
            try:
                return self._link_to(self._address, deadline)
            except ConnectionRefusedError:
                raise  # the server listens for as long as its process lives, so it has ended
            except (EOFError, OSError):
                # When a process is killed, its connections may end before its listening socket.
                # Retry: the next attempt finds out whether the port refuses.
                if deadline.left() <= _RETRY_S:
                    raise
                time.sleep(_RETRY_S)

    def _link_to(self, address: str, deadline: Deadline) -> Link:
        return connect(address, self._key, deadline, self._tls)


def _refused(
    endpoint: Endpoint, server: str, deadline: Deadline, refusal: Exception
) -> RendezvousError:
    """Return the error for a rank that the program at the store's address has refused."""
    port = (
        "the port belongs to another launch or another program, such as torch.distributed's store: "
        "choose another port."
    )
    if isinstance(refusal, KeyDiffersError):
        return RendezvousError(
            f"rendezvous: {server} ({endpoint}, {endpoint.origin}) did not let this rank join "
            f"within {deadline.seconds:g} s: {refusal}. Most likely its secret differs. {COMPARE}. "
            f"Either all ranks have the same secret, or none has one. If the secrets agree, {port}"
        )
    return RendezvousError(
        f"rendezvous: the program that answers at {endpoint} ({endpoint.origin}) is not "
        f"{server} of this job: {refusal}. If one rank has certificates (COLLECTIVE_TLS), all "
        f"need them. Otherwise {port}"
    )


class StoreServer:
    """Server of a store in this process, for ranks in other processes; a context manager.

    Args:
        host: address of this host at which the ranks reach the server.
        secret: secret that the ranks share.
        tls: TLS contexts for the connections, or None.
        ports: the setting ``port``: where the server may listen.

    Attributes:
        endpoint: address of the server.

    Raises:
        ConfigError: none of these ports is free.
        RendezvousError: the address does not belong to this host, or may not be used.
    """

    def __init__(self, host: str, secret: Secret, tls: Tls | None = None, ports: str = "") -> None:
        endpoint = Endpoint(host, 0, "the launcher's address")
        allowed = Ports.parse(ports) if ports else None
        listening = listen(endpoint, not is_loopback(host), allowed)
        assert listening is not None  # port 0 is never in use
        self.endpoint = Endpoint(host, listening.getsockname()[1], "the launcher's address")
        self._listening = listening
        self._values = _LaunchersValues()
        _, self._thread = _start(listening, secret.key("store"), self._values, tls)

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, *error: object) -> None:
        self._values.over = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
        # The thread waits for no peer, and ends at once. It is a daemon, so if it should not, the
        # process ends all the same.
        self._thread.join(_END_S)

    def announce(self, processes: Sequence[tuple[str, int]]) -> None:
        """Tell all ranks that ``processes`` are lost: host and number of each."""
        self._values.lose(processes)

    def store(self) -> Store:
        """Return the store for this process itself, which needs no connection and never waits."""
        return _OwnStore(self._values, self.endpoint)


class _LaunchersValues(Losses):
    """Values of a launcher, which may end their server, and uses them itself.

    Attributes:
        over: whether the server ends.
    """

    over = False

    def __init__(self) -> None:
        super().__init__()
        self._using = threading.Lock()

    def turn(self) -> bool:
        return not self.over

    def answer(self, message: Message) -> Message:
        with self._using:
            return super().answer(message)


class _OwnStore(_AskingStore):
    """Store in the process that serves it."""

    def __init__(self, values: _LaunchersValues, endpoint: Endpoint) -> None:
        self._values = values
        self._endpoint = endpoint

    def __str__(self) -> str:
        return str(self._endpoint)

    def _ask(self, kind: str, key: str, value: bytes | None = None) -> bytes | None:
        question = {"kind": kind, "key": key, "number": 0, "value": (value or b"").hex()}
        answer = self._values.answer(question)
        if "why" in answer:
            raise RendezvousError(f"rendezvous: {kind} of {key!r} at {self}: {answer['why']}.")
        text = answer.get("value")
        return None if text is None else bytes.fromhex(text)


# -- serving -------------------------------------------------------------------------------


def _serve(endpoint: Endpoint, key: bytes, spans_hosts: bool, tls: Tls | None) -> Server:
    """Return the server at ``endpoint``, which this process starts unless it already has."""
    where = endpoint.host, endpoint.port
    if where in _serving:
        served, server = _serving[where]
        if served != key:
            raise RendezvousError(
                f"rendezvous: this process already serves ranks with another secret, or of another "
                f"launch, at {endpoint} ({endpoint.origin}). Set another port, the same on all "
                "ranks."
            )
        return server
    listening = listen(endpoint, spans_hosts)
    if listening is None:
        raise RendezvousError(
            f"rendezvous: port {endpoint.port} of {endpoint.host} ({endpoint.origin}) is in use on "
            f"{socket.gethostname()} by another program, by torch.distributed in this one, or by "
            "an earlier run that has not ended. Set COLLECTIVE_STORE=tcp://HOST:PORT with another "
            "port, the same on all ranks."
        )
    server, _ = _start(listening, key, Values(), tls)
    _serving[where] = key, server
    return server


def _start(
    listening: socket.socket, key: bytes, values: Values, tls: Tls | None
) -> tuple[Server, threading.Thread]:
    """Start a server, and return it with its thread."""
    close_in_children(listening)
    server = Server(listening, key, values, tls, longest=LONGEST_MESSAGE, room=_room())
    thread = threading.Thread(target=server.run, name="collective-store", daemon=True)
    thread.start()
    return server, thread


def _room() -> int:
    """Return how many ranks the server accepts at once; the program needs descriptors, too."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _ROOM_MOST
    return min(max(limit // 2, _ROOM_LEAST), _ROOM_MOST)


# -- sockets -------------------------------------------------------------------------------


def listen(
    endpoint: Endpoint, spans_hosts: bool, ports: Ports | None = None
) -> socket.socket | None:
    """Return a socket that listens at ``endpoint`` and nowhere else; None if the port is in use.

    Args:
        endpoint: an address of this host, or a name for one.
        spans_hosts: whether ranks of other hosts have to reach the socket.
        ports: the ports to choose from in place of that of ``endpoint``, or None.

    Raises:
        ConfigError: none of ``ports`` is free.
        RendezvousError: the address does not belong to this host, or may not be used.
    """
    addresses = [address for _, address in _resolve(endpoint)]
    # Debian maps the host's own name to a loopback address, which other hosts cannot reach.
    if spans_hosts and not is_loopback(endpoint.host) and all(map(is_loopback, addresses)):
        addresses = ["0.0.0.0"]
    refusal: OSError | None = None
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            if ports is not None:
                return ports.listen(family, (address, 0))
            return listening(family, (address, endpoint.port))
        except OSError as error:
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

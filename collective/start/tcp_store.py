"""The rendezvous store of ranks on several hosts: rank 0 serves it, and NumPy is all it takes.

Ranks connect to it as they do to the monitor's hub (:mod:`collective.backends.peers.link`): the
server listens to nobody who has not proved that it knows the key. Without a secret the key follows
from the launch's public name: then it keeps out other programs and other launches, and nobody who
means harm.
"""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
import weakref

from collective.backends.peers.link import Link, close_in_children, connect
from collective.backends.peers.server import Server
from collective.backends.peers.values import LONGEST_MESSAGE, RefusedError, Values, ask
from collective.contract.secret import Secret
from collective.contract.store import Store
from collective.contract.world import Tls
from collective.deadline import Deadline
from collective.errors import RendezvousError

from .rendezvous import Endpoint
from .tcp import CONNECT_S, listen, reach, refuses

__all__ = ["TcpStore"]

_RETRY_S = 0.1
# An answer that takes longer will never come: the server's host is off, or cut off.
_ANSWER_S = 30.0
# How many ranks the server takes if this process may have few descriptors, and at most.
_ROOM_LEAST, _ROOM_MOST = 128, 1 << 16

# The servers of this process. They live as long as it does: the next init() meets there too.
_serving: dict[tuple[str, int], bytes] = {}
os.register_at_fork(after_in_child=_serving.clear)


class TcpStore(Store):
    """One rank's connection to the store that rank 0 serves.

    Args:
        endpoint: where.
        secret: all ranks have the same; one that is public if the job has none.
        serve: whether this process serves.
        spans_hosts: whether ranks of other hosts have to reach the server.
        deadline: moment by which the server must have let this rank in.
        tls: for the connection, or None.

    Raises:
        RendezvousError: the port is in use, the host's name is wrong, nobody answers, or who
            answers does not know the secret.
    """

    served_by_rank = True

    # A poll is a round trip, and a thousand ranks may poll one server.
    _poll_last = 0.05

    def __init__(
        self,
        endpoint: Endpoint,
        secret: Secret,
        *,
        serve: bool,
        spans_hosts: bool,
        deadline: Deadline,
        tls: Tls | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._key = secret.key("store")
        self._tls = tls
        self._asking = threading.Lock()
        if serve:
            _serve(endpoint, self._key, spans_hosts, tls)
        self._address, link = self._connect(deadline)
        self._use(link)

    def __str__(self) -> str:
        return str(self._endpoint)

    def has_ended(self) -> bool:
        return refuses(self._endpoint)

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

    def close(self) -> None:
        self._link.close()

    def _use(self, link: Link) -> None:
        self._link = link
        # A store that is dropped without being closed leaves no connection behind.
        weakref.finalize(self, link.close).atexit = False

    def _poll(self, key: str, deadline: Deadline) -> bytes | None:
        # Whoever waits less than a server may take to answer is not held up by one that is stopped.
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
                    return ask(self._link, kind, key, value, deadline)
                except (EOFError, OSError, ValueError) as error:
                    # The system's own timeout has a number: then the connection is over.
                    if isinstance(error, TimeoutError) and error.errno is None:
                        raise TimeoutError(f"no answer within {deadline.seconds:.3g} s") from None
                    # The connection may have broken since it was used; all questions can be
                    # asked twice.
                    self._link.close()
                    self._use(self._connect_again(deadline))
                    return ask(self._link, kind, key, value, deadline)
            except RefusedError as error:
                raise RendezvousError(
                    f"rendezvous: {kind} of {key!r} at {self._endpoint}: {error}."
                ) from error
            except (EOFError, OSError, ValueError) as error:
                raise RendezvousError(
                    f"rendezvous: {kind} of {key!r} at {self._endpoint} failed: {error}. Rank 0 "
                    "serves it, and has ended or cannot be reached any more: keep it running for "
                    "as long as other ranks connect or make groups."
                ) from error

    def _connect(self, deadline: Deadline) -> tuple[str, Link]:
        """Return the server's address, and a link to the server, which may have to be waited for.

        Raises:
            RendezvousError: nobody lets this rank in.
        """
        while True:
            address = f"{reach(self._endpoint, deadline)} {self._endpoint.port}"
            try:
                return address, self._link_to(address, deadline)
            except (EOFError, OSError) as error:
                # It may be the server of an earlier launch, which is about to end.
                if deadline.expired:
                    raise RendezvousError(
                        f"rendezvous: the program that answers at {self._endpoint} "
                        f"({self._endpoint.origin}) is not rank 0 of this job: {error}. Every rank "
                        "needs the same secret (COLLECTIVE_SECRET, COLLECTIVE_SECRET_FILE), or "
                        "none, and certificates (COLLECTIVE_TLS_…) if one has them; or the port is "
                        "another launch's, or another program's, such as torch.distributed's."
                    ) from error
                time.sleep(_RETRY_S)

    def _connect_again(self, deadline: Deadline) -> Link:
        """Return another link to the server.

        Raises:
            EOFError, OSError: nobody lets this rank in by the deadline, or the server has ended.
        """
        while True:
            try:
                return self._link_to(self._address, deadline)
            except ConnectionRefusedError:
                raise  # its socket was open for as long as its process lived
            except (EOFError, OSError):
                # Of a process that is killed, connections end before the port at which it listens.
                if deadline.left() <= _RETRY_S:
                    raise
                time.sleep(_RETRY_S)

    def _link_to(self, address: str, deadline: Deadline) -> Link:
        return connect(address, self._key, deadline, self._tls)


# -- serving -------------------------------------------------------------------------------


def _serve(endpoint: Endpoint, key: bytes, spans_hosts: bool, tls: Tls | None) -> None:
    """Serve at ``endpoint``, unless this process does so already."""
    where = endpoint.host, endpoint.port
    if where in _serving:
        if _serving[where] != key:
            raise RendezvousError(
                f"rendezvous: this process serves the ranks of another secret, or another launch, "
                f"at {endpoint} ({endpoint.origin}). Set another port, on all ranks alike."
            )
        return
    listening = listen(endpoint, spans_hosts)
    if listening is None:
        raise RendezvousError(
            f"rendezvous: port {endpoint.port} of {endpoint.host} ({endpoint.origin}) is in use on "
            f"{socket.gethostname()} by another program, by torch.distributed in this one, or by "
            "an earlier run that has not ended. Set COLLECTIVE_STORE=tcp://HOST:PORT with another "
            "port, on all ranks alike."
        )
    close_in_children(listening)
    server = Server(listening, key, Values(), tls, longest=LONGEST_MESSAGE, room=_room())
    threading.Thread(target=server.run, name="collective-store", daemon=True).start()
    _serving[where] = key


def _room() -> int:
    """Return how many ranks the server takes at once: the program needs descriptors, too."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return _ROOM_MOST
    return min(max(limit // 2, _ROOM_LEAST), _ROOM_MOST)

"""A rendezvous store for ranks on several hosts that have a secret: rank 0 serves it.

It is spoken to as the monitor's hub is (:mod:`collective.backends.peers.link`): whoever does
not know the secret is not listened to. It takes no package beside NumPy.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from typing import Any

from collective.backends.peers.link import Link, Message, close_in_children, connect
from collective.backends.peers.server import Server
from collective.backends.peers.values import Values
from collective.contract.secret import Secret
from collective.contract.store import Store
from collective.contract.world import Tls
from collective.errors import RendezvousError

from .rendezvous import Endpoint
from .tcp import listen, reach, refuses

__all__ = ["PrivateStore"]

_RETRY_S = 0.1
# An answer that takes longer will never come: the server's host is off, or cut off.
_ANSWER_S = 30.0

# The servers of this process. They live as long as it does: the next init() meets there too.
_serving: dict[tuple[str, int], bytes] = {}
os.register_at_fork(after_in_child=_serving.clear)


class PrivateStore(Store):
    """One rank's connection to a store that rank 0 serves.

    Args:
        endpoint: where.
        secret: all ranks have the same.
        serve: whether this process serves.
        spans_hosts: whether ranks of other hosts have to reach the server.
        timeout: seconds until the server must have let this rank in.
        tls: for the connection, or None.

    Raises:
        RendezvousError: the port is in use, the host's name is wrong, nobody answers, or who
            answers does not know the secret.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        secret: Secret,
        *,
        serve: bool,
        spans_hosts: bool,
        timeout: float,
        tls: Tls | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._key = secret.key("store")
        self._tls = tls
        self._numbers = itertools.count()
        self._asking = threading.Lock()
        if serve:
            _serve(endpoint, self._key, spans_hosts, tls)
        self._link = self._connect(timeout)

    def __str__(self) -> str:
        return str(self._endpoint)

    served_by_rank = True

    def has_ended(self) -> bool:
        return refuses(self._endpoint)

    def set(self, key: str, value: bytes) -> None:
        self._ask({"kind": "set", "key": key, "value": value.hex()})

    def try_get(self, key: str) -> bytes | None:
        value = self._ask({"kind": "get", "key": key})
        return None if value is None else bytes.fromhex(value)

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        return bytes.fromhex(self._ask({"kind": "put", "key": key, "value": value.hex()}))

    def delete(self, key: str) -> None:
        self._ask({"kind": "delete", "key": key})

    def close(self) -> None:
        self._link.close()

    def _ask(self, question: Message) -> Any:
        """Return the server's answer."""
        deadline = time.monotonic() + _ANSWER_S
        with self._asking:
            try:
                try:
                    return self._answer(question, deadline)
                except (EOFError, OSError, ValueError):
                    # The connection may have broken since it was used; all questions can be
                    # asked twice.
                    self._link.close()
                    if self.has_ended():
                        raise
                    self._link = self._connect(max(0.0, deadline - time.monotonic()))
                    return self._answer(question, deadline)
            except (EOFError, OSError, ValueError, RendezvousError) as error:
                raise RendezvousError(
                    f"rendezvous: {question['kind']} of {question['key']!r} at {self._endpoint} "
                    f"failed: {error}. Rank 0 serves it, and has ended or cannot be reached any "
                    "more: keep it running for as long as other ranks connect or make groups."
                ) from error

    def _answer(self, question: Message, deadline: float) -> Any:
        number = next(self._numbers)
        self._link.send({**question, "number": number})
        # One to a question that was given up may come before it.
        while (answer := self._link.expect(deadline - time.monotonic())).get("number") != number:
            pass
        return answer.get("value")

    def _connect(self, timeout: float) -> Link:
        """Return a link to the server, which may have to be waited for."""
        deadline = time.monotonic() + timeout
        while True:
            address = reach(self._endpoint, deadline, timeout)
            left = max(0.001, deadline - time.monotonic())
            try:
                return connect(f"{address} {self._endpoint.port}", self._key, left, self._tls)
            except (EOFError, OSError) as error:
                # It may be the server of an earlier launch, which is about to end.
                if time.monotonic() >= deadline:
                    raise RendezvousError(
                        f"rendezvous: who answers at {self._endpoint} ({self._endpoint.origin}) is "
                        f"not rank 0 of this job: {error}. Every rank needs the same secret "
                        "(COLLECTIVE_SECRET, COLLECTIVE_SECRET_FILE), and certificates "
                        "(COLLECTIVE_TLS_…) if one has them; or the port is another program's."
                    ) from error
                time.sleep(_RETRY_S)


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
    server = Server(listening, key, Values(), tls)
    threading.Thread(target=server.run, name="collective-store", daemon=True).start()
    _serving[where] = key

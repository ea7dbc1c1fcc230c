"""A rendezvous store for ranks on several hosts: torch's TCPStore.

One process serves: rank 0, on the one address that the ranks have agreed on, or torchrun's
agent, which does so anyway. The others need it until they are connected, and again when a
transport makes a group.
"""

from __future__ import annotations

import importlib
import queue
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from datetime import timedelta
from typing import Any

from collective.contract.forking import keep_in_children
from collective.contract.store import Store
from collective.errors import BackendUnavailableError, RendezvousError
from collective.install import hint

from .rendezvous import Endpoint
from .tcp import CONNECT_S, listen, reach, refuses

__all__ = ["TcpStore"]

# A poll is a round trip, and a thousand ranks may poll one server.
_POLL_FIRST_S = 0.001
_POLL_LAST_S = 0.05
# An answer that takes longer will never come: the server's host is off, or cut off.
_ANSWER_S = 30.0

# Before this version of torch that backend of the server takes no listening socket.
_LIBUV_LISTENS = (2, 8)

_SECRET = "Or rank 0 has a secret (COLLECTIVE_SECRET, COLLECTIVE_SECRET_FILE): this rank has none."

# What no rank publishes.
_ABSENT = "\0nobody has published this"

# The servers of this process. They live as long as it does: the next init() meets there too.
_serving: dict[tuple[str, int], Any] = {}


class TcpStore(Store):
    """One rank's connection to a TCPStore.

    Args:
        endpoint: where it is served.
        prefix: of all keys; equal for the ranks of one launch, and no other's.
        serve: whether this process serves, unless :attr:`Endpoint.served`.
        spans_hosts: whether ranks of other hosts have to reach the server.
        timeout: seconds until the server must have answered for the first time.

    Raises:
        BackendUnavailableError: there is no torch here; with the install command.
        RendezvousError: the port is in use, the host's name is wrong, or nobody answers.
    """

    def __init__(
        self, endpoint: Endpoint, prefix: str, *, serve: bool, spans_hosts: bool, timeout: float
    ) -> None:
        self._endpoint = endpoint
        self._prefix = prefix
        deadline = time.monotonic() + timeout
        kind = _tcp_store()
        if serve and not endpoint.served and (endpoint.host, endpoint.port) not in _serving:
            _serving[endpoint.host, endpoint.port] = served = _serve(kind, endpoint, spans_hosts)
            keep_in_children(served)
        address = reach(endpoint, deadline, timeout)
        self._calls = _CallThread()
        weakref.finalize(self, self._calls.end)
        left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
        try:
            self._client: Any = self._calls.call(
                lambda: kind(address, endpoint.port, is_master=False, timeout=left),
                left.total_seconds(),
            )
            keep_in_children(self._client)
        except LateError:
            raise RendezvousError(
                f"rendezvous: what listens at {endpoint} ({endpoint.origin}) is no store of "
                f"torch's: it took the connection and did not answer within {timeout:g} s. Is the "
                f"port another program's? Choose one that is free on the host of rank 0. {_SECRET}"
            ) from None
        except RuntimeError as error:
            raise RendezvousError(
                f"rendezvous: the store at {endpoint} ({endpoint.origin}) refused the connection: "
                f"{_first_line(error)}. Is the port another program's? {_SECRET}"
            ) from error

    def __str__(self) -> str:
        return str(self._endpoint)

    @property
    def served_by_rank(self) -> bool:  # type: ignore[override]  # an attribute elsewhere
        return not self._endpoint.served

    def has_ended(self) -> bool:
        return refuses(self._endpoint)

    def set(self, key: str, value: bytes) -> None:
        name = self._prefix + key

        def put() -> None:
            self._client.set(name, value)
            self._client.check([name])  # set waits for no answer, and there may be nobody

        self._ask("set", key, put)

    def get(self, key: str, deadline: float) -> bytes:
        # Not TCPStore's own wait: that would keep other threads from the connection, and
        # writes to standard error when its time is over.
        pause = _POLL_FIRST_S
        while (value := self._try_get(key, deadline)) is None:
            if time.monotonic() >= deadline:
                raise RendezvousError(f"rendezvous: nobody published {key!r} at {self._endpoint}")
            time.sleep(pause)
            pause = min(pause * 1.5, _POLL_LAST_S)
        return value

    def try_get(self, key: str) -> bytes | None:
        return self._try_get(key, time.monotonic() + _ANSWER_S)

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        # An absent key compares as empty, and no rank publishes nothing.
        won: bytes = self._ask(
            "put_if_absent", key, lambda: self._client.compare_set(self._prefix + key, "", value)
        )
        return won

    def delete(self, key: str) -> None:
        self._ask("delete", key, lambda: self._client.delete_key(self._prefix + key))

    def _try_get(self, key: str, deadline: float) -> bytes | None:
        # A comparison that fails changes nothing and returns what is there; of an absent key,
        # what was expected. TCPStore's own get would wait for it.
        patience = min(max(deadline - time.monotonic(), CONNECT_S), _ANSWER_S)
        found: bytes = self._ask(
            "get",
            key,
            lambda: self._client.compare_set(self._prefix + key, _ABSENT, _ABSENT),
            patience,
        )
        return None if found == _ABSENT.encode() else found

    def _ask(
        self, what: str, key: str, call: Callable[[], Any], patience: float | None = None
    ) -> Any:
        if patience is None:
            patience = _ANSWER_S
        try:
            return self._calls.call(call, patience)
        except (LateError, RuntimeError) as error:
            late = isinstance(error, LateError)
            server = "torchrun's agent" if self._endpoint.served else "rank 0"
            raise RendezvousError(
                f"rendezvous: {what} of {key!r} at {self._endpoint} failed: "
                f"{f'no answer within {patience:g} s' if late else _first_line(error)}. "
                f"{server} serves it, and has ended or cannot be reached any more: keep "
                "it running for as long as other ranks connect or make groups."
            ) from error


class _CallThread:
    """Makes calls in a thread of its own: a server that is cut off may never answer them."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        # A daemon: a call that hangs must not keep the program from its end.
        threading.Thread(
            target=_work, args=(self._queue,), name="collective-tcp-store", daemon=True
        ).start()

    def call(self, function: Callable[[], Any], patience: float) -> Any:
        """Return what ``function`` returns; raise LateError if that takes too long."""
        future: Future[Any] = Future()
        self._queue.put((future, function))
        return future.result(max(0.0, patience))

    def end(self) -> None:
        self._queue.put(None)


def _work(calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (task := calls.get()) is not None:
        future, function = task
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        del task, future, function  # what they hold must not stay until the next call


def _tcp_store() -> Any:
    try:
        return importlib.import_module("torch.distributed").TCPStore
    except (ImportError, AttributeError) as error:  # it can be built without
        raise BackendUnavailableError(
            "rendezvous: ranks on several hosts meet in torch's TCPStore, which cannot be "
            f"imported: {error}. Install it, `{hint('torch')}`, or set "
            "COLLECTIVE_STORE to a private directory that all hosts see."
        ) from error


# -- serving -------------------------------------------------------------------------------


def _serve(kind: Any, endpoint: Endpoint, spans_hosts: bool) -> Any:
    listener = listen(endpoint, spans_hosts)
    port = endpoint.port
    # multi_tenant: the program's own init_process_group may serve the same port, which then
    # is the same server. use_libuv: the other backend reads each request to its end before it
    # looks at another connection, so that half a request of a stranger stops everybody.
    served: dict[str, Any] = {
        "is_master": True,
        "wait_for_workers": False,
        "multi_tenant": True,
        "use_libuv": _version() >= _LIBUV_LISTENS,
    }
    if listener is None:
        try:
            return kind(endpoint.host, port, **served)  # of this process, or else not free
        except RuntimeError as error:
            raise RendezvousError(
                f"rendezvous: port {port} of {endpoint.host} ({endpoint.origin}) is in use on "
                f"{socket.gethostname()} by another program, perhaps an earlier run that has not "
                "ended. Set another port, on all ranks alike."
            ) from error
    address: str = listener.getsockname()[0]
    if address in ("0.0.0.0", "::"):
        address = "127.0.0.1" if address == "0.0.0.0" else "::1"
    try:
        return kind(address, port, master_listen_fd=listener.detach(), **served)
    except RuntimeError as error:
        raise RendezvousError(
            f"rendezvous: a store cannot be served at {endpoint} ({endpoint.origin}): "
            f"{_first_line(error)}."
        ) from error


def _version() -> tuple[int, ...]:
    torch = importlib.import_module("torch")
    return tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")

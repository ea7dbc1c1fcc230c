"""Stores of torch's as rendezvous stores: any that there is, and the one of torchrun's agent."""

from __future__ import annotations

import importlib
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from datetime import timedelta
from typing import Any

from collective.contract.forking import keep_in_children
from collective.contract.store import Store
from collective.deadline import Deadline
from collective.errors import BackendUnavailableError, RendezvousError
from collective.install import hint

from .rendezvous import Endpoint
from .tcp import CONNECT_S, reach

__all__ = ["AgentStore", "TorchStore"]

# An answer that takes longer will never come: the server's host is off, or cut off.
_ANSWER_S = 30.0

# What no rank publishes.
_ABSENT = "\0nobody has published this"


class TorchStore(Store):
    """A store of torch's as a place to meet.

    Args:
        store: any of torch's, such as the one that ``init_process_group`` was given or made.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def __str__(self) -> str:
        return "torch's store"

    def set(self, key: str, value: bytes) -> None:
        self._ask("set", key, lambda: self._store.set(key, value))

    def try_get(self, key: str) -> bytes | None:
        def look() -> bytes | None:
            return bytes(self._store.get(key)) if self._store.check([key]) else None

        found: bytes | None = self._ask("get", key, look)
        return found

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        # An absent key compares as empty, and no rank publishes nothing.
        won: bytes = self._ask(
            "put_if_absent", key, lambda: bytes(self._store.compare_set(key, "", value))
        )
        return won

    def delete(self, key: str) -> None:
        self._ask("delete", key, lambda: self._store.delete_key(key))

    def _ask(self, what: str, key: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:  # torch's DistStoreError and DistNetworkError are such
            raise RendezvousError(
                f"rendezvous: {what} of {key!r} in torch's store failed: {_first_line(error)}. "
                "Rank 0, or torchrun's agent, serves it: keep it running while groups are made."
            ) from error


class AgentStore(TorchStore):
    """One rank's connection to the TCPStore that torchrun's agent serves.

    Args:
        endpoint: where.
        deadline: moment by which the server must have answered for the first time.

    Raises:
        BackendUnavailableError: there is no torch here; with the install command.
        RendezvousError: the host's name is wrong, or nobody answers.
    """

    # A poll is a round trip, and a thousand ranks may poll one server.
    _poll_last = 0.05

    def __init__(self, endpoint: Endpoint, deadline: Deadline) -> None:
        self._endpoint = endpoint
        kind = _tcp_store()
        address = reach(endpoint, deadline)
        self._calls = _CallThread()
        weakref.finalize(self, self._calls.end)
        left = timedelta(seconds=max(1.0, deadline.left()))
        try:
            client = self._calls.call(
                lambda: kind(address, endpoint.port, is_master=False, timeout=left),
                left.total_seconds(),
            )
        except LateError:
            raise RendezvousError(
                f"rendezvous: what listens at {endpoint} ({endpoint.origin}) is no store of "
                "torch's: it took the connection and did not answer within "
                f"{deadline.seconds:g} s. Is the port another program's? Give torchrun another one "
                "(--master-port)."
            ) from None
        except RuntimeError as error:
            raise RendezvousError(
                f"rendezvous: the store at {endpoint} ({endpoint.origin}) refused the connection: "
                f"{_first_line(error)}. Is the port another program's?"
            ) from error
        keep_in_children(client)
        super().__init__(client)

    def __str__(self) -> str:
        return str(self._endpoint)

    def set(self, key: str, value: bytes) -> None:
        def put() -> None:
            self._store.set(key, value)
            self._store.check([key])  # set waits for no answer, and there may be nobody

        self._ask("set", key, put)

    def try_get(self, key: str) -> bytes | None:
        return self._poll(key, Deadline(_ANSWER_S))

    def _poll(self, key: str, deadline: Deadline) -> bytes | None:
        # Not TCPStore's own get, which would wait for the key, keep other threads from the
        # connection, and write to standard error when its time is over. A comparison that fails
        # changes nothing and returns what is there; of an absent key, what was expected.
        patience = min(max(deadline.left(), CONNECT_S), _ANSWER_S)
        found: bytes = self._ask(
            "get", key, lambda: self._store.compare_set(key, _ABSENT, _ABSENT), patience
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
            raise RendezvousError(
                f"rendezvous: {what} of {key!r} at {self._endpoint} failed: "
                f"{f'no answer within {patience:.3g} s' if late else _first_line(error)}. "
                "torchrun's agent serves it, and has ended or cannot be reached any more: keep "
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
            target=_work, args=(self._queue,), name="collective-agent-store", daemon=True
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
            "rendezvous: under torchrun ranks on several hosts meet in the TCPStore that its agent "
            f"serves, and torch cannot be imported: {error}. Install it, `{hint('torch')}`, or set "
            "COLLECTIVE_STORE=tcp://HOST:PORT, the host of rank 0 and a port that is free there."
        ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")

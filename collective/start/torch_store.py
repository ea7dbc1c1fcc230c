"""Torch's stores as rendezvous stores: any existing store, and the store of torchrun's agent."""

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

from collective.contract.process import keep_in_children
from collective.control.store import Store
from collective.deadline import Deadline
from collective.errors import BackendUnavailableError, RendezvousError
from collective.install import hint

from .rendezvous import Endpoint
from .tcp_store import CONNECT_S, reach

# A server that takes longer will never answer: its host is off, or its network is cut.
_ANSWER_S = 30.0

# A value that no rank publishes; it stands for an absent key.
_ABSENT = "\0nobody has published this"


class TorchStore(Store):
    """Rendezvous store that wraps a store of torch.

    Args:
        store: any store of torch, such as the one that ``init_process_group`` received or made.
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

        value: bytes | None = self._ask("get", key, look)
        return value

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        # torch compares an absent key as if it were empty, and no rank publishes an empty value.
        won: bytes = self._ask(
            "put_if_absent", key, lambda: bytes(self._store.compare_set(key, "", value))
        )
        return won

    def delete(self, key: str) -> None:
        self._ask("delete", key, lambda: self._store.delete_key(key))

    def _ask(self, what: str, key: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:  # base of torch's DistStoreError and DistNetworkError
            raise RendezvousError(
                f"rendezvous: {what} of {key!r} in torch's store failed: {_first_line(error)}. "
                "Rank 0 or torchrun's agent serves this store: keep it running for as long as "
                "groups are made."
            ) from error


class AgentStore(TorchStore):
    """Connection of a rank to the TCPStore that torchrun's agent serves.

    Args:
        endpoint: address of the agent's store.
        deadline: moment by which the server must have answered for the first time.

    Raises:
        BackendUnavailableError: torch is not installed. The text shows the install command.
        RendezvousError: the host's name is wrong, or no server answers.
    """

    # Longer than the default: a poll is a round trip, and a thousand ranks may poll one server.
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
                f"rendezvous: the program that listens at {endpoint} ({endpoint.origin}) is not a "
                "store of torch: it accepted the connection and did not answer within "
                f"{deadline.seconds:g} s. Another program may use the port: give torchrun another "
                "port (--master-port)."
            ) from None
        except RuntimeError as error:
            raise RendezvousError(
                f"rendezvous: the store at {endpoint} ({endpoint.origin}) refused the connection: "
                f"{_first_line(error)}. Another program may use the port: give torchrun another "
                "port (--master-port)."
            ) from error
        keep_in_children(client)
        super().__init__(client)

    def __str__(self) -> str:
        return str(self._endpoint)

    def set(self, key: str, value: bytes) -> None:
        def put() -> None:
            self._store.set(key, value)
            self._store.check([key])  # set() does not wait for an answer, so it misses a dead agent

        self._ask("set", key, put)

    def try_get(self, key: str) -> bytes | None:
        return self._poll(key, Deadline(_ANSWER_S))

    def _poll(self, key: str, deadline: Deadline) -> bytes | None:
        # TCPStore.get() is of no use here. It waits for the key, blocks the connection for other
        # threads, and writes to standard error when its timeout expires. The method compare_set()
        # changes nothing if the expected value is wrong, and returns the value of the key. For an
        # absent key it returns the expected value.
        patience = min(max(deadline.left(), CONNECT_S), _ANSWER_S)
        value: bytes = self._ask(
            "get", key, lambda: self._store.compare_set(key, _ABSENT, _ABSENT), patience
        )
        return None if value == _ABSENT.encode() else value

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
                "torchrun's agent serves this store, and it has ended or is unreachable. Keep the "
                "agent running for as long as other ranks connect or make groups."
            ) from error


class _CallThread:
    """Thread that makes the calls to the store: an unreachable server may never answer them."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        # A daemon thread, so that a call that hangs does not keep the program from ending.
        threading.Thread(
            target=_work, args=(self._queue,), name="collective-agent-store", daemon=True
        ).start()

    def call(self, function: Callable[[], Any], patience: float) -> Any:
        """Return what ``function`` returns; raise LateError after ``patience`` seconds."""
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
        del task, future, function  # do not keep their objects alive until the next call


def _tcp_store() -> Any:
    try:
        return importlib.import_module("torch.distributed").TCPStore
    except (ImportError, AttributeError) as error:  # torch can be built without distributed
        raise BackendUnavailableError(
            "rendezvous: under torchrun, ranks on several hosts meet in the TCPStore that its "
            f"agent serves, and torch.distributed cannot be imported: {error}. Install PyTorch "
            f"(`{hint('torch')}`), or set COLLECTIVE_STORE=tcp://HOST:PORT with the host of rank 0 "
            "and a port that is free there."
        ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")

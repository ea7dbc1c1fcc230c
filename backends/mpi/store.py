"""A store over MPI itself: under ``mpiexec`` the ranks need no other rendezvous."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import numpy as np

from collective.control.store import NotPublishedError, Store
from collective.deadline import Deadline
from collective.errors import RendezvousError

from .library import enrol, leave_unfinished, start

_PAUSE_S = 0.001
# For this many seconds after its last use the store still polls for messages by itself.
_QUIET_S = 5.0


class MpiStore(Store):
    """Store that sends each value to all ranks of an MPI communicator, and keeps received values.

    Collective: all ranks make the store, which duplicates ``comm``. MPI moves nothing by itself, so
    a thread polls for messages for as long as the store is in use. If another party finalises MPI,
    close the store before that.

    Args:
        comm: the communicator.
        deadline: moment by which the other ranks must have come.

    Raises:
        RendezvousError: some ranks have not come.
    """

    def __init__(self, comm: Any, deadline: Deadline) -> None:
        self._module = start(deadline)
        self._comm, request = comm.Idup()
        while not request.Test():
            if deadline.expired:
                raise RendezvousError(
                    f"mpi: after {deadline.seconds:g} s not all of the {comm.Get_size()} ranks of "
                    "the MPI communicator have called collective.init() with it "
                    f"[rank {comm.Get_rank()}]."
                )
            time.sleep(_PAUSE_S)
        self._comm.Set_errhandler(self._module.ERRORS_RETURN)
        self._values: dict[str, bytes] = {}
        self._sending: list[Any] = []
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._used = time.monotonic()
        self._closed = False
        enrol(self)

    def __str__(self) -> str:
        return "MPI's messages"

    def close(self) -> None:
        """Stop polling for messages; values that have not been received by now are lost."""
        with self._news:
            self._closed = True
            for request in self._sending:
                leave_unfinished(request)
            self._sending = []

    def set(self, key: str, value: bytes) -> None:
        self._publish(key, b"=" + value)

    def delete(self, key: str) -> None:
        self._publish(key, b"")

    def get(self, key: str, deadline: Deadline) -> bytes:
        with self._news:
            self._attend()
            while key not in self._values:
                if deadline.expired:
                    raise NotPublishedError(f"rendezvous: nobody published {key!r} over MPI")
                self._used = time.monotonic()
                self._news.wait(min(deadline.left(), _QUIET_S / 2))
            return self._values[key]

    def try_get(self, key: str) -> bytes | None:
        with self._news:
            self._attend()
            self._receive()
            return self._values.get(key)

    def _publish(self, key: str, content: bytes) -> None:
        message = np.frombuffer(key.encode() + b"\0" + content, np.uint8)
        with self._news:
            self._take(message.tobytes())
            for rank in range(self._comm.Get_size()):
                if rank != self._comm.Get_rank():
                    self._sending.append(self._comm.Isend(message, rank))
            self._attend()

    # -- the messages, with the lock held ------------------------------------------------------

    def _take(self, message: bytes) -> None:
        key, _, content = message.partition(b"\0")
        if content:
            self._values[key.decode()] = content[1:]
        else:
            self._values.pop(key.decode(), None)
        self._news.notify_all()

    def _receive(self) -> None:
        status = self._module.Status()
        while (message := self._comm.Improbe(status=status)) is not None:
            room = np.empty(status.Get_count(self._module.BYTE), np.uint8)
            message.Recv(room)
            self._take(room.tobytes())
        self._sending = [request for request in self._sending if not request.Test()]

    def _attend(self) -> None:
        """Have the thread poll for messages for some time from now on."""
        self._used = time.monotonic()
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(
                target=_serve, args=(weakref.ref(self),), name="collective-mpi-store", daemon=True
            )
            self._thread.start()

    def _turn(self) -> bool:
        """Receive the messages that are there; return whether to go on."""
        with self._news:
            if self._closed:
                return False
            self._receive()
            quiet = time.monotonic() - self._used > _QUIET_S
            if quiet and not self._sending:
                self._thread = None
                return False
        return True


def _serve(reference: weakref.ref[MpiStore]) -> None:
    while (store := reference()) is not None and store._turn():
        del store  # hold no reference while asleep: a dropped store goes, and ends this loop
        time.sleep(_PAUSE_S)

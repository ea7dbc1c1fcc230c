"""How communicators come up: NCCL's initialisation, with a deadline in every version."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from .prototypes import UniqueId, new_config

if TYPE_CHECKING:
    from collective.cuda import Device

    from .library import NcclLibrary

__all__ = ["IN_PROGRESS", "STEP_S", "Poll", "Unready", "in_thread", "initialise"]

#: Looks at the deadline and at the ranks' health, and raises to give up.
Poll = Callable[[], None]


class Unready(Protocol):
    """A communicator of this process that is to come up."""

    library: NcclLibrary
    device: Device
    rank: int
    size: int
    _handle: Any
    _raw: int

    def abort(self) -> None:
        """Give it up."""

    def _check(self, code: int, name: str) -> None: ...

    def _ready(self, name: str, poll: Poll) -> None: ...


#: The result code of what is going on in the background.
IN_PROGRESS = 7
#: Seconds between two looks at what takes long.
STEP_S = 0.0005


def initialise(comm: Unready, unique_id: bytes, poll: Poll) -> None:
    """Bring up a communicator of this process; on an exception nothing is left of it."""
    library = comm.library
    if library.has("ncclCommInitRankConfig"):
        name, config = "ncclCommInitRankConfig", new_config(blocking=0)
        code = _begin(comm, name, unique_id, ctypes.addressof(config))
    else:
        name = "ncclCommInitRank"
        code = in_thread(lambda: _begin(comm, name, unique_id), poll, lambda: _abort(comm))
    try:
        comm._raw = comm._handle.value or 0
        if code not in (0, IN_PROGRESS):
            comm._check(code, name)
        comm._ready(name, poll)
    except BaseException:
        _abort(comm)
        raise


def _begin(comm: Unready, name: str, unique_id: bytes, *config: int) -> int:
    """Start what has to be done; return the result code."""
    function, identity = comm.library.function(name), UniqueId.from_buffer_copy(unique_id)
    with comm.device.active():
        where = ctypes.addressof(comm._handle)
        code: int = function(where, comm.size, identity, comm.rank, *config)
    return code


def _abort(comm: Unready) -> None:
    comm._raw = comm._handle.value or 0
    comm.abort()


def in_thread(work: Callable[[], int], poll: Poll, undo: Callable[[], None]) -> int:
    """Do what blocks in a thread; return its result code.

    Args:
        poll: called meanwhile; when it raises, the thread is left to itself.
        undo: called when the work is done and nobody wants it any more.
    """
    # With the lock the thread and this one each say that they are through, and look whether the
    # other is: the later one undoes the work, and nobody does it twice.
    lock, done = threading.Lock(), threading.Event()
    codes: list[int] = []
    unwanted = False

    def run() -> None:
        code = work()
        with lock:
            codes.append(code)
            done.set()
            late = unwanted
        if late:
            undo()

    threading.Thread(target=run, name="collective-nccl-blocking", daemon=True).start()
    try:
        while not done.wait(STEP_S):
            poll()
    except BaseException:
        with lock:
            unwanted = True
            early = bool(codes)
        if early:
            undo()
        raise
    return codes[0]

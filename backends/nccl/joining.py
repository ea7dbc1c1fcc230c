"""How communicators come up: NCCL's initialisation, with a deadline in every version."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
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


def initialise(comms: Sequence[Unready], unique_id: bytes, poll: Poll) -> None:
    """Bring up communicators of this process; on an exception nothing is left of them."""
    library = comms[0].library
    if library.has("ncclCommInitRankConfig"):
        name, config = "ncclCommInitRankConfig", new_config(blocking=0)
        code = _begin(comms, name, unique_id, ctypes.addressof(config))
    else:
        name = "ncclCommInitRank"
        code = in_thread(lambda: _begin(comms, name, unique_id), poll, lambda: _abort(comms))
    try:
        for comm in comms:
            comm._raw = comm._handle.value or 0
        for comm in comms:
            if code not in (0, IN_PROGRESS):
                comm._check(code, name)
            comm._ready(name, poll)
    except BaseException:
        _abort(comms)
        raise


def _begin(comms: Sequence[Unready], name: str, unique_id: bytes, *config: int) -> int:
    """Start what ``comms`` have to do; return the first result code that is no success."""
    library = comms[0].library
    function, identity = library.function(name), UniqueId.from_buffer_copy(unique_id)
    grouped = len(comms) > 1
    codes = [library.function("ncclGroupStart")()] if grouped else []
    for comm in comms:
        with comm.device.active():
            where = ctypes.addressof(comm._handle)
            codes.append(function(where, comm.size, identity, comm.rank, *config))
    if grouped:
        codes.append(library.function("ncclGroupEnd")())
    failed = [code for code in codes if code not in (0, IN_PROGRESS)]
    return next(iter(failed or filter(None, codes)), 0)


def _abort(comms: Sequence[Unready]) -> None:
    for comm in comms:
        comm._raw = comm._handle.value or 0
        comm.abort()


def in_thread(work: Callable[[], int], poll: Poll, undo: Callable[[], None]) -> int:
    """Do what blocks in a thread; return its result code.

    Args:
        poll: called meanwhile; when it raises, the thread is left to itself.
        undo: called when the work is done and nobody wants it any more.
    """
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

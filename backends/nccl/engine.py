"""NCCL communicators: how one comes up, is derived from another, fails and goes.

With NCCL 2.14 or newer communicators are non-blocking: no call waits on the host for other
ranks. It returns "in progress", and whoever called asks again until it is done, in between
looking at the deadline and at the ranks' health (``poll``). Older versions block in their
initialisation and when they are destroyed, which then happens in a thread; if the deadline
passes, that thread is left behind until NCCL itself gives up.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from collective.deadline import Deadline
from collective.errors import CommunicatorAbortedError

from .enqueue import NcclCalls, Poll, patient
from .library import NcclLibrary
from .prototypes import IN_PROGRESS, UniqueId, new_config

if TYPE_CHECKING:
    from collective.cuda import Device

__all__ = ["NcclComm"]

# Seconds between two looks at what takes long.
_STEP_S = 0.0005

# The first polls follow each other closely, for what takes microseconds; initialisation
# takes tenths of a second.
_SPINS = 200
# How long abort() gives a call inside NCCL to return by itself. Those that block do not.
_GRACE_S = 0.1


class NcclComm(NcclCalls):
    """A communicator. Made by :meth:`create`.

    Calls come from one thread at a time; :meth:`abort` and :meth:`async_error` from any.
    """

    def __init__(self, library: NcclLibrary, rank: int, size: int, device: Device) -> None:
        super().__init__(library, rank, size, device)
        # NCCL writes here, for as long as it initialises.
        self._handle = ctypes.c_void_p()
        self._state = ctypes.c_int()
        self._get_async_error = library.function("ncclCommGetAsyncError")
        self._ending = threading.Lock()

    @property
    def handle(self) -> int:
        """The ``ncclComm_t``, 0 once it is gone."""
        return self._raw

    # -- coming up --------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        library: NcclLibrary,
        unique_id: bytes,
        rank: int,
        size: int,
        device: Device,
        poll: Poll,
    ) -> NcclComm:
        """Join the other ranks that have the same ``unique_id`` (``ncclCommInitRankConfig``).

        From 2.18 on its later calls may wait on the host for other ranks, until :meth:`abort`: a
        non-blocking one costs a thread of NCCL's own, which starts it, and does not know the
        caller's per-thread stream.

        Args:
            unique_id: of :meth:`NcclLibrary.unique_id`, which one rank calls.
            device: another one on every rank.
            poll: called again and again meanwhile; raises to give up.

        Raises:
            BackendError: NCCL refuses or fails. Nothing is left of the communicator, then
                and when ``poll`` raises.
        """
        comm = cls(library, rank, size, device)
        comm._initialise(unique_id, poll)
        if not library.has("ncclCommSplit"):
            return comm
        child = comm._that_blocks(poll)
        try:
            comm.destroy(poll)
        except BaseException:
            child.abort()
            raise
        return child

    def _initialise(self, unique_id: bytes, poll: Poll) -> None:
        if self.library.has("ncclCommInitRankConfig"):
            name, config = "ncclCommInitRankConfig", new_config(blocking=0)
            code = self._begin(name, unique_id, ctypes.addressof(config))
        else:
            name = "ncclCommInitRank"
            code = _in_thread(lambda: self._begin(name, unique_id), poll, self._give_up)
        try:
            self._raw = self._handle.value or 0
            if code not in (0, IN_PROGRESS):
                self._check(code, name)
            self._ready(name, poll)
        except BaseException:
            self._give_up()
            raise

    def _begin(self, name: str, unique_id: bytes, *config: int) -> int:
        function, identity = self.library.function(name), UniqueId.from_buffer_copy(unique_id)
        with self.device.active():
            where = ctypes.addressof(self._handle)
            code: int = function(where, self.size, identity, self.rank, *config)
        return code

    def _give_up(self) -> None:
        self._raw = self._handle.value or 0
        self.abort()

    def _that_blocks(self, poll: Poll) -> NcclComm:
        """Return one of the same ranks that blocks in its later calls, but not in this one.

        A split inherits nothing. If it fails, this communicator is aborted too.
        """
        name, config = "ncclCommSplit", new_config(blocking=1)
        child = NcclComm(self.library, self.rank, self.size, self.device)
        split, new = self.library.function(name), ctypes.addressof(child._handle)
        with self.device.active(), self._lock:
            code = split(self._living(name), 0, self.rank, new, ctypes.addressof(config))
        try:
            if code:
                self._in_progress(code, name)
            # NCCL may go on by itself and write the child's handle later: it is read when this
            # communicator is through, and waited for again before it is asked for anything.
            self._ready(name, poll)
            child._raw = child._handle.value or 0
            child._ready(name, poll)
        except BaseException:
            # This one first: it is what the half-made one hangs on, and what frees it.
            self.abort()
            child._give_up()
            raise
        return child

    # -- state ------------------------------------------------------------------------------

    def async_error(self, *, wait: bool = True) -> str | None:
        """Return what went wrong in the background, None if nothing did.

        "In progress" is nothing wrong. From any thread; None, too, after the end.

        Args:
            wait: whether to wait for another thread's call that is inside NCCL, which may block
                there; if not, None is the answer meanwhile.
        """
        if not self._lock.acquire(blocking=wait):
            return None
        try:
            raw = self._raw
            if not raw:
                return None
            code = self._get_async_error(raw, ctypes.byref(self._state)) or self._state.value
            if code in (0, IN_PROGRESS):
                return None
            return self.library.words(code, f"rank {self.rank} of NCCL's communicator", raw)
        finally:
            self._lock.release()

    def settle(self, poll: Poll) -> None:
        """Wait until NCCL has enqueued what it was given.

        Args:
            poll: as for :meth:`create`.

        Raises:
            BackendError: it could not.
            CommunicatorAbortedError: the communicator was aborted meanwhile.
        """
        self._ready("settle", poll)

    def _in_progress(self, code: int, name: str) -> bool:
        if code == IN_PROGRESS:
            return not self._depth  # in a group it is the end that tells
        self._living(name)
        self._check(code, name)
        return False

    def _finish(self, code: int, name: str, poll: Poll) -> None:
        if code and self._in_progress(code, name):
            self._ready(name, poll)

    def _ready(self, name: str, poll: Poll) -> None:
        """Return when nothing is in progress any more; raise what it came to."""
        polls = 0
        while True:
            with self._lock:
                raw = self._living(name)
                code = self._get_async_error(raw, ctypes.byref(self._state)) or self._state.value
            if code != IN_PROGRESS:
                break
            poll()
            polls += 1
            if polls < _SPINS:
                os.sched_yield()
            else:
                time.sleep(_STEP_S)
        if code:
            self._check(code, name)

    def _living(self, name: str) -> int:
        raw = self._raw
        if not raw:
            raise CommunicatorAbortedError(
                f"{name}: NCCL's communicator of rank {self.rank} was aborted or destroyed "
                "meanwhile; make a new one."
            )
        return raw

    def _check(self, code: int, name: str) -> None:
        with self._lock:
            self.library.check(code, f"{name} of rank {self.rank}", self._raw)

    # -- going ------------------------------------------------------------------------------

    def abort(self) -> None:
        """End what is running and free the communicator (``ncclCommAbort``).

        From any thread, while others are inside a call, and as often as one likes.
        """
        # No further call gets the handle. One that has it already may be about to enter NCCL, and
        # is given time; one that hangs there will not come out before the abort.
        raw = self._take()
        if raw:
            deadline = Deadline(_GRACE_S)
            while self._inside and not deadline.expired:
                time.sleep(_STEP_S)
            if self._lock.acquire(timeout=deadline.left()):
                self._lock.release()  # who had the old handle is through
            # Its code says no more than that the communicator was broken before.
            with self.device.active():
                self.library.function("ncclCommAbort")(raw)

    def destroy(self, poll: Poll) -> None:
        """Wait for what is enqueued, then free the communicator.

        Collective: every rank. One that is broken is aborted instead.

        Args:
            poll: as for :meth:`create`; when it raises, the communicator is aborted.
        """
        if not self._raw:
            return
        try:
            if self.async_error() is None:
                self._ready("destroy", poll)
                self._forget_factors()
                with self.device.active():
                    self._destroy(poll)
        finally:
            self.abort()  # if it is still there

    def _destroy(self, poll: Poll) -> None:
        destroy = self.library.function("ncclCommDestroy")
        if not self.library.has("ncclCommFinalize"):
            # Then it is this call that waits for what is enqueued, where poll cannot end it: so
            # it is made by a thread, which is left to itself when poll gives up.
            raw = self._take()
            code = _in_thread(lambda: self._on_device(destroy, raw), poll, patient)
            self.library.check(code, f"ncclCommDestroy of rank {self.rank}")
            return
        finalize = self.library.function("ncclCommFinalize")
        with self._lock:
            code = finalize(self._living("ncclCommFinalize"))
        self._finish(code, "ncclCommFinalize", poll)
        with self._lock:
            raw = self._take()
        code = destroy(raw) if raw else 0
        self.library.check(code, f"ncclCommDestroy of rank {self.rank}")

    def _on_device(self, function: Callable[[int], int], raw: int) -> int:
        with self.device.active():
            return function(raw)

    def _take(self) -> int:
        """Return the handle to the one who ends the communicator, 0 to any other."""
        with self._ending:
            raw, self._raw = self._raw, 0
        return raw


def _in_thread(work: Callable[[], int], poll: Poll, undo: Callable[[], None]) -> int:
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
        while not done.wait(_STEP_S):
            poll()
    except BaseException:
        with lock:
            unwanted = True
            early = bool(codes)
        if early:
            undo()
        raise
    return codes[0]

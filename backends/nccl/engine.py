"""NCCL communicators: creating, splitting, failing and destroying them.

The creation of a communicator is non-blocking: no call waits on the host for other ranks. A call
returns "in progress", and the caller polls until the call is done. Between polls the caller checks
the deadline and the ranks' health (``poll``). Later calls may block; see :meth:`NcclComm.create`.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import TYPE_CHECKING

from collective.deadline import Deadline
from collective.errors import CommunicatorAbortedError

from .enqueue import NcclCalls, Poll
from .library import NcclLibrary
from .prototypes import IN_PROGRESS, UniqueId, new_config

if TYPE_CHECKING:
    from collective.cuda import Device

# Seconds between two polls of a call that takes long.
_STEP_S = 0.0005

# Number of polls without a pause, for calls that take microseconds. Initialisation takes tenths
# of a second.
_SPINS = 200
# Seconds that abort() gives a call inside NCCL to return by itself. Calls that block do not return.
_GRACE_S = 0.1


class NcclComm(NcclCalls):
    """NCCL communicator, made by :meth:`create`.

    Only one thread at a time may call its methods, except :meth:`abort` and :meth:`async_error`,
    which any thread may call at any time.
    """

    def __init__(self, library: NcclLibrary, rank: int, size: int, device: Device) -> None:
        super().__init__(library, rank, size, device)
        # NCCL writes the handle here while it initialises.
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

        The communicator's later calls may block: they may wait on the host for other ranks, until
        :meth:`abort`. A non-blocking call would cost a thread of NCCL, which starts the operation
        and does not know the caller's per-thread stream.

        Args:
            library: the loaded NCCL.
            unique_id: the id from :meth:`NcclLibrary.unique_id`, which one rank calls.
            rank: this rank.
            size: number of ranks.
            device: this rank's GPU, a different one on every rank.
            poll: called repeatedly meanwhile; raises to give up.

        Raises:
            BackendError: NCCL refuses or fails. In this case, and when ``poll`` raises, the
                communicator is freed.
        """
        comm = cls(library, rank, size, device)
        comm._initialise(unique_id, poll)
        child = comm._that_blocks(poll)
        try:
            comm.destroy(poll)
        except BaseException:
            child.abort()
            raise
        return child

    def _initialise(self, unique_id: bytes, poll: Poll) -> None:
        name, config = "ncclCommInitRankConfig", new_config(blocking=0)
        function, identity = self.library.function(name), UniqueId.from_buffer_copy(unique_id)
        where = ctypes.addressof(self._handle)
        with self.device.active():
            code = function(where, self.size, identity, self.rank, ctypes.addressof(config))
        try:
            self._raw = self._handle.value or 0
            if code not in (0, IN_PROGRESS):
                self._check(code, name)
            self._ready(name, poll)
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        self._raw = self._handle.value or 0
        self.abort()

    def _that_blocks(self, poll: Poll) -> NcclComm:
        """Split off a communicator of the same ranks whose later calls block; this call does not.

        The split inherits nothing. If it fails, this communicator is aborted too.
        """
        name, config = "ncclCommSplit", new_config(blocking=1)
        child = NcclComm(self.library, self.rank, self.size, self.device)
        split, new = self.library.function(name), ctypes.addressof(child._handle)
        with self.device.active(), self._lock:
            code = split(self._living(name), 0, self.rank, new, ctypes.addressof(config))
        try:
            if code not in (0, IN_PROGRESS):
                self._refuse(code, name)
            # NCCL may continue in the background and write the child's handle later. So wait for
            # this communicator before reading the handle, and then wait for the child before using
            # it.
            self._ready(name, poll)
            child._raw = child._handle.value or 0
            child._ready(name, poll)
        except BaseException:
            # Abort this communicator first: the unfinished child depends on it, and this abort
            # frees the child.
            self.abort()
            child._give_up()
            raise
        return child

    # -- state ------------------------------------------------------------------------------

    def async_error(self, *, wait: bool = True) -> str | None:
        """Return the error that occurred in the background, None if there is none.

        "In progress" is no error. Any thread may call this. After the communicator's end the
        result is None.

        Args:
            wait: whether to wait for another thread's call inside NCCL, which may block there; if
                false, return None while there is such a call.
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

    def _refuse(self, code: int, name: str) -> None:
        self._living(name)
        self._check(code, name)

    def _finish(self, code: int, name: str, poll: Poll) -> None:
        if code == IN_PROGRESS:
            self._ready(name, poll)
        elif code:
            self._refuse(code, name)

    def _ready(self, name: str, poll: Poll) -> None:
        """Wait until nothing is in progress any more; raise the error that it ended with."""
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
        """End the running operations and free the communicator (``ncclCommAbort``).

        Any thread may call this, also while other threads are inside a call, and repeatedly.
        """
        # From here on no call gets the handle. A call that has the handle already may be about to
        # enter NCCL, so give it time. A call that hangs inside NCCL returns only after the abort.
        raw = self._take()
        if raw:
            deadline = Deadline(_GRACE_S)
            while self._inside and not deadline.expired:
                time.sleep(_STEP_S)
            if self._lock.acquire(timeout=deadline.left()):
                self._lock.release()  # the call that had the old handle has returned
            # Ignore the result code: it says only that the communicator was broken before.
            with self.device.active():
                self.library.function("ncclCommAbort")(raw)

    def destroy(self, poll: Poll) -> None:
        """Wait for the enqueued operations, then free the communicator.

        Collective: every rank. A broken communicator is aborted instead.

        Args:
            poll: as for :meth:`create`; if it raises, the communicator is aborted.
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
            self.abort()  # does nothing if the communicator is freed already

    def _destroy(self, poll: Poll) -> None:
        destroy = self.library.function("ncclCommDestroy")
        finalize = self.library.function("ncclCommFinalize")
        with self._lock:
            code = finalize(self._living("ncclCommFinalize"))
        self._finish(code, "ncclCommFinalize", poll)
        with self._lock:
            raw = self._take()
        code = destroy(raw) if raw else 0
        self.library.check(code, f"ncclCommDestroy of rank {self.rank}")

    def _take(self) -> int:
        """Return the handle to the caller that ends the communicator, 0 to every later caller."""
        with self._ending:
            raw, self._raw = self._raw, 0
        return raw

"""Memory of GPUs that NCCL knows: it reduces there without copying first, where it can.

From NCCL 2.27 on the ranks register it as one window, from 2.19 each its own; before that it is
ordinary memory. It is given back when its array is dropped and the streams that this transport
knows have got to that point; NCCL's communicator may be gone by then.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from collective import cuda
from collective.deadline import Deadline
from collective.errors import AllocationError, BackendError, CollectiveError
from collective.memory.device_array import DeviceArray

if TYPE_CHECKING:
    from collective.contract.backend import Backend
    from collective.cuda import Device, Event, Stream
    from collective.request import Request

    from .engine import NcclComm
    from .watch import Watch

__all__ = ["Blocks"]

# Windows begin and end at pages (NCCL_WIN_REQUIRED_ALIGNMENT).
_PAGE = 4096


class _DeviceBlock:
    """One piece of memory: where it is, and how it is given back."""

    def __init__(self, comm: NcclComm, device: Device, nbytes: int) -> None:
        self.comm = comm
        self.device = device
        self.nbytes = -(-nbytes // _PAGE) * _PAGE
        self.address = 0
        self._leave: Callable[[], None] | None = None
        self._memory: cuda.Memory | None = None
        self._free: Callable[[], None] | None = None
        if comm.library.has("ncclMemAlloc"):
            self.address = address = comm.mem_alloc(self.nbytes)
            self._free = lambda: comm.mem_free(address)
        else:
            stream = device.stream(0)
            self._memory = cuda.allocate(device, self.nbytes, stream)
            self.address = self._memory.address
            stream.synchronize()  # other streams may use it

    def register(self) -> None:
        """Make it known to NCCL; all ranks together."""
        comm, library = self.comm, self.comm.library
        if library.has("ncclCommWindowRegister"):
            window = comm.window(self.address, self.nbytes)
            self._leave = lambda: comm.close_window(window)
        elif library.has("ncclCommRegister"):
            handle = comm.register(self.address, self.nbytes)
            self._leave = lambda: comm.deregister(handle)

    def leave(self) -> None:
        """Take it away from NCCL, before the communicator ends or the memory is freed."""
        leave, self._leave = self._leave, None
        if leave is not None:
            with contextlib.suppress(CollectiveError):  # the communicator may be gone
                leave()

    def free(self) -> None:
        """Give it back."""
        self.leave()
        free, self._free, self._memory = self._free, None, None
        if free is not None:
            with contextlib.suppress(CollectiveError):  # the GPU may be broken
                free()


class Blocks:
    """The memory that a transport has handed out.

    Args:
        watch: whose thread frees what was dropped.
        streams: the method that tells the transport's own streams; nothing here keeps that alive.
    """

    def __init__(
        self, watch: Watch, streams: weakref.WeakMethod[Callable[[], list[Stream]]]
    ) -> None:
        self._watch = watch
        self._streams = streams
        self._lock = threading.Lock()
        self._out: list[_DeviceBlock] = []
        self._dropped: list[tuple[_DeviceBlock, list[Event]]] = []
        watch.chores.append(self._sweep)

    def allocate(
        self,
        host: Backend,
        comm: NcclComm,
        device: Device,
        nbytes: int,
        request: Request,
        deadline: Deadline,
    ) -> DeviceArray:
        """Return ``nbytes`` uninitialised bytes on every rank's GPU.

        Collective: all ranks, with as many bytes.

        Raises:
            AllocationError: some rank's GPU has not that much; on every rank.
        """
        stream = device.stream(0)
        block: _DeviceBlock | None = None
        problem: CollectiveError | None = None
        if nbytes:
            try:
                block = _DeviceBlock(comm, device, nbytes)
            except (AllocationError, BackendError) as error:
                problem = error
        try:
            if lacking := host.lacking(problem is not None, request, deadline):
                ranks = ", ".join(map(str, lacking))
                reason = f": {problem}" if problem is not None else ""
                raise AllocationError(
                    f"{request}: {nbytes} bytes on each of {host.size} GPUs: there is not enough "
                    f"on that of rank {ranks} [rank {host.rank}]{reason}"
                ) from problem
            if block is None:
                return DeviceArray(0, (0,), np.uint8, device, stream)
            # Now that all ranks have memory: a window takes them all, and would wait for one that
            # has none.
            block.register()
        except BaseException:
            if block is not None:
                block.free()
            raise
        with self._lock:
            self._out.append(block)
        owner = _Owner()
        weakref.finalize(owner, self._drop, block).atexit = False
        return DeviceArray(block.address, (nbytes,), np.uint8, device, stream, owner=owner)

    def _drop(self, block: _DeviceBlock) -> None:
        """Free a block when what is enqueued has been done. Called by whatever thread."""
        events = []
        own = self._streams()
        with contextlib.suppress(CollectiveError):
            streams = [block.device.stream(0), *(own() if own is not None else ())]
            events = [stream.record() for stream in streams]
        with self._lock:
            if block in self._out:
                self._out.remove(block)
            self._dropped.append((block, events))
        # Its thread, which else does this, has ended.
        if self._watch.over:
            for event in events:
                with contextlib.suppress(CollectiveError):
                    event.synchronize()
            self._sweep()
        else:
            self._watch.wake()

    def _sweep(self) -> bool:
        """Free what was dropped and is no longer used; return whether something is left."""
        if not self._dropped:
            return False
        with self._lock:
            free = [each for each in self._dropped if all(event.query() for event in each[1])]
            self._dropped = kept = [each for each in self._dropped if each not in free]
        for block, events in free:
            for event in events:
                event.release()
            block.free()
        return bool(kept)

    def close(self) -> None:
        """Take all memory away from NCCL, whose communicator is about to end."""
        with self._lock:
            blocks = [*self._out, *(block for block, _ in self._dropped)]
        for block in blocks:
            block.leave()


class _Owner:
    """What an array's memory goes with."""

    __slots__ = ("__weakref__",)

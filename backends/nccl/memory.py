"""GPU memory that is registered with NCCL, so that NCCL can reduce there without a copy.

From NCCL 2.27 on the ranks register the memory as one window. Before that each rank registers its
own. The memory is freed after its array is dropped, once the streams that this transport knows have
reached that point. NCCL's communicator may be gone by then.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from collective.deadline import Deadline
from collective.errors import AllocationError, BackendError, CollectiveError
from collective.memory.device_array import DeviceArray

if TYPE_CHECKING:
    from collective.contract.backend import Backend
    from collective.cuda import Device, Event, Stream
    from collective.request import Request

    from .engine import NcclComm
    from .watch import Watch

# Windows begin and end at pages (NCCL_WIN_REQUIRED_ALIGNMENT).
_PAGE = 4096


class _DeviceBlock:
    """Block of GPU memory: its address, its registration, and how to free it."""

    def __init__(self, comm: NcclComm, device: Device, nbytes: int) -> None:
        self.comm = comm
        self.device = device
        self.nbytes = -(-nbytes // _PAGE) * _PAGE
        self._leave: Callable[[], None] | None = None
        self.address = comm.mem_alloc(self.nbytes)

    def register(self) -> None:
        """Register the block with NCCL. Collective: all ranks."""
        comm = self.comm
        if comm.library.has("windows"):
            window = comm.window(self.address, self.nbytes)
            self._leave = lambda: comm.close_window(window)
        else:
            handle = comm.register(self.address, self.nbytes)
            self._leave = lambda: comm.deregister(handle)

    def leave(self) -> None:
        """Deregister the block, before the communicator ends or the memory is freed."""
        leave, self._leave = self._leave, None
        if leave is not None:
            with contextlib.suppress(CollectiveError):  # the communicator may be gone
                leave()

    def free(self) -> None:
        """Deregister the block and free its memory."""
        self.leave()
        with contextlib.suppress(CollectiveError):  # the GPU may be broken
            self.comm.mem_free(self.address)


class Blocks:
    """Blocks of memory that a transport has handed out.

    Args:
        watch: the watch whose thread frees dropped blocks.
        streams: weak reference to the method that returns the transport's own streams.
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

        Collective: all ranks, with the same number of bytes.

        Raises:
            AllocationError: some rank's GPU does not have enough memory; on every rank.
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
                    f"{request}: {nbytes} bytes on each of {host.size} GPUs: not enough memory on "
                    f"the GPU of rank {ranks} [rank {host.rank}]{reason}"
                ) from problem
            if block is None:
                return DeviceArray(0, (0,), np.uint8, device, stream)
            # Register only now that all ranks have memory: making a window needs all ranks, and
            # would wait for a rank without memory.
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
        """Have a block freed once the enqueued work is done. Any thread may call this."""
        events = []
        own = self._streams()
        with contextlib.suppress(CollectiveError):
            streams = [block.device.stream(0), *(own() if own is not None else ())]
            events = [stream.record() for stream in streams]
        with self._lock:
            if block in self._out:
                self._out.remove(block)
            self._dropped.append((block, events))
        # The watch's thread, which otherwise sweeps, has ended.
        if self._watch.over:
            for event in events:
                with contextlib.suppress(CollectiveError):
                    event.synchronize()
            self._sweep()
        else:
            self._watch.wake()

    def _sweep(self) -> bool:
        """Free dropped blocks that are no longer in use; return whether any remain."""
        if not self._dropped:
            return False
        with self._lock:
            free = [entry for entry in self._dropped if all(event.query() for event in entry[1])]
            self._dropped = remaining = [entry for entry in self._dropped if entry not in free]
        for block, events in free:
            for event in events:
                event.release()
            block.free()
        return bool(remaining)

    def close(self) -> None:
        """Deregister all memory, because NCCL's communicator is about to end."""
        with self._lock:
            blocks = [*self._out, *(block for block, _ in self._dropped)]
        for block in blocks:
            block.leave()


class _Owner:
    """Owner of an array's memory: the memory is dropped when the owner is collected."""

    __slots__ = ("__weakref__",)

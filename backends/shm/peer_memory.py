"""The memory of peers, read by the kernel or where it is mapped."""

from __future__ import annotations

from typing import Any

import numpy as np

from collective.backends.onesided import Region
from collective.contract.failure import Failure
from collective.errors import BackendError

from .control import Control
from .segment import process_vm_readv
from .symmetric import Heap, address_of

__all__ = ["PeerMemory", "RemoteRegion"]

Array = np.ndarray[Any, Any]


class PeerMemory:
    """Copies what peers have in their memory.

    Not the transport's own methods: the rings refer to them, and the transport to its rings. From
    that circle only the garbage collector would free a communicator that has been closed, with its
    segment, while programs that train switch it off.
    """

    def __init__(self, control: Control, heap: Heap) -> None:
        self._control = control
        self._heap = heap

    def fetch_from(self, rank: int, location: tuple[int, int, int], out: Array) -> None:
        """Copy what ``rank`` has at an address, or where that is mapped here: segment, offset."""
        address, segment, offset = location
        mapped = self._heap.view(segment, rank, offset, out.dtype, out.size) if segment else None
        if mapped is None:
            self.fetch(rank, address, out)
        else:
            out[:] = mapped

    def fetch(self, rank: int, address: int, out: Array) -> None:
        """Copy ``out.nbytes`` bytes from ``address`` of ``rank``'s process.

        Raises:
            PeerLostError: the process is gone.
            BackendError: the kernel refuses although it allowed it before.
        """
        control = self._control
        pid = control.pid(rank)
        try:
            if process_vm_readv(pid, address, address_of(out), out.nbytes):
                return
            dead = not control.segment.alive(rank)
        except ProcessLookupError:
            dead = True  # its memory goes some time before its lock
        if not dead:
            text = f"reading {out.nbytes} bytes of rank {rank} (pid {pid}) failed"
            control.fail(Failure("aborted", control.rank, text))
            raise BackendError(
                f"shm: {text} [rank {control.rank}]. Set COLLECTIVE_SHM_SINGLE_COPY=off to do "
                "without.",
                "shm",
            )
        text = f"rank {rank} (pid {pid}) has died (its last call: {control.last_call(rank)})"
        raise control.broken_by(Failure("lost", control.rank, text, (rank,)), "shm")


class RemoteRegion(Region):
    """Ordinary memory of a peer, fetched in one copy by the kernel."""

    __slots__ = ("_address", "_fetch", "_itemsize", "_rank")

    def __init__(self, peers: PeerMemory, rank: int, address: int, itemsize: int) -> None:
        self._fetch = peers.fetch
        self._rank = rank
        self._address = address
        self._itemsize = itemsize

    def read(self, start: int, stop: int, scratch: Array) -> Array:
        out = scratch[: stop - start]
        self.copy(start, stop, out)
        return out

    def copy(self, start: int, stop: int, out: Array) -> None:
        self._fetch(self._rank, self._address + start * self._itemsize, out)

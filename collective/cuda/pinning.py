"""Page-locked host memory, from a pool.

Copies between it and a GPU run at the bus's full speed and beside the CPU's work. Locking
pages takes the system up to milliseconds, so blocks are kept and used again.
"""

from __future__ import annotations

import contextlib
import threading
from ctypes import c_void_p
from typing import Any

import numpy as np

from collective.errors import AllocationError

from .library import OUT_OF_MEMORY, Driver, Entered, load

__all__ = ["LARGEST", "is_pinned", "pinned"]

_SMALLEST = 1 << 12
#: Larger blocks are not kept: they would be too many bytes for too few uses.
LARGEST = 1 << 26
# Bytes that lie unused at most.
_KEPT = 1 << 28
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: pinned for every context


class _FreeBlocks:
    """Unused blocks by their size."""

    def __init__(self) -> None:
        self.blocks: dict[int, list[int]] = {}
        self.nbytes = 0
        # Reentrant: the collector may give a block back inside of a call here.
        self.lock = threading.RLock()

    def take(self, nbytes: int) -> int:
        """Return the address of an unused block of just this size, 0 if there is none."""
        with self.lock:
            blocks = self.blocks.get(nbytes)
            if not blocks:
                return 0
            self.nbytes -= nbytes
            return blocks.pop()

    def give(self, address: int, nbytes: int) -> bool:
        """Keep a block for later, unless there are enough."""
        with self.lock:
            if nbytes > LARGEST or self.nbytes + nbytes > _KEPT:
                return False
            self.nbytes += nbytes
            self.blocks.setdefault(nbytes, []).append(address)
            return True

    def empty(self) -> list[int]:
        """Return all blocks, which are the pool's no more."""
        with self.lock:
            found = [address for blocks in self.blocks.values() for address in blocks]
            self.blocks.clear()
            self.nbytes = 0
            return found


_pool = _FreeBlocks()


class _PinnedBlock:
    """A block in use: NumPy's base of the array over it."""

    __slots__ = ("__array_interface__", "_address", "_driver", "_nbytes")

    def __init__(self, driver: Driver, address: int, nbytes: int, wanted: int) -> None:
        self._driver = driver
        self._address = address
        self._nbytes = nbytes
        self.__array_interface__ = {
            "shape": (wanted,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }

    def __del__(self) -> None:
        driver = self._driver
        if not driver.forked and not _pool.give(self._address, self._nbytes):
            _free(driver, [self._address])


def pinned(nbytes: int) -> np.ndarray[Any, Any]:
    """Return ``nbytes`` uninitialised bytes of page-locked memory.

    The block goes back to the pool when the array and all views of it are dropped. Whoever
    enqueues a copy must therefore keep the array until the copy is done. Where the system
    locks no more pages, the memory is ordinary: copies work all the same, slower, and the
    call that enqueues one may wait for it.

    Raises:
        AllocationError: there is no memory at all.
        BackendError, BackendUnavailableError: the driver fails, or there is none.
    """
    driver = load()
    size = max(_SMALLEST, 1 << (nbytes - 1).bit_length()) if nbytes <= LARGEST else nbytes
    address = _pool.take(size) or _allocate(driver, size)
    if address:
        return np.asarray(_PinnedBlock(driver, address, size, nbytes))
    try:
        return np.empty(nbytes, np.uint8)
    except MemoryError as error:
        raise AllocationError(
            f"cuda: pinned: the host has no {nbytes} bytes. Free memory, or use less at once."
        ) from error


def is_pinned(array: np.ndarray[Any, Any]) -> bool:
    """Tell whether an array is in memory from :func:`pinned`, and page-locked."""
    base: Any = array
    while type(base) is np.ndarray:
        base = base.base
    return type(base) is _PinnedBlock


def _allocate(driver: Driver, nbytes: int) -> int:
    """Return the address of newly locked memory; 0 if the system locks no more."""
    found = c_void_p()
    with Entered(driver, driver.some()):
        code = driver.cuMemHostAlloc(found, nbytes, _PORTABLE)
        if code == OUT_OF_MEMORY:
            # What lies unused in other sizes may make room.
            _free(driver, _pool.empty())
            code = driver.cuMemHostAlloc(found, nbytes, _PORTABLE)
    if code == OUT_OF_MEMORY:
        return 0
    driver.check(code, f"pinned memory of {nbytes} bytes")
    return found.value or 0


def _free(driver: Driver, addresses: list[int]) -> None:
    """Unlock blocks. Errors are none of the caller's: the process may be about to end."""
    with contextlib.suppress(Exception), Entered(driver, driver.some()):
        for address in addresses:
            driver.cuMemFreeHost(address)

"""Page-locked host memory, from a pool.

Copies between page-locked memory and a GPU run at the full speed of the bus, while the CPU does
other work. Locking pages takes up to milliseconds, so blocks are kept and used again.
"""

from __future__ import annotations

import contextlib
import threading
from ctypes import c_void_p
from typing import Any

import numpy as np

from collective.errors import AllocationError

from .library import OUT_OF_MEMORY, Driver, Entered, load

_SMALLEST = 1 << 12
#: Largest block that the pool keeps. Larger blocks would hold too many bytes for too few uses.
LARGEST = 1 << 26
# Maximum number of unused bytes in the pool.
_KEPT = 1 << 28
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: pinned for every context


class _FreeBlocks:
    """Unused blocks, by size."""

    def __init__(self) -> None:
        self.blocks: dict[int, list[int]] = {}
        self.nbytes = 0
        # The lock is reentrant, because the garbage collector may run inside a method and give a
        # block back.
        self.lock = threading.RLock()

    def take(self, nbytes: int) -> int:
        """Return the address of an unused block of exactly this size; 0 if there is none."""
        with self.lock:
            blocks = self.blocks.get(nbytes)
            if not blocks:
                return 0
            self.nbytes -= nbytes
            return blocks.pop()

    def give(self, address: int, nbytes: int) -> bool:
        """Keep a block for later; return False if it is too large or the pool is full."""
        with self.lock:
            if nbytes > LARGEST or self.nbytes + nbytes > _KEPT:
                return False
            self.nbytes += nbytes
            self.blocks.setdefault(nbytes, []).append(address)
            return True

    def empty(self) -> list[int]:
        """Remove all blocks from the pool, and return them."""
        with self.lock:
            addresses = [address for blocks in self.blocks.values() for address in blocks]
            self.blocks.clear()
            self.nbytes = 0
            return addresses


_pool = _FreeBlocks()


class _PinnedBlock:
    """Block in use; the NumPy array over the block has this object as its base."""

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

    The block goes back to the pool when the array and all views of it have been dropped. So a
    caller that enqueues a copy must keep the array until the copy is done. If the system cannot
    lock more pages, the memory is ordinary. Copies still work then, but they are slower, and the
    call that enqueues a copy may wait for it.

    Raises:
        AllocationError: there is no memory at all.
        BackendError, BackendUnavailableError: the driver fails, or there is no driver.
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
            f"cuda: pinned: the host lacks {nbytes} bytes. Free memory, or use less at once."
        ) from error


def is_pinned(array: np.ndarray[Any, Any]) -> bool:
    """Tell whether an array is in memory from :func:`pinned`, and page-locked."""
    base: Any = array
    while type(base) is np.ndarray:
        base = base.base
    return type(base) is _PinnedBlock


def _allocate(driver: Driver, nbytes: int) -> int:
    """Return the address of newly locked memory; 0 if the system cannot lock more pages."""
    address = c_void_p()
    with Entered(driver, driver.some()):
        code = driver.cuMemHostAlloc(address, nbytes, _PORTABLE)
        if code == OUT_OF_MEMORY:
            # Free the unused blocks of other sizes, which may make room.
            _free(driver, _pool.empty())
            code = driver.cuMemHostAlloc(address, nbytes, _PORTABLE)
    if code == OUT_OF_MEMORY:
        return 0
    driver.check(code, f"pinned memory of {nbytes} bytes")
    return address.value or 0


def _free(driver: Driver, addresses: list[int]) -> None:
    """Free blocks, and ignore errors: the process may be about to end."""
    with contextlib.suppress(Exception), Entered(driver, driver.some()):
        for address in addresses:
            driver.cuMemFreeHost(address)

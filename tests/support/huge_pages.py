"""Arrays in huge pages, which a peer may have the kernel copy."""

from __future__ import annotations

import fcntl
import functools
import mmap
import os
import struct
from typing import Any

import numpy as np
import pytest

_HUGE = 2 << 20
# The request PAGEMAP_SCAN of Linux 6.7 with a struct of twelve words, and the bit of huge pages.
_SCAN, _IS_HUGE = 0xC0606610, 1 << 6


def in_huge_pages(nbytes: int) -> np.ndarray[Any, Any]:
    """Return bytes of many values, in huge pages if the kernel has some left."""
    memory = mmap.mmap(-1, nbytes + 2 * _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    at = -array.ctypes.data % _HUGE + 4096
    array[at - 4096 : at + nbytes] = np.resize(np.arange(251, dtype=np.uint8), 4096 + nbytes)
    return array[at : at + nbytes]


@functools.cache
def page_map() -> int:
    """Return a descriptor of this process's pages."""
    return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)


def lies_in_huge_pages(array: np.ndarray[Any, Any]) -> bool:
    """Tell whether the core sees an array in huge pages; the kernel may have had none left."""
    quarter = array.nbytes // 4
    return all(_is_huge(array.ctypes.data + part * quarter) for part in (1, 3))


def _is_huge(address: int) -> bool:
    region, page = np.zeros(3, np.uint64), address // 4096 * 4096
    scan = [96, 0, page, page + 4096, 0, region.ctypes.data, 1, 0, 0, _IS_HUGE, 0, _IS_HUGE]
    try:
        return fcntl.ioctl(page_map(), _SCAN, bytearray(struct.pack("12Q", *scan))) == 1
    except OSError:
        return False


needs_huge_pages = pytest.mark.skipif(
    not lies_in_huge_pages(in_huge_pages(_HUGE)),
    reason="this kernel gives no huge pages, or does not tell",
)

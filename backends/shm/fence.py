"""Order of memory accesses, for words that other processes read."""

from __future__ import annotations

import platform
import threading

__all__ = ["ORDERED", "fence"]

#: Whether the processor keeps stores in order, and loads in order, as x86 does. On other processors
#: (AArch64, POWER) a peer could see a flag before the data that the flag announces.
ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")
# Taking a free lock is the cheapest fence in Python.
_lock = threading.Lock()


def fence() -> None:
    """Order the memory accesses before and after this call, if the processor does not."""
    if not ORDERED:
        with _lock:
            pass

"""Order of memory accesses, for words that other processes read."""

from __future__ import annotations

import platform
import threading

#: Whether the processor keeps stores in order, and loads in order, as x86 does. On other processors
#: (AArch64, POWER) a peer could see a flag before the data that the flag announces.
ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")
# Taking a free lock is the cheapest fence in Python.
_lock = threading.Lock()


def fence(full: bool = False) -> None:
    """Order the memory accesses before and after this call, if the processor does not.

    Args:
        full: if true, an earlier store comes before a later load, too, which no processor keeps.
    """
    if full or not ORDERED:
        # One turn is no fence. An earlier access is ordered before the release alone, and a later
        # access after the acquisition alone, so both may move into the turn and pass each other.
        # With two turns the first release stands between them: an earlier access comes before this
        # release, which comes before the second acquisition, which comes before a later access.
        # tests/native/test_weak_order.py tries both.
        with _lock:
            pass
        with _lock:
            pass

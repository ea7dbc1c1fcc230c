"""When MPI's communicators are freed: once every rank has closed its own.

``MPI_Comm_free`` waits for nobody in MPICH, Open MPI and Intel MPI, and MPI gives the number of
what was freed to the next communicator. What peers sent over the old one, in a call that they made
later or that broke off, is then taken for the new one's: Open MPI 5.0 ended by SIGSEGV in the
``MPI_Comm_create_group`` after it. So a communicator that is closed here waits until all ranks have
closed it after the same calls. One that a rank has broken is never freed.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from . import library

if TYPE_CHECKING:
    from collective.backends.channel import Channel

    from .arrival import Arrival

__all__ = ["free", "free_later"]

_lock = threading.Lock()
_closed: list[tuple[Any, Channel, Arrival]] = []


def free_later(comm: Any, channel: Channel, arrival: Arrival) -> None:
    """Free ``comm`` and what it waits with, when all ranks have closed ``channel``."""
    with _lock:
        _closed.append((comm, channel, arrival))
    free()


def free() -> None:
    """Free what all ranks have closed by now."""
    if not library.idle():
        return
    with _lock:
        kept, over = [], []
        for each in _closed:
            channel = each[1]
            if channel.is_over:
                over.append(each)
            elif channel.failure is None:
                kept.append(each)
        _closed[:] = kept
    for comm, _, arrival in over:
        if arrival.close():
            comm.Free()

"""How a collective call is carried out: the arrival, then MPI's operation."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from collective.backends.peers.channel import Channel
from collective.backends.peers.monitored import Monitored
from collective.request import Request, in_thread

from . import folds
from .arrival import BLOCKING, BY_MESSAGES, POLLED, Arrival
from .errors import explained
from .polling import settle
from .watchdog import Blocking

__all__ = ["MOST", "Carrying", "left", "mapped", "now", "pause", "spec"]

Array = np.ndarray[Any, Any]
F = TypeVar("F", bound=Callable[..., Any])

#: Elements that a call takes where counts are C integers: in MPI before version 4.
MOST = 2**31 - 1
_PAUSE_S = 0.5e-3
now = time.monotonic


def mapped(method: F) -> F:
    """Turn MPI's errors into ours, which tell the request, or else the method's name."""

    @functools.wraps(method)
    def call(self: Carrying, first: Any, *arguments: Any) -> Any:
        try:
            return method(self, first, *arguments)
        except self._mpi.Exception as error:
            where = first if isinstance(first, Request) else method.__name__
            raise explained(self._mpi, self.channel, where, error) from error

    return call  # type: ignore[return-value]


class Carrying(Monitored):
    """What the collectives of the transport have in common."""

    def __init__(self, module: Any, comm: Any, channel: Channel) -> None:
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.channel = channel
        self._mpi = module
        self._comm = comm
        self._in_place = module.IN_PLACE
        self._most = 2**63 - 1 if module.Get_version() >= (4, 0) else MOST
        channel.compares_on_arrival = True
        self._arrival = Arrival(module, comm, channel)
        self._arrive = self._arrival.arrive
        self._blocking = Blocking(module, comm, channel)

    def _wait_for_all(self, request: Request, timeout: float, large: bool = False) -> int:
        """Wait for all ranks; return how they carry the call out, the same on all of them."""
        # In the background MPI is polled, so that it leaves the core, and MPI, to others; and while
        # some thread makes a communicator MPI must not call a function of ours, see folds.py.
        how = BLOCKING if in_thread.site is None and not folds.being_made else POLLED
        return self._arrive(request, timeout, BY_MESSAGES if large else how)

    def _move(self, how: int, request: Request, end: float, name: str, *arguments: Any) -> None:
        """Have MPI do ``name``."""
        if how == BLOCKING:
            self._blocking.end = end
            self._blocking.running = request
            try:
                getattr(self._comm, name)(*arguments)
            finally:
                self._blocking.running = None
        else:
            moving = getattr(self._comm, f"I{name.lower()}")(*arguments)
            settle([moving], lambda: self.channel.wait(request, left(end)))
            # A rank that gave up has its array back, and MPI may have read it later.
            self.channel.refuse_unfinished(request)

    def _send_or_in_place(self, given: Array, out: Array | None, kind: Any) -> Any:
        """Return MPI's first argument: the input, or that it is where the result goes."""
        if out is not None and (given is out or np.may_share_memory(given, out)):
            return self._in_place
        return spec(given, kind)


def spec(array: Array, kind: Any) -> tuple[Array, int, Any]:
    """Return what mpi4py takes for an array of MPI's type ``kind``."""
    return array, array.size, kind


def pause(channel: Channel, where: object, end: float) -> None:
    """Wait a moment for a thread of this process; raise if there is a reason to."""
    channel.wait(where, left(end), ()).check()
    time.sleep(_PAUSE_S)


def left(end: float) -> float:
    """Return the seconds until ``end``."""
    return max(0.0, end - now())

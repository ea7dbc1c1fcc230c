"""How a collective call is carried out: the arrival, then MPI's operation."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from collective.backends.peers.channel import Channel
from collective.backends.peers.monitored import Monitored
from collective.memory.buffer import Buffer
from collective.request import Request, in_thread

from . import folds
from .arrival import BLOCKING, BY_MESSAGES, POLLED, Arrival
from .errors import explained
from .polling import settle
from .watchdog import Blocking

__all__ = ["MOST", "Carrying", "MpiPlan", "left", "mapped", "now", "pause", "spec"]

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
        return given, given.size, kind


class MpiPlan:
    """A request that is one call of MPI's, if all ranks come to it in the foreground.

    Args:
        carrying: the transport.
        request: what is asked for.
        name: of MPI's blocking function; empty if all is done when all ranks have come.
        specify: returns its arguments, of this rank's input and output: arrays, or None.
        buffers: makes the request of two buffers and seconds, in whatever way.
        otherwise: the same when all ranks have come, of how they carry it out, two buffers and the
            deadline.
    """

    __slots__ = ("_buffers", "_call", "_carrying", "_otherwise", "_request", "_specify")

    def __init__(
        self,
        carrying: Carrying,
        request: Request,
        name: str,
        specify: Callable[[Any, Any], tuple[Any, ...]] | None,
        buffers: Callable[[Any, Any, float], None],
        otherwise: Callable[[int, Any, Any, float], None] | None = None,
    ) -> None:
        self._carrying = carrying
        self._request = request
        self._call = getattr(carrying._comm, name) if name else None
        self._specify = specify
        self._buffers = buffers
        self._otherwise = otherwise

    def __call__(self, src: Buffer | None, dst: Buffer | None, timeout: float) -> None:
        self._buffers(src, dst, timeout)

    def plain(self, x: Any, out: Any, timeout: float) -> None:
        """Make it of arrays as they are; see :data:`collective.contract.backend.Plan`.

        It is what ``buffers`` does, with nothing called that need not be: here microseconds count.
        """
        carrying, request = self._carrying, self._request
        end = now() + timeout
        try:
            alone = in_thread.site is None and not folds.being_made
            how = carrying._arrive(request, timeout, BLOCKING if alone else POLLED)
            if self._call is None or self._specify is None or self._otherwise is None:
                return
            if how != BLOCKING:
                src, dst = self._buffer(x), self._buffer(out)
                self._otherwise(how, dst if x is out else src, dst, end)
                return
            arguments = self._specify(x, out)
            blocking = carrying._blocking
            blocking.end = end
            blocking.running = request
            try:
                self._call(*arguments)
            finally:
                blocking.running = None
        except carrying._mpi.Exception as error:
            raise explained(carrying._mpi, carrying.channel, request, error) from error

    def _buffer(self, array: Array | None) -> Buffer | None:
        dtype = self._request.dtype
        if array is None or dtype is None:
            return None
        return Buffer(array.reshape(-1), dtype)


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

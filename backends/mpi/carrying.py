"""The two steps of a collective call: the arrival of all ranks, then MPI's operation."""

from __future__ import annotations

import functools
import time
from array import array
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import numpy as np

from collective.algorithms.arithmetic import steady
from collective.backends.peers.channel import Channel
from collective.backends.peers.monitored import Monitored
from collective.contract.failure import Failure
from collective.deadline import Deadline
from collective.errors import BackendError, CollectiveError, CommunicatorAbortedError
from collective.memory.buffer import Buffer
from collective.request import Disagreement, Request, in_thread

from . import folds
from .library import leave_unfinished
from .polling import POLLS, finish, settle
from .watchdog import Blocking

Array = np.ndarray[Any, Any]
F = TypeVar("F", bound=Callable[..., Any])

# Largest number of elements in a call where counts are C integers: in MPI before version 4.
_MOST = 2**31 - 1
_PAUSE_S = 0.5e-3
now = time.monotonic

#: How the ranks carry a call out. A higher way depends less on the other ranks being in the same
#: operation, so all ranks use the highest way that any rank asks for.
BLOCKING, POLLED, BY_MESSAGES = 0, 1, 2

# Error classes that a peer may have caused: by its death or its expired deadline, or by the effects
# of these.
_OF_PEERS = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED", "ERR_OTHER",
             "ERR_INTERN", "ERR_UNKNOWN", "ERR_IN_STATUS", "ERR_PENDING")  # fmt: skip


def explained(module: Any, channel: Channel, where: object, error: Any) -> Exception:
    """Return the exception to raise ``from error``: the peer's failure, or else MPI's error.

    Args:
        module: ``mpi4py.MPI``.
        channel: channel of the communicator; the function breaks the communicator.
        where: operation, for the error text.
        error: an ``MPI.Exception``.
    """
    number = error.Get_error_class()
    name = _class_name(module, number)
    description = f"{name}: {error.Get_error_string()} [rank {channel.rank}]"
    if name.removeprefix("MPI_") in _OF_PEERS:
        explanation = channel.explain(where, error)
        if not isinstance(explanation, BackendError):
            return explanation
    elif channel.closed:  # another thread has closed the communicator, and MPI has freed it
        return channel.closed_error(where)
    else:
        channel.abort(Failure("aborted", channel.rank, f"{where}: {description}"))
    return BackendError(f"{where}: {description}", "mpi", number)


def _class_name(module: Any, number: int) -> str:
    """Return the name of an error class, such as ``MPI_ERR_TRUNCATE``."""
    for name in dir(module):
        if name.startswith("ERR_") and getattr(module, name) == number:
            return f"MPI_{name}"
    return f"error class {number}"


def mapped(method: F) -> F:
    """Turn MPI's errors into this library's, which name the request, or else the method."""

    @functools.wraps(method)
    def call(self: Carrying, first: Any, *arguments: Any) -> Any:
        try:
            return method(self, first, *arguments)
        except self._mpi.Exception as error:
            where = first if isinstance(first, Request) else method.__name__
            raise explained(self._mpi, self.channel, where, error) from error

    return call  # type: ignore[return-value]


class Arrival:
    """The first step of every collective call: all ranks arrive, and their calls are compared.

    The comparison is one reduction of 24 bytes, non-blocking and polled. All ranks made the same
    call if the largest digest equals the smallest digest. Where MPI has persistent reductions
    (MPI 4.1, section 6.13) the comparison uses one: starting it again takes less than half the
    time.
    """

    def __init__(self, module: Any, comm: Any, channel: Channel) -> None:
        self._module = module
        self._comm = comm
        self._channel = channel
        # The digest, its negative, and how the rank carries the call out. Not a NumPy array, whose
        # elements take three times as long.
        self._words = array("q", [0, 0, 0])
        self._found = array("q", [0, 0, 0])
        self._request: Any = None
        self._over: BaseException | None = None
        self._digest, self._how = 0, 0
        try:
            self._request = comm.Allreduce_init(self._words, self._found, module.MAX)
        except (NotImplementedError, module.Exception):
            self._persistent = False
        else:
            self._persistent = True
            self._start, self._test = self._request.Start, self._request.Test

    def arrive(self, request: Request, deadline: Deadline, how: int) -> int:
        """Wait for all ranks; return the highest of their ``how``.

        Raises:
            Disagreement: the calls differ; raised on every rank, with all headers.
            CollectiveError: a rank did not come, and never will.
        """
        if self._channel.failure is not None or self._over is not None:
            self._refuse(request)
        digest = request.digest
        if digest != self._digest or how != self._how:
            words = self._words
            words[0], words[1], words[2] = digest, -digest, how
            self._digest, self._how = digest, how
        if self._persistent:
            self._start()
            test = self._test
        else:
            self._request = self._comm.Iallreduce(self._words, self._found, self._module.MAX)
            test = self._request.Test
        for _ in POLLS:
            if test():
                break
        else:
            self._wait(test, request, deadline)
        highest = self._found
        if highest[0] != digest or highest[1] != -digest:
            self._disagree(request, deadline)
        return highest[2]

    def _wait(self, test: Any, request: Request, deadline: Deadline) -> None:
        try:
            finish(test, self._channel.wait(request, deadline), moving=False)
        except BaseException as error:
            self._over = error
            # Keep the memory, too: a persistent request does not hold it. When a late rank comes,
            # MPI writes to this memory, even if Python has freed it by then.
            leave_unfinished((self._request, self._words, self._found))
            raise

    def _refuse(self, request: Request) -> NoReturn:
        """Raise the error of a call on a broken communicator."""
        self._channel.check(request)
        # An earlier call was interrupted, and the communicator is only about to be broken.
        raise CommunicatorAbortedError(f"{request}: {self._over} (that was an earlier call)")

    def _disagree(self, request: Request, deadline: Deadline) -> None:
        """Exchange the headers of the ranks' calls; all ranks come here."""
        header = np.frombuffer(request.header(), np.uint8)
        lengths = np.zeros(self._comm.Get_size(), np.int64)
        length = np.array([header.size], np.int64)

        def over(moving: Any) -> None:
            settle([moving], lambda: self._channel.wait(request, deadline))

        over(self._comm.Iallgather(length, lengths))
        every = np.empty(int(lengths.sum()), np.uint8)
        counts = lengths.tolist()
        over(self._comm.Iallgatherv(header, [every, counts, None, self._module.BYTE]))
        parts = np.split(every, np.cumsum(counts)[:-1])
        raise Disagreement([part.tobytes() for part in parts])

    def close(self) -> bool:
        """Free MPI's persistent request; return whether nothing is running any more."""
        if self._over is not None:
            return False
        if self._persistent:
            self._request.Free()
        return True


class Carrying(Monitored):
    """Base of the transport's collectives: arrival, and MPI's operation."""

    def __init__(self, module: Any, comm: Any, channel: Channel) -> None:
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.channel = channel
        self._mpi = module
        self._comm = comm
        self._in_place = module.IN_PLACE
        self._most = 2**63 - 1 if module.Get_version() >= (4, 0) else _MOST
        self._arrival = Arrival(module, comm, channel)
        self._arrive = self._arrival.arrive
        self._blocking = Blocking(module, comm, channel)

    def _wait_for_all(self, request: Request, deadline: Deadline, large: bool = False) -> int:
        """Wait for all ranks; return how they carry the call out, the same on all ranks."""
        # In the background MPI is polled, which leaves the core, and MPI, to other threads. It is
        # also polled while some thread makes a communicator: then MPI must not call a reduction
        # function of this library, see folds.py.
        how = BLOCKING if in_thread.site is None and not folds.being_made else POLLED
        return self._arrive(request, deadline, BY_MESSAGES if large else how)

    def _move(
        self, how: int, request: Request, deadline: Deadline, name: str, *arguments: Any
    ) -> None:
        """Call MPI's function ``name``, or its non-blocking form unless ``how`` is BLOCKING."""
        if how == BLOCKING:
            self._blocking.deadline = deadline
            self._blocking.running = request
            try:
                getattr(self._comm, name)(*arguments)
            finally:
                self._blocking.running = None
        else:
            moving = getattr(self._comm, f"I{name.lower()}")(*arguments)
            try:
                settle([moving], lambda: self.channel.wait(request, deadline))
            except CollectiveError:
                # Even after the caller has the array back, MPI may read it for other ranks.
                self.channel.await_heard(range(self.size))
                raise
            # A rank that gave up has returned its array to its caller, and MPI may have read the
            # array after that.
            self.channel.refuse_unfinished(request)

    def _send_or_in_place(self, source: Array, out: Array | None, kind: Any) -> Any:
        """Return MPI's first argument: the input, or ``MPI_IN_PLACE`` if it aliases ``out``."""
        if out is not None and (source is out or np.may_share_memory(source, out)):
            return self._in_place
        return source, source.size, kind


class MpiPlan:
    """A request that is one call of MPI, if all ranks come to it in the foreground.

    Args:
        carrying: the transport.
        request: description of the collective call.
        name: name of MPI's blocking function; empty if the arrival of all ranks is everything.
        specify: function that returns the arguments of MPI's function. It takes this rank's input
            and output, each an array or None.
        buffers: function that carries the request out in any way, arrival included. It takes two
            buffers and a deadline.
        otherwise: function that carries the request out after the arrival. It takes how the ranks
            do that, two buffers and the deadline.
    """

    __slots__ = ("_buffers", "_call", "_carrying", "_otherwise", "_request", "_specify")

    def __init__(
        self,
        carrying: Carrying,
        request: Request,
        name: str,
        specify: Callable[[Any, Any], tuple[Any, ...]] | None,
        buffers: Callable[[Any, Any, Deadline], None],
        otherwise: Callable[[int, Any, Any, Deadline], None] | None = None,
    ) -> None:
        self._carrying = carrying
        self._request = request
        self._call = getattr(carrying._comm, name) if name else None
        dtype = request.dtype
        if self._call is not None and request.op is not None and dtype and dtype.kind in "fc":
            self._call = steady(self._call)  # MPI folds in this thread
        self._specify = specify
        self._buffers = buffers
        self._otherwise = otherwise

    def __call__(self, src: Buffer | None, dst: Buffer | None, deadline: Deadline) -> None:
        self._buffers(src, dst, deadline)

    def plain(self, x: Any, out: Any, deadline: Deadline) -> None:
        """Carry the request out on arrays; see :data:`collective.contract.backend.Plan`.

        This does the same as ``buffers`` with as few calls as possible: microseconds count here.

        Args:
            x, out: the arrays.
        """
        carrying, request = self._carrying, self._request
        try:
            alone = in_thread.site is None and not folds.being_made
            how = carrying._arrive(request, deadline, BLOCKING if alone else POLLED)
            if self._call is None or self._specify is None or self._otherwise is None:
                return
            # mpi4py gives MPI another address for an empty slice than for the array that it is a
            # part of.
            empty = x is not out and not (x is None or out is None or (x.size and out.size))
            if how != BLOCKING or empty:
                src, dst = self._buffer(x), self._buffer(out)
                self._otherwise(how, dst if x is out else src, dst, deadline)
                return
            arguments = self._specify(x, out)
            blocking = carrying._blocking
            blocking.deadline = deadline
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


def pause(channel: Channel, where: object, deadline: Deadline) -> None:
    """Wait a moment for another thread of this process; raise if there is a reason to."""
    channel.wait(where, deadline, ()).check()
    time.sleep(_PAUSE_S)

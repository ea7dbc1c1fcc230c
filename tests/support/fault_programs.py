"""Programs of ranks for backends/test_faults.py: each function has a fault and returns its effect.

The fault happens to rank :data:`VICTIM`, unless a function says otherwise. :func:`survived` runs
the faults that leave the processes alive, each on a new communicator.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from collective.communicator import Communicator
from collective.errors import PeerLostError
from tests.support.fault_heard import Heard, Program, Survived, heard_in, heard_of, raised, survive

VICTIM = 1
# Seconds until a waiting rank gets a signal, and until the ranks arrive for which it waits.
_SIGNAL_S, _ARRIVES_S = 0.1, 0.3


def _sum(comm: Communicator, count: int = 100, **options: Any) -> None:
    """Make an all_reduce and check its result."""
    result = comm.all_reduce(np.arange(float(count)) + comm.rank, **options)
    assert np.array_equal(result, np.arange(count) * comm.size + sum(range(comm.size))), result


def survived(comm: Communicator, programs: dict[str, Program]) -> dict[str, Survived]:
    """Run the programs that leave all processes alive."""
    _many(comm)  # Resources of the first use stay.
    # The garbage is collected several times after each program. To scan all objects of PyTorch each
    # time would take longer than the programs.
    gc.collect()
    gc.freeze()
    return survive(comm, programs)


# -- ranks that end ----------------------------------------------------------------------------


def until_it_breaks(comm: Communicator) -> Heard:
    """Make calls until a call raises; another rank, or a plan of faults, causes the error."""
    return heard_in(comm, lambda: _sum(comm), again=True)


def exits(comm: Communicator) -> Heard:
    """End the victim with ``os._exit``."""

    def turn() -> None:
        comm.barrier()  # The other ranks may still be in the barrier when the victim is gone.
        if comm.rank == VICTIM:
            os._exit(3)
        _sum(comm)

    return heard_in(comm, turn, again=True)


def two_killed(comm: Communicator) -> Heard:
    """Kill ranks 1 and 2 with signals that they do not handle; only rank 0 survives."""
    if comm.rank == 0:
        return heard_in(comm, lambda: (comm.barrier(), _sum(comm)), again=True)
    with contextlib.suppress(PeerLostError):  # A rank may be in the barrier when the other is gone.
        comm.barrier()
    number = (signal.SIGTERM, signal.SIGKILL)[comm.rank - 1]
    if number == signal.SIGTERM:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return until_it_breaks(comm)


# -- ranks that stop, leave or are interrupted -----------------------------------------------------


def stopped(comm: Communicator, victim: int = VICTIM) -> Heard:
    """Stop ``victim`` with SIGSTOP, and send SIGCONT when the other ranks have given up."""
    pids = comm.all_gather_object(os.getpid())
    if comm.rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
        return heard_in(comm, comm.barrier)
    heard = heard_in(comm, lambda: _sum(comm, timeout=0.5))
    os.kill(pids[victim], signal.SIGCONT)
    return heard


def closes_with_work(comm: Communicator) -> Heard:
    """Let the victim close with a call in the background that the other ranks join later."""
    comm.barrier()
    if comm.rank != VICTIM:
        time.sleep(_ARRIVES_S)
        _sum(comm)
        return heard_in(comm, comm.barrier, again=True)
    work = comm.all_reduce(np.arange(100.0) + comm.rank, async_op=True)
    heard = heard_in(comm, comm.close)
    assert work.wait()[1] == comm.size + sum(range(comm.size))
    return heard


def closes_with_work_for_ever(comm: Communicator) -> Heard:
    """Let the victim close with a receive in the background of a message that never comes."""
    comm.barrier()
    if comm.rank != VICTIM:
        return heard_in(comm, comm.barrier, again=True)
    work = comm.recv(None, 0, async_op=True, timeout=0.5)
    error = raised(comm.close)
    assert error is None, error
    since = time.monotonic()
    return heard_in(comm, work.wait)._replace(seconds=time.monotonic() - since)


def interrupted(comm: Communicator) -> Heard:
    """Send the victim SIGINT while it waits for a message; the exception ends its part."""
    if comm.rank != VICTIM:
        return heard_in(comm, lambda: (comm.barrier(), comm.recv(None, VICTIM)))
    comm.barrier()

    def receive() -> None:
        with comm:
            threading.Timer(_SIGNAL_S, os.kill, (os.getpid(), signal.SIGINT)).start()
            comm.recv(None, 0)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return heard_in(comm, receive)
    finally:
        signal.signal(signal.SIGINT, before)


def handled(comm: Communicator) -> Heard:
    """Let a handler run and return while the victim waits for rank 0, which sends the signal."""
    calls: list[int] = []
    if comm.rank == VICTIM:
        before = signal.signal(signal.SIGUSR1, lambda number, _: calls.append(number))
    pids = comm.all_gather_object(os.getpid())
    if comm.rank == 0:
        time.sleep(_SIGNAL_S)
        os.kill(pids[VICTIM], signal.SIGUSR1)
    heard = heard_in(comm, lambda: _sum(comm))
    if comm.rank == VICTIM:
        signal.signal(signal.SIGUSR1, before)
        if calls != [signal.SIGUSR1]:
            return heard._replace(error=f"handled: {calls}")
    return heard


def alarmed(comm: Communicator) -> Heard:
    """Let a timer interrupt the victim's calls two hundred times a second."""
    comm.barrier()
    if comm.rank != VICTIM:
        return heard_in(comm, lambda: _many(comm))
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: rung.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.005, 0.005)
    try:
        heard = heard_in(comm, lambda: _many(comm))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return heard if rung else heard._replace(error="no alarm")


def _many(comm: Communicator) -> None:
    for _ in range(2):
        if comm.rank != VICTIM:
            time.sleep(0.05)  # The victim has to wait.
        for count in (3, 5000, 1 << 19):
            _sum(comm, count)
        x = np.arange(1 << 18)
        if comm.rank == 0:
            comm.send(x, VICTIM)
        elif comm.rank == VICTIM:
            assert np.array_equal(comm.recv(None, 0), x)


# -- ranks that do something else ------------------------------------------------------------------


def differing(what: str) -> Program:
    """Return a program whose calls differ in ``what``, with default settings."""
    return functools.partial(_differ, what=what)


def _differ(comm: Communicator, what: str) -> Heard:
    x = np.ones(6)
    calls: dict[str, Callable[[], object]] = {
        "shape": lambda: comm.all_reduce(np.ones(7)),
        "dtype": lambda: comm.all_reduce(x.astype(np.float32)),
        "op": lambda: comm.all_reduce(x, op="max"),
        "call": lambda: comm.scan(x),
        "root": lambda: comm.reduce(x, root=2),
    }
    if comm.rank == VICTIM:
        return heard_in(comm, calls[what])
    return heard_in(comm, lambda: comm.reduce(x, root=0) if what == "root" else comm.all_reduce(x))


# -- ranks that lack something -------------------------------------------------------------------

# Elements of an array of 8 bytes each, and bytes of memory that the process may still get. The
# array is larger than the 64 MiB that the C library has reserved for small arrays of a thread;
# otherwise the C library could take the array from there.
_COUNT = 9 << 20
_ROOM = 20 << 20


@contextlib.contextmanager
def _limited(kind: int, limit: Callable[[], int], mine: bool) -> Iterator[None]:
    gc.collect()  # Otherwise memory may be freed meanwhile.
    soft, hard = resource.getrlimit(kind)
    if mine:
        resource.setrlimit(kind, (limit(), hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def _no_more_descriptors() -> int:
    """Return the limit on descriptors that the open descriptors reach."""
    next_one = os.dup(0)
    os.close(next_one)
    return next_one


def _little_more_memory() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize() + _ROOM


_DESCRIPTORS = (resource.RLIMIT_NOFILE, _no_more_descriptors)
_MEMORY = (resource.RLIMIT_AS, _little_more_memory)


def _lacking(
    comm: Communicator, what: tuple[int, Callable[[], int]], call: Callable[[], object]
) -> Heard:
    """Make ``call`` while the victim has no more of a resource, and restore the limit."""
    since = time.monotonic()
    with _limited(*what, mine=comm.rank == VICTIM):
        error = raised(call)
    return heard_of(comm, error, time.monotonic() - since)


def no_descriptor_for_a_group(comm: Communicator) -> Heard:
    """Make a group without free descriptors; some transports need descriptors for it."""
    return _lacking(comm, _DESCRIPTORS, lambda: comm.dup().close())


def no_descriptor_for_memory(comm: Communicator) -> Heard:
    """Allocate symmetric memory without free descriptors."""
    return _lacking(comm, _DESCRIPTORS, lambda: comm.empty(_COUNT, "float64"))


def no_memory_for_memory(comm: Communicator) -> Heard:
    """Allocate symmetric memory without enough memory."""
    return _lacking(comm, _MEMORY, lambda: comm.empty(_COUNT, "float64"))


def no_memory_for_a_result(comm: Communicator) -> Heard:
    """Make an all_reduce without memory for the result, and again with memory.

    The first call fails before it sends anything, so the other ranks wait for the second call.
    """
    x = np.arange(float(_COUNT)) + comm.rank
    last = comm.size * (_COUNT - 1) + sum(range(comm.size))

    def call() -> None:
        assert comm.all_reduce(x)[-1] == last

    if comm.rank != VICTIM:
        return heard_in(comm, call)
    with _limited(*_MEMORY, mine=True):
        error = raised(call)
    if isinstance(error, MemoryError):
        call()
    return heard_of(comm, error, 0.0)

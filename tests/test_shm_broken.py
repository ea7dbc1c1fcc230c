"""A rank of ``shm`` that is late, in a call that another has given up, hands out no wrong number.

These are calls in Python, which can be stopped anywhere; tests/native has those in C.

The late rank is stopped at the point in question until the other has its arrays back and has
written to them; a second communicator says when.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from collective import native
from collective.communicator import Communicator
from collective.errors import CollectiveTimeoutError, CommunicatorAbortedError
from tests.on_ranks import on_ranks, ranks_of

two = ranks_of(("shm", 2), timeout=20.0)
LONG = 300_000  # elements: more than fit into a slot
GIVES_UP_S = 0.2
Array = np.ndarray[Any, Any]

_LIBC = ctypes.CDLL(None)

_CALLS: dict[str, Callable[[Communicator, Any, float | None], Any]] = {
    "broadcast": lambda comm, x, timeout: comm.broadcast(x, timeout=timeout),
    "all_reduce": lambda comm, x, timeout: comm.all_reduce(x, timeout=timeout),
    "all_gather": lambda comm, x, timeout: comm.all_gather(x, counts=[LONG] * 2, timeout=timeout),
    "scan": lambda comm, x, timeout: comm.scan(x, timeout=timeout),
}


def _in_python(comm: Communicator) -> Communicator:
    """Return a communicator of the same ranks that does without the native core."""
    native.switch(False)
    group = comm.dup()
    native.switch(True)
    return group


def _stop_before(owner: Any, name: str, side: Communicator) -> None:
    """Have this rank wait for a message on ``side`` before it first goes on to ``owner.name``."""
    method, stops = getattr(owner, name), [side.recv_object]

    def stopped(*args: Any, **options: Any) -> Any:
        while stops:
            stops.pop()(0)
        return method(*args, **options)

    setattr(owner, name, stopped)


def _allow(x: Array, how: int) -> None:
    assert _LIBC.mprotect(ctypes.c_void_p(x.ctypes.data), x.nbytes, how) == 0


@pytest.mark.parametrize("unmapped", [False, True], ids=["written", "unmapped"])
@pytest.mark.parametrize("call", _CALLS)
@on_ranks("two")
def test_memory_that_its_owner_has_back_is_not_a_result(
    comm: Communicator, call: str, unmapped: bool
) -> None:
    side, comm = comm.dup(), _in_python(comm)
    x = np.frombuffer(mmap.mmap(-1, 8 * LONG))
    x[:] = 1.0
    comm.barrier()
    if comm.rank == 1:
        _stop_before(comm._backend.peers, "fetch", side)
        with pytest.raises(CommunicatorAbortedError, match=r"waited 0\.2 s for rank 1"):
            _CALLS[call](comm, x, None)
        side.send_object("over", 0)
        return
    with pytest.raises(CollectiveTimeoutError):
        _CALLS[call](comm, x, GIVES_UP_S)
    x[:] = 99.0
    _allow(x, 0 if unmapped else mmap.PROT_READ)
    side.send_object("go on", 1)
    side.recv_object(1)
    _allow(x, mmap.PROT_READ | mmap.PROT_WRITE)


@on_ranks("two")
def test_a_call_on_a_broken_communicator_leaves_the_slots_alone(comm: Communicator) -> None:
    side, comm = comm.dup(), _in_python(comm)
    comm.barrier()
    if comm.rank == 1:
        _stop_before(comm._backend, "_region", side)
        assert comm.broadcast(np.zeros(4)).tolist() == [1.0] * 4
        return
    assert comm.broadcast(np.ones(4)) is not None
    for call in (
        lambda: comm.barrier(timeout=GIVES_UP_S),
        lambda: comm.broadcast(np.full(4, 99.0)),
    ):
        with pytest.raises(CollectiveTimeoutError):
            call()
    side.send_object("go on", 1)


@on_ranks("two")
def test_a_late_rank_writes_nothing_to_memory_that_its_owner_has_back(comm: Communicator) -> None:
    side, comm = comm.dup(), _in_python(comm)
    x = comm.empty(LONG, "float64")
    x[:] = 1.0
    control = comm._backend._control  # type: ignore[attr-defined]
    if comm.rank == 1:
        arrive = control.arrive

        def arrive_and_stop(call: Any, timeout: float) -> None:
            arrive(call, timeout)
            side.recv_object(0)

        control.arrive = arrive_and_stop
        with pytest.raises(CommunicatorAbortedError):
            comm.all_reduce(x, out=x)
        side.send_object("over", 0)
        return
    with pytest.raises(CollectiveTimeoutError):
        comm.all_reduce(x, out=x, timeout=GIVES_UP_S)
    x[:] = 7.0
    side.send_object("go on", 1)
    side.recv_object(1)
    assert (x == 7.0).all(), f"the late rank wrote {x[x != 7.0][:3]}"

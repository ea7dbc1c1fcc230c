"""A rank of ``shm`` that is late, in a call that another has given up, hands out no wrong number.

These are calls in Python, which can be stopped anywhere; tests/native has those in C.

The late rank is stopped at the point in question until the other has its arrays back and has
written to them; a second communicator says when.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from transport_ranks import Run, shm

from collective import native
from collective.communicator import Communicator
from collective.errors import CollectiveError, CollectiveTimeoutError, CommunicatorAbortedError

__all__ = ["shm"]  # the fixture

LONG = 300_000  # elements: more than fit into a slot
GIVES_UP_S = 0.2

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


def _raised(call: Callable[[], Any]) -> CollectiveError:
    try:
        found = call()
    except CollectiveError as error:
        return error
    raise AssertionError(f"returned {found!r}")


def _overwritten_memory(comm: Communicator, call: str) -> CollectiveError:
    side, comm, x = comm.dup(), _in_python(comm), np.ones(LONG)
    comm.barrier()
    if comm.rank == 1:
        _stop_before(comm._backend.peers, "fetch", side)
        return _raised(lambda: _CALLS[call](comm, x, None))
    error = _raised(lambda: _CALLS[call](comm, x, GIVES_UP_S))
    x[:] = 99.0
    side.send_object("go on", 1)
    return error


@pytest.mark.parametrize("call", _CALLS)
def test_memory_that_its_owner_has_back_is_not_a_result(shm: Run, call: str) -> None:
    owner, late = shm(2, _overwritten_memory, call)
    assert isinstance(owner, CollectiveTimeoutError), owner
    assert isinstance(late, CommunicatorAbortedError), late
    assert "waited 0.2 s for rank 1" in str(late)


def _next_call(comm: Communicator) -> Any:
    side, comm = comm.dup(), _in_python(comm)
    comm.barrier()
    if comm.rank == 1:
        _stop_before(comm._backend, "_region", side)
        return comm.broadcast(np.zeros(4))
    assert comm.broadcast(np.ones(4)) is not None
    errors = [_raised(lambda: comm.barrier(timeout=GIVES_UP_S))]
    errors.append(_raised(lambda: comm.broadcast(np.full(4, 99.0))))
    side.send_object("go on", 1)
    return errors


def test_a_call_on_a_broken_communicator_leaves_the_slots_alone(shm: Run) -> None:
    errors, found = shm(2, _next_call)
    assert [type(error) for error in errors] == [CollectiveTimeoutError] * 2
    assert found.tolist() == [1.0] * 4


def _late_writer(comm: Communicator) -> Any:
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
        error = _raised(lambda: comm.all_reduce(x, out=x))
        side.send_object("over", 0)
        return error
    error = _raised(lambda: comm.all_reduce(x, out=x, timeout=GIVES_UP_S))
    x[:] = 7.0
    side.send_object("go on", 1)
    side.recv_object(1)
    assert (x == 7.0).all(), f"the late rank wrote {x[x != 7.0][:3]}"
    return error


def test_a_late_rank_writes_nothing_to_memory_that_its_owner_has_back(shm: Run) -> None:
    owner, late = shm(2, _late_writer)
    assert isinstance(owner, CollectiveTimeoutError), owner
    assert isinstance(late, CommunicatorAbortedError), late

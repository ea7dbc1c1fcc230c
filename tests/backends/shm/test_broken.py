"""A late rank of ``shm`` returns no wrong result from a call that another rank has given up.

These tests make calls in Python, which can be stopped anywhere. tests/native tests calls in C.

A test stops the late rank at a given point, until the other rank has its arrays back and has
written to them. A second communicator tells the late rank when to continue.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collective
from collective import native
from collective.backends.shm import control as control_module
from collective.backends.shm import segment
from collective.communicator import Communicator
from collective.contract.process import RankProcess
from collective.contract.world import World
from collective.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    PeerFailedError,
)
from collective.start.stores import FileStore
from collective.testing import RankPool, RanksFailedError
from tests.support.on_ranks import on_ranks, ranks_of

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
    """Return a communicator of the same ranks that does not use the native core."""
    native.switch(False)
    group = comm.dup()
    native.switch(True)
    return group


def _stop_before(owner: Any, name: str, side: Communicator) -> None:
    """Make this rank wait for a message on ``side`` before its first call of ``owner.name``."""
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
def test_memory_returned_to_owner_is_not_read_as_result(
    comm: Communicator, call: str, unmapped: bool
) -> None:
    side, comm = comm.dup(), _in_python(comm)
    x = np.frombuffer(mmap.mmap(-1, 8 * LONG))
    x[:] = 1.0
    comm.barrier()
    if comm.rank == 1:
        _stop_before(comm.inner.transport._control, "fetch", side)
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
def test_call_on_broken_communicator_leaves_slots_alone(comm: Communicator) -> None:
    side, comm = comm.dup(), _in_python(comm)
    comm.barrier()
    if comm.rank == 1:
        _stop_before(comm.inner.transport, "_region", side)
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
def test_late_rank_does_not_write_to_returned_memory(comm: Communicator) -> None:
    side, comm = comm.dup(), _in_python(comm)
    x = comm.empty(LONG, "float64")
    x[:] = 1.0
    control = comm.inner.transport._control  # type: ignore[attr-defined]
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


# -- ranks that die while other ranks connect ----------------------------------------------------


def _connect_anew(comm: Communicator, store: str) -> Communicator:
    place = comm.rank, comm.size
    return collective.connect(World(*place, *place, "h", "none", "job", FileStore(store)), "shm")


_CONNECTIONS: dict[str, Callable[[Communicator, str], Communicator]] = {
    "dup": lambda comm, store: comm.dup(),
    "split in reverse": lambda comm, store: comm.split(0, key=-comm.rank),
    "connect": _connect_anew,
}


def _connect_while_a_rank_dies(
    comm: Communicator, how: str, victim: int, point: str, store: str
) -> tuple[tuple[int, ...], str]:
    """Return the ranks that a survivor's error names, and its text."""
    processes = [RankProcess.parse(text) for text in comm.all_gather_object(str(RankProcess.own()))]
    dying = processes[victim]
    assert dying is not None
    owner, name = {"probe": (control_module, "read_process"), "open": (segment.Segment, "open")}[
        point
    ]
    function = getattr(owner, name)

    def die_or_outlive(*args: Any, **options: Any) -> Any:
        if comm.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        while not dying.has_ended():
            time.sleep(0.001)
        return function(*args, **options)

    setattr(owner, name, die_or_outlive)
    if point == "open" and comm.rank == victim:  # the victim, whose segment the other ranks open
        comm.inner.transport._attach = die_or_outlive  # type: ignore[attr-defined]
    try:
        _CONNECTIONS[how](comm, store)
    except CollectiveError as error:
        return getattr(error, "ranks", ()), str(error)
    raise AssertionError("connected with a rank that has died")


@pytest.mark.parametrize(
    ("how", "victim", "point"),
    [(how, victim, "probe") for how in _CONNECTIONS for victim in (0, 2)]
    + [("dup", 0, "open"), ("split in reverse", 2, "open")],
)
def test_rank_death_while_connecting_is_named_on_all_others(
    how: str, victim: int, point: str, tmp_path: Path
) -> None:
    with (
        RankPool(3, "shm", timeout=30.0) as pool,
        pytest.raises(RanksFailedError) as caught,
    ):
        pool.run(_connect_while_a_rank_dies, how, victim, point, str(tmp_path))
    assert set(caught.value.errors) == {victim}, caught.value
    for rank, (ranks, text) in caught.value.results.items():
        assert ranks == (victim,), f"rank {rank}: {text}"
        assert f"rank {victim} (pid" in text, f"rank {rank}: {text}"


@on_ranks("two")
def test_connect_failure_of_peer_includes_its_reason(comm: Communicator) -> None:
    if comm.rank == 1:

        def read(*args: Any) -> bool:
            raise MemoryError("no room for a probe")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(control_module, "read_process", read)
            with pytest.raises(MemoryError):
                comm.dup()
    else:
        with pytest.raises(PeerFailedError, match="no room for a probe") as caught:
            comm.dup()
        assert caught.value.rank == 1

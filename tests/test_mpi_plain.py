"""Plain arrays over ``mpi``, for which nothing is made anew, beside what Python sends and makes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import collective
from collective import native
from collective.backends.mpi import MpiBackend, library
from collective.communicator import Communicator, Status
from collective.errors import (
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    RankError,
    ShapeError,
)
from collective.testing import RankPool
from tests.mpi_launches import VENDORS, launch_of, needs, warm_launch_of

pytestmark = pytest.mark.skipif(
    native.chosen.extension is None, reason="the native core is not in use"
)

Run = Callable[..., list[Any]]

# Bytes around what a head holds, what has left the sender at once, and what is matched first.
_EDGES = [896, 2 << 10, 64 << 10]
_LENGTHS = [0, 1, *(edge + more for edge in _EDGES for more in (-1, 0, 1)), 3 << 20]


@pytest.fixture(scope="module", params=[pytest.param(v, marks=needs(v)) for v in VENDORS])
def pair(request: pytest.FixtureRequest) -> Iterator[Run]:
    with RankPool(2, "mpi", timeout=30.0, mpiexec=launch_of(request.param)) as pool:
        yield pool.run


def _transport(comm: Communicator) -> MpiBackend:
    backend = comm._backend
    assert isinstance(backend, MpiBackend)
    return backend


def _without_python(comm: Communicator) -> None:
    """Fail where a message goes through Python."""

    def refuse(*_: Any) -> None:
        raise AssertionError("by Python")

    for name in ("send", "recv", "sendrecv"):
        setattr(comm._backend, name, refuse)


def _data(nbytes: int, rank: int) -> Any:
    return np.random.default_rng([nbytes, rank]).integers(0, 255, nbytes, np.uint8)


def _to_and_fro(comm: Communicator) -> None:
    group, peer = comm.dup(), 1 - comm.rank
    _without_python(group)
    for tag, nbytes in enumerate(_LENGTHS):
        x, out, wanted = _data(nbytes, comm.rank), np.empty(nbytes, np.uint8), _data(nbytes, peer)
        for _ in range(2):
            out[:] = 0
            if comm.rank:
                group.send(x, peer, tag=tag)
                assert group.recv(out, peer, tag=tag) is out
            else:
                assert group.recv(out, peer, tag=tag, timeout=30) is out
                group.send(x, peer, tag=tag)
            assert out.tobytes() == wanted.tobytes(), nbytes
        if nbytes <= native.HEAD_ROOM:
            assert group.sendrecv(x, peer, peer, out=x, tag=tag) is x
            assert x.tobytes() == wanted.tobytes(), nbytes
    group.close()


def _beside_python(comm: Communicator) -> None:
    """What one rank leaves to Python the other does not, and the other way round."""
    peer, tree, status = 1 - comm.rank, {"a": np.arange(3.0), "b": [np.ones((300, 300))]}, Status()
    for count in (2, 500, 50_000):
        x = np.arange(2.0 * count)
        for strided_out in (comm.rank == 0, comm.rank == 1):
            out = np.zeros(2 * count)[::2] if strided_out else np.zeros(count)
            given = np.arange(4.0 * count)[::2][:count] if not strided_out else 2 * x[:count]
            comm.sendrecv(given, peer, peer, out=out)
            assert (out == 2 * x[:count]).all()
        assert (comm.sendrecv(x, peer, peer) == x).all()
        if comm.rank:
            comm.send(x, peer)
            assert (comm.recv(None, peer) == x).all()
        else:
            comm.recv(out := np.empty_like(x), collective.ANY_SOURCE, status=status)
            assert (out == x).all()
            assert status.source == peer
            comm.send(x, peer)
    if comm.rank:
        comm.send(tree, peer)
        comm.send(np.float32([[1, 2]]), peer)
    else:
        with pytest.raises(collective.InvalidArgumentError):
            comm.recv(np.zeros(3), peer)
        got = comm.recv(None, peer)
        assert got.tolist() == [[1, 2]]


def _misfits(comm: Communicator) -> None:
    """What came and does not fit is gone, as by Python, and the next message is there."""
    peer = 1 - comm.rank
    for count in (3, 400, 90_000):
        x, out = np.arange(float(count)), np.zeros(count)
        with pytest.raises(ShapeError):
            comm.sendrecv(x, peer, peer, out=np.zeros(7))
        assert (comm.sendrecv(x, peer, peer, out=out) == x).all()
        if comm.rank:
            comm.send(x, peer)
            comm.send(x + 1, peer)
        else:
            with pytest.raises(ShapeError):
                comm.recv(np.zeros(7), peer)
            assert (comm.recv(out, peer) == x + 1).all()
    assert not _transport(comm)._messages.unread


def _refused(comm: Communicator) -> None:
    """An output that cannot be written to leaves its message where it is."""
    peer, x = 1 - comm.rank, np.arange(4.0)
    fixed = np.zeros(4)
    fixed.flags.writeable = False
    if comm.rank:
        comm.send(x, peer)
    else:
        with pytest.raises(collective.InvalidArgumentError):
            comm.recv(fixed, peer)
        assert (comm.recv(np.zeros(4), peer) == x).all()
    for dst in (comm.rank, 7, True, "1"):
        with pytest.raises(RankError):
            comm.send(x, dst)
    comm.barrier()


def _many_tags(comm: Communicator) -> tuple[int, int]:
    """Return how many peers and tags are remembered when there have been many."""
    group, peer, x = comm.dup(), 1 - comm.rank, np.ones(1)
    for tag in range(200):
        group.sendrecv(x, peer, peer, out=x, tag=tag)
    plain = _transport(group)._plain_messages
    assert plain is not None
    return len(plain._to), len(plain._from)


def _threads(comm: Communicator) -> None:
    """Messages of several threads at once, one of each tag after the other."""
    peer, failures = 1 - comm.rank, []

    def talk(tag: int) -> None:
        x, out = np.full(3, float(tag)), np.empty(3)
        try:
            for _ in range(50):
                comm.sendrecv(x, peer, peer, out=out, tag=tag)
                assert out.tolist() == [tag] * 3
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=talk, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def _tensors(comm: Communicator) -> None:
    torch = pytest.importorskip("torch")
    group, peer = comm.dup(), 1 - comm.rank
    group.sendrecv(torch.ones(1), peer, peer)  # C knows of PyTorch when Python does
    _without_python(group)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        for count in (5, 5_000, 50_000):
            x, out = torch.ones(3, count, dtype=dtype), torch.zeros(3, count, dtype=dtype)
            calls = [lambda x=x: group.send(x, peer), lambda out=out: group.recv(out, peer)]
            for call in calls if comm.rank else reversed(calls):
                call()
            assert torch.equal(x, out)


PROGRAMS = (_to_and_fro, _beside_python, _misfits, _refused, _threads)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__[1:])
def test_messages(pair: Run, program: Any) -> None:
    pair(program)


@needs("mpich")
def test_tensors() -> None:
    with RankPool(2, "mpi", timeout=30.0, mpiexec=warm_launch_of("mpich")) as pool:
        pool.run(_tensors)


def test_no_more_tags_are_remembered_than_a_program_repeats(pair: Run) -> None:
    assert pair(_many_tags) == [(64, 64)] * 2


def _given_up(comm: Communicator, operation: str) -> int:
    """Wait in vain on rank 0; return how much is kept for MPI, which may still write to it."""
    side, group, x = comm.dup(), comm.dup(), np.ones(4)
    kept = len(library._unfinished)
    if comm.rank == 0:
        calls = {
            "recv": lambda: group.recv(x, 1, tag=5, timeout=0.2),
            "sendrecv": lambda: group.sendrecv(x, 1, 1, out=x + 1, tag=5, timeout=0.2),
        }
        with pytest.raises(CollectiveTimeoutError, match=rf"^{operation}\(tag=5\).*rank 1") as late:
            calls[operation]()
        assert late.value.ranks == (1,)
    side.barrier()
    while _transport(group).channel.failure is None:  # the monitor tells the other
        time.sleep(0.001)
    with pytest.raises((CollectiveTimeoutError, CommunicatorAbortedError), match=r"0\.2 s"):
        group.send(x, 1 - comm.rank)
    return len(library._unfinished) - kept


@pytest.mark.parametrize("operation", ["recv", "sendrecv"])
def test_a_message_that_was_given_up_keeps_its_memory(pair: Run, operation: str) -> None:
    assert pair(_given_up, operation) == [1, 0]


# -- collectives ------------------------------------------------------------------------------


def _in_the_background_elsewhere(comm: Communicator) -> None:
    """One rank's call is of plain arrays, the other's in a lane: both do as the lane has to."""
    every = np.arange(4.0) + np.arange(comm.size)[:, None]
    mine, total, joined = every[comm.rank], every.sum(axis=0), every.ravel()
    for background in range(comm.size):
        calls: list[tuple[Callable[..., Any], Any]] = [
            (lambda **how: comm.all_reduce(mine, **how), total),
            (lambda **how: comm.all_gather(mine, **how), joined),
            (lambda **how: comm.broadcast(mine.copy(), root=1, **how), every[1]),
            (lambda **how: comm.reduce_scatter(mine, **how), np.array_split(total, 2)[comm.rank]),
            (lambda **how: comm.barrier(**how), None),
        ]
        for call, wanted in calls:
            got = call(async_op=True).wait() if comm.rank == background else call()
            assert wanted is None or (got == wanted).all()


def test_plain_calls_meet_those_in_the_background(pair: Run) -> None:
    pair(_in_the_background_elsewhere)

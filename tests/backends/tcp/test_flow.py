"""Flow control over ``tcp``: a bound of what a rank keeps of messages that nobody has asked for."""

from __future__ import annotations

import resource
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collective.backends.flow import WINDOW_BYTES
from collective.testing import run_ranks
from tests.backends.tcp.test_conformance import Mixed, Without

ENGINES = pytest.mark.parametrize("backend", ["tcp", Mixed, Without], ids=["C", "mixed", "Python"])
# What a rank may need besides what it keeps: buffers of calls, and the allocator's reserves.
SLACK = 24 << 20


def _memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _flooded(comm: Any, count: int, nbytes: int) -> int:
    """Send many messages; return by how many bytes the receiver has grown before it receives."""
    x, y, peer = np.arange(nbytes, dtype=np.uint8), np.empty(nbytes, np.uint8), 1 - comm.rank
    comm.barrier()
    if comm.rank == 0:
        works = [comm.send(x, peer, tag=1, async_op=True) for _ in range(count)]
        comm.send(np.array([count]), peer, tag=2)
        comm.all_reduce(np.ones(1 << 17))
        for work in works:
            work.wait(100.0)
        return 0
    before = _memory()
    assert comm.recv(np.empty(1, np.int64), peer, tag=2) == [count]
    grown = _memory() - before
    comm.all_reduce(np.ones(1 << 17))
    time.sleep(0.2)
    grown = max(grown, _memory() - before)
    for _ in range(count):
        np.testing.assert_array_equal(comm.recv(y, peer, tag=1), x)
    return grown


@ENGINES
@pytest.mark.parametrize(("count", "nbytes"), [(200, 1 << 20), (2000, 60_000)])
def test_flood_of_messages_before_the_wanted_one_is_bounded(
    backend: Any, count: int, nbytes: int
) -> None:
    _, grown = run_ranks(2, _flooded, count, nbytes, backend=backend, timeout=120.0)
    assert grown < WINDOW_BYTES + SLACK


def _threads(comm: Any) -> int:
    """Send and receive blockingly in two threads, and make collective calls in the third."""
    x, peer, grown = np.arange(1 << 17), 1 - comm.rank, 0

    def send() -> None:
        for _ in range(40):
            comm.send(x, peer, tag=1)

    before = _memory()
    thread = threading.Thread(target=send)
    thread.start()
    for _ in range(20):
        comm.all_reduce(np.ones(1000))
        grown = max(grown, _memory() - before)
    for _ in range(40):
        np.testing.assert_array_equal(comm.recv(np.empty_like(x), peer, tag=1), x)
    thread.join(60.0)
    assert not thread.is_alive()
    return grown


@ENGINES
def test_thread_that_sends_beside_collective_calls_stays_within_the_window(backend: Any) -> None:
    grown = run_ranks(2, _threads, backend=backend, timeout=120.0)
    assert max(grown) < WINDOW_BYTES + SLACK


def _opposite(comm: Any, length: int) -> None:
    peer, x = 1 - comm.rank, np.arange(length) + comm.rank
    works = [comm.send(x + tag, peer, tag=tag, async_op=True) for tag in range(4)]
    comm.barrier()
    assert comm.all_reduce(np.ones(1 << 16))[0] == 2.0
    for tag in reversed(range(4)):
        received = comm.recv(np.empty_like(x), peer, tag=tag)
        np.testing.assert_array_equal(received, np.arange(length) + peer + tag)
        comm.barrier()
    for work in works:
        work.wait()


@ENGINES
@pytest.mark.parametrize("length", [100, 1 << 17, 3 << 20])
def test_sends_to_each_other_are_received_in_opposite_order(backend: Any, length: int) -> None:
    run_ranks(2, _opposite, length, backend=backend, timeout=120.0)


def _blocking(comm: Any) -> None:
    """Send as much as fits into the window to each other, and then receive in opposite order."""
    peer, x = 1 - comm.rank, np.arange((WINDOW_BYTES >> 4) - 1000)
    comm.send(x, peer, tag=1)
    comm.send(x + 1, peer, tag=2)
    comm.barrier()
    np.testing.assert_array_equal(comm.recv(np.empty_like(x), peer, tag=2), x + 1)
    np.testing.assert_array_equal(comm.recv(np.empty_like(x), peer, tag=1), x)


@ENGINES
def test_blocking_sends_within_the_window_need_no_receiver(backend: Any) -> None:
    run_ranks(2, _blocking, backend=backend, timeout=60.0)


def _all_sources(comm: Any) -> None:
    """Every rank sends to every other one by all ways, and receives from any source."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    for length in (3, 1 << 16, 1 << 20):
        x = np.full(length, comm.rank)
        works = [
            comm.send(x, rank, tag=turn, async_op=True) for turn in range(3) for rank in others
        ]
        for turn in (2, 0, 1):
            received = [comm.recv(np.empty_like(x), -1, tag=turn)[0] for _ in others]
            assert sorted(received) == others
        for work in works:
            work.wait()
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        assert (comm.sendrecv(x, right, left) == left).all()
        comm.barrier()  # otherwise a rank could receive a later message of a fast rank


@ENGINES
def test_receives_from_any_source_take_announced_messages(backend: Any) -> None:
    run_ranks(3, _all_sources, backend=backend, timeout=120.0)


def _in_place(comm: Any) -> None:
    peer = 1 - comm.rank
    for length in (1000, WINDOW_BYTES >> 3, WINDOW_BYTES >> 2):
        x = np.full(length, float(comm.rank))
        comm.sendrecv(x, peer, peer, out=x)
        assert (x == peer).all()
        assert (comm.sendrecv(x, peer, peer, out=np.empty(2 * length)[::2]) == comm.rank).all()


@ENGINES
def test_ranks_exchange_long_arrays_in_place(backend: Any) -> None:
    run_ranks(2, _in_place, backend=backend, timeout=60.0)


def _probed(comm: Any) -> None:
    mail = comm.inner.mail
    x = np.arange(WINDOW_BYTES + 8, dtype=np.uint8)
    if comm.rank == 0:
        posts = [mail.send(x, 1, tag) for tag in (5, 6, 5)]
        mail.wait_all(posts, 60.0)
        return
    assert mail.probe(0, 6, 60.0).nbytes == x.size
    y = np.empty_like(x)
    for tag in (5, 6):
        mail.read(mail.match(0, tag, 60.0), y)
        np.testing.assert_array_equal(y, x)
    message = mail.wait(mail.receive(None, 0, 5), 60.0)
    np.testing.assert_array_equal(np.frombuffer(message.data, np.uint8), x)


@ENGINES
def test_probes_find_and_take_announced_messages(backend: Any) -> None:
    run_ranks(2, _probed, backend=backend, timeout=120.0)


# Sends of this many bytes are copied. Together they fit into the window, but not into the buffers
# of the kernels.
COPIED, COPIES = 60_000, 50


def _send_copies(comm: Any, peer: int) -> float:
    """Send copies to a rank; return how many seconds close() takes then."""
    for number in range(COPIES):
        comm.send(np.full(COPIED, number, np.uint8), peer, tag=1, async_op=True)
    began = time.monotonic()
    comm.close()
    return time.monotonic() - began


def _unreceived(comm: Any) -> float:
    comm.barrier()
    return _send_copies(comm, (comm.rank + 1) % comm.size)


@ENGINES
def test_close_waits_for_no_rank_that_closes_too(backend: Any) -> None:
    assert max(run_ranks(3, _unreceived, backend=backend, timeout=60.0)) < 5.0


def _received_late(comm: Any) -> float:
    """Return when rank 0 has closed, or when the other rank begins to receive."""
    comm.barrier()
    if comm.rank == 0:
        _send_copies(comm, 1)
        return time.monotonic()
    time.sleep(1.0)
    began = time.monotonic()
    for number in range(COPIES):
        assert (comm.recv(np.empty(COPIED, np.uint8), 0, tag=1) == number).all(), number
    return began


@ENGINES
def test_close_waits_for_copies_that_a_late_peer_receives(backend: Any) -> None:
    closed, began = run_ranks(2, _received_late, backend=backend, timeout=60.0)
    assert closed > began  # both ranks read the clock of this host

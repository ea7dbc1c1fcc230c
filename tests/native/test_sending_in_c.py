"""``send``, ``recv`` and ``sendrecv`` in C: mixed with those of Python, and with failures."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import collective
from collective import native
from collective.backends.shm import compiled
from collective.communicator import Communicator, Status
from collective.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    PeerLostError,
)
from collective.testing import RankDiedError, RankPool, RanksFailedError, run_ranks
from collective.testing.checks_shrink import gather
from tests.support.on_ranks import on_ranks
from tests.support.plain_messages import LENGTHS, PROGRAMS, data, tensors, without_python

pytest.importorskip("collective.native._core", reason="the native core is not built")


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    with RankPool(2, "shm", timeout=60.0) as ranks:
        yield ranks


def _any_source(comm: Communicator) -> None:
    group, peer, status = comm.dup(), 1 - comm.rank, Status()
    without_python(group)
    for nbytes in LENGTHS:
        x, out = data(nbytes, comm.rank), np.empty(nbytes, np.uint8)
        if comm.rank:
            group.send(x, peer)
        else:
            assert group.recv(out, collective.ANY_SOURCE, status=status) is out
            assert (status.source, out.tobytes()) == (peer, data(nbytes, peer).tobytes())


def _lanes(comm: Communicator) -> None:
    """Check that background messages come first, and that C sends again after them."""
    group, peer, x = comm.dup(), 1 - comm.rank, np.full(300_000, 1.0)
    outs = [np.empty_like(x) for _ in range(4)]
    works = [group.send(x * k, peer, tag=4, async_op=True) for k in range(3)]
    works += [group.recv(out, peer, tag=4, async_op=True) for out in outs[:3]]
    last = [lambda: group.send(x * 3, peer, tag=4), lambda: group.recv(outs[3], peer, tag=4)]
    for call in last if comm.rank else reversed(last):
        call()
    for work in works:
        work.wait()
    assert [out[-1] for out in outs] == [0, 1, 2, 3]
    late = group.recv(outs[0], peer, tag=7, async_op=True)
    comm.barrier()
    group.send(x, peer, tag=7)
    late.wait()
    without_python(group)
    if comm.rank:
        group.send(x, peer, tag=4)
    else:
        group.recv(outs[0], peer, tag=4)


def _heard(comm: Communicator) -> list[str]:
    group, peer, operations = comm.dup(), 1 - comm.rank, []
    hook = group.hook(before=lambda event: operations.append(event.operation))
    group.sendrecv(np.ones(2), peer, peer, out=np.empty(2))
    hook()
    group.sendrecv(np.ones(2), peer, peer, out=np.empty(2))
    assert operations == ["sendrecv"]


@pytest.mark.parametrize(
    "program", [*PROGRAMS, tensors, _any_source, _lanes, _heard], ids=lambda each: each.__name__
)
def test_messages_in_c_program_passes(pair: RankPool, program: Any) -> None:
    pair.run(program)


@pytest.mark.parametrize("without", [0, 1])
@on_ranks("pair")
def test_rank_without_core_makes_all_use_python(comm: Communicator, without: int) -> None:
    native.switch(comm.rank != without)
    group = comm.dup()  # the new group checks which ranks have the core
    native.switch(True)
    assert group.inner.transport.exchange is None
    peer = 1 - comm.rank
    for nbytes in LENGTHS:
        received = group.sendrecv(
            data(nbytes, comm.rank), peer, peer, out=np.empty(nbytes, np.uint8)
        )
        assert received.tobytes() == data(nbytes, peer).tobytes(), nbytes


@pytest.mark.parametrize("operation", ["send", "recv", "sendrecv"])
@on_ranks("pair")
def test_late_peer_is_named(comm: Communicator, operation: str) -> None:
    """Rank 1 does nothing; rank 0 names it, and the communicator is broken on both ranks."""
    side, group, x = comm.dup(), comm.dup(), np.ones(1 << 20)
    if comm.rank == 0:
        calls = {
            "send": lambda: group.send(x, 1, tag=5, timeout=0.2),
            "recv": lambda: group.recv(x, 1, tag=5, timeout=0.2),
            "sendrecv": lambda: group.sendrecv(x, 1, 1, out=x + 1, tag=5, timeout=0.2),
        }
        with pytest.raises(CollectiveTimeoutError, match=rf"^{operation}\(tag=5\).*rank 1") as late:
            calls[operation]()
        assert late.value.ranks == (1,)
        side.send_object("over", 1)
        with pytest.raises(CollectiveError, match=r"0\.2 s"):
            group.send(np.ones(1), 1)
    else:
        side.recv_object(0)
        # The start of the message is in the ring, but the sender has its array back.
        with pytest.raises(CommunicatorAbortedError, match=r"0\.2 s"):
            group.recv(x, 0, tag=5)


@on_ranks("pair")
def test_interrupted_wait_breaks_communicator(comm: Communicator) -> None:
    """An exception in a signal handler while rank 0 waits breaks the communicator."""
    group, side = comm.dup(), comm.dup()
    if comm.rank == 0:

        def handler(*_: Any) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            with pytest.raises(KeyboardInterrupt):
                group.recv(np.ones(3), 1)
        finally:
            signal.signal(signal.SIGALRM, before)
        side.send_object("over", 1)
    else:
        side.recv_object(0)
    with pytest.raises(CommunicatorAbortedError):
        group.send(np.ones(3), 1 - comm.rank)


def _killed(comm: Communicator, sends: bool, marks: str) -> tuple[int, ...]:
    """Kill rank 1 when its message fills the ring, or before it receives."""
    group, x = comm.dup(), np.ones(1 << 20)
    gather(comm, marks)
    if comm.rank == 1:

        def die(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if sends:
            compiled._MessageCallbacks.wait = die  # type: ignore[method-assign]
            group.send(x, 0)
        die()
    alive = group.inner.transport._control.segment.alive  # type: ignore[attr-defined]
    while alive(1):
        time.sleep(0.001)
    call = group.recv if sends else group.send
    with pytest.raises(PeerLostError, match=r"rank 1 .*has died") as lost:
        call(x, 1)
    return lost.value.ranks


@pytest.mark.parametrize("sends", [False, True])
def test_death_with_message_in_flight_is_named(sends: bool, tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(2, _killed, sends, str(tmp_path), backend="shm")
    assert isinstance(caught.value.errors[1], RankDiedError)
    assert caught.value.results[0] == (1,)

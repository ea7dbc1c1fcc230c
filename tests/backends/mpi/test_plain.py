"""Plain arrays over ``mpi``, whose prepared calls are reused, mixed with calls made by Python."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from collective import native
from collective.backends.mpi import MpiBackend, library
from collective.communicator import Communicator
from collective.errors import CollectiveTimeoutError, CommunicatorAbortedError
from collective.testing import RankPool
from tests.support import plain_messages
from tests.support.mpi_launches import INSTALLED, launch_of, needs, warm_launch_of
from tests.support.on_ranks import on_ranks

pytestmark = pytest.mark.skipif(
    native.chosen.extension is None, reason="the native core is not in use"
)


@pytest.fixture(scope="module", params=INSTALLED)
def pair(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(2, "mpi", timeout=30.0, mpiexec=launch_of(request.param)) as pool:
        yield pool


def _transport(comm: Communicator) -> MpiBackend:
    backend = comm.inner.transport
    assert isinstance(backend, MpiBackend)
    return backend


def _misfits(comm: Communicator) -> None:
    plain_messages.misfits(comm)
    assert not _transport(comm)._messages.unread


@on_ranks("pair")
def test_remembered_tags_are_limited_to_64(comm: Communicator) -> None:
    group, peer, x = comm.dup(), 1 - comm.rank, np.ones(1)
    for tag in range(200):
        group.sendrecv(x, peer, peer, out=x, tag=tag)
    plain = _transport(group)._plain_messages
    assert plain is not None
    assert (len(plain._to), len(plain._from)) == (64, 64)


def _threads(comm: Communicator) -> None:
    """Exchange messages in several threads at once; each thread uses one tag."""
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


@pytest.mark.parametrize(
    "program", [*plain_messages.PROGRAMS, _misfits, _threads], ids=lambda program: program.__name__
)
def test_plain_messages_program_passes(pair: RankPool, program: Any) -> None:
    pair.run(program)


@needs("mpich")
def test_tensor_messages_arrive() -> None:
    with RankPool(2, "mpi", timeout=30.0, mpiexec=warm_launch_of("mpich")) as pool:
        pool.run(plain_messages.tensors)


@pytest.mark.parametrize("operation", ["recv", "sendrecv"])
@on_ranks("pair")
def test_timed_out_message_keeps_its_memory(comm: Communicator, operation: str) -> None:
    """Rank 0 waits in vain, and MPI may still write to the memory of the call."""
    side, group, x = comm.dup(), comm.dup(), np.ones(4)
    unfinished_before = len(library._unfinished)
    if comm.rank == 0:
        calls = {
            "recv": lambda: group.recv(x, 1, tag=5, timeout=0.2),
            "sendrecv": lambda: group.sendrecv(x, 1, 1, out=x + 1, tag=5, timeout=0.2),
        }
        with pytest.raises(CollectiveTimeoutError, match=rf"^{operation}\(tag=5\).*rank 1") as late:
            calls[operation]()
        assert late.value.ranks == (1,)
    side.barrier()
    while _transport(group).channel.failure is None:  # until the monitor has told the other rank
        time.sleep(0.001)
    with pytest.raises((CollectiveTimeoutError, CommunicatorAbortedError), match=r"0\.2 s"):
        group.send(x, 1 - comm.rank)
    assert len(library._unfinished) - unfinished_before == (comm.rank == 0)


def _send(comm: Communicator, x: Any, dst: int, background: bool, **options: Any) -> None:
    sending = comm.send(x, dst, async_op=background, **options)
    if background:
        sending.wait()


@pytest.mark.parametrize("way", ["in C", "in Python", "in the background"])
@on_ranks("pair")
def test_timed_out_send_waits_until_receiver_knows_failure(comm: Communicator, way: str) -> None:
    """Rank 1 learns of the failure late, as on a busy machine, and then receives at once."""
    side, group, x = comm.dup(), comm.dup(), np.ones(1 << 20)
    if way == "in Python":
        group._path.exchange = None
    channel = _transport(group).channel
    if comm.rank == 1:
        hear = channel._hear

        def hear_late(message: dict[str, Any]) -> None:
            if message["kind"] == "failure":
                time.sleep(0.5)
            hear(message)

        channel._hear = hear_late  # type: ignore[method-assign]
    comm.barrier()
    if comm.rank == 0:
        background = way == "in the background"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("collective.backends.peers.channel._HEARD_S", 30.0)
            with pytest.raises(CollectiveTimeoutError):
                _send(group, x, 1, background, timeout=0.2)
        x[:] = 99.0  # the call has ended, so the program may change its array
        side.send_object("go on", 1)
    else:
        side.recv_object(0)
        with pytest.raises(CommunicatorAbortedError, match="timed out"):
            group.recv(np.empty_like(x), 0)
    comm.barrier()


# -- collectives ------------------------------------------------------------------------------


@on_ranks("pair")
def test_plain_calls_match_background_calls(comm: Communicator) -> None:
    """One rank makes a plain call, the other a background call: both take the path of the lane."""
    inputs = np.arange(4.0) + np.arange(comm.size)[:, None]
    mine, total, gathered = inputs[comm.rank], inputs.sum(axis=0), inputs.ravel()
    for background in range(comm.size):
        calls: list[tuple[Callable[..., Any], Any]] = [
            (lambda **how: comm.all_reduce(mine, **how), total),
            (lambda **how: comm.all_gather(mine, **how), gathered),
            (lambda **how: comm.broadcast(mine.copy(), root=1, **how), inputs[1]),
            (lambda **how: comm.reduce_scatter(mine, **how), np.array_split(total, 2)[comm.rank]),
            (lambda **how: comm.barrier(**how), None),
        ]
        for call, wanted in calls:
            result = call(async_op=True).wait() if comm.rank == background else call()
            assert wanted is None or (result == wanted).all()

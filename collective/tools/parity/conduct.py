"""What is not about numbers and has to be the same on every transport.

Each function is called on every rank, and raises AssertionError, or lets through what the library
raises, where the transport does not do as it should.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from collective.communicator import Communicator
from collective.errors import (
    CollectiveTimeoutError,
    MismatchError,
    PeerFailedError,
    PeerLostError,
)
from collective.ops import user_op

__all__ = ["run"]

Array = np.ndarray[Any, Any]

# How late one rank comes to a barrier.
_LATE_S = 0.03
# More than a first message holds, on any transport.
_LONG = 70_000


def run(comm: Communicator, what: str) -> bool:
    """Hold that the ranks of ``comm`` can rely on ``what``.

    Returns:
        Whether the communicator can be used afterwards.

    Raises:
        AssertionError: they cannot.
    """
    if comm.size > 1:
        _CONDUCT[what](comm)
    return what not in ("failing", "leaving") or comm.size == 1


def _barrier(comm: Communicator) -> None:
    """Nobody leaves a barrier before the last has come."""
    times = []
    for late in range(comm.size):
        if comm.rank == late:
            time.sleep(_LATE_S)
        arrived = time.monotonic()
        comm.barrier()
        times.append([arrived, time.monotonic()])
    # One clock on one host.
    table = comm.all_gather(np.array([times]))
    early = table[:, :, 1] < table[:, :, 0].max(axis=0)
    assert not early.any(), (
        f"barrier: rank {int(np.argwhere(early)[0, 0])} left before the last had come"
    )


def _messages(comm: Communicator) -> None:
    """Messages keep their order and their tags, also between collective calls."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in (3, _LONG):
        tagged = [comm.send(np.full(count, tag), right, tag=tag, async_op=True) for tag in (1, 7)]
        plain = [comm.send(np.full(count, turn), right, async_op=True) for turn in (10, 11)]
        total = comm.all_reduce(np.full(count, comm.rank))
        assert (total == sum(range(comm.size))).all(), "all_reduce: wrong while messages travel"
        coming = [comm.recv(None, left, async_op=True) for _ in range(2)]
        joined = comm.all_gather(np.full(count, comm.rank))
        wanted = np.repeat(np.arange(comm.size), count)
        assert np.array_equal(joined, wanted), "all_gather: wrong while messages are awaited"
        for turn, work in zip((10, 11), coming):
            assert (work.wait() == turn).all(), "recv: messages of one tag changed places"
        for tag in (7, 1):
            found = comm.recv(None, left, tag=tag)
            assert (found == tag).all(), f"recv: tag {tag} brought the message of another tag"
        for work in (*tagged, *plain):
            work.wait()


def _reuse(comm: Communicator) -> None:
    """When a call has returned, what was passed in is the caller's again."""
    for turn, count in enumerate((1, 100, 9000, 2 * _LONG) * 2):
        root = turn % comm.size
        mine = np.full(count, turn)
        found = comm.broadcast(mine, root=root)
        if comm.rank == root:
            mine[:] = -1
        else:
            assert (found == turn).all(), f"broadcast: {count} elements changed after it returned"
        mine = np.full(count, turn + comm.rank)
        found = comm.all_gather(mine)
        mine[:] = -1
        wanted = np.repeat(np.arange(comm.size) + turn, count)
        assert np.array_equal(found, wanted), f"all_gather: {count} elements changed after it"


def _groups(comm: Communicator) -> None:
    """A group has its ranks in the order of the keys, and calls of its own."""
    turned = comm.split(0, key=-comm.rank)
    assert turned is not None
    assert turned.rank == comm.size - 1 - comm.rank, f"split: rank {turned.rank} by falling keys"
    found = turned.all_gather(np.array([comm.rank]))
    assert np.array_equal(found, np.arange(comm.size)[::-1]), f"split: gathered {found}"
    parity = comm.split(comm.rank % 2)
    assert parity is not None
    total = parity.all_reduce(np.array([comm.rank]))
    assert total == sum(range(comm.rank % 2, comm.size, 2)), f"split: a sum of {total}"
    turned.close()
    parity.close()


def _symmetric(comm: Communicator) -> None:
    """Views of symmetric memory reduce like any array, and nothing beside them is touched."""
    whole = comm.empty(_LONG, "int32")
    for start, stop in ((0, _LONG), (1, 2), (17, 50_000), (5, 5)):
        comm.barrier()  # nobody may write while a peer still reads
        whole[:] = -5
        whole[start:stop] = np.arange(stop - start) + comm.rank
        comm.barrier()
        view = whole[start:stop]
        comm.all_reduce(view, out=view)
        wanted = comm.size * np.arange(stop - start) + sum(range(comm.size))
        assert np.array_equal(view, wanted), f"empty: the sum of elements {start} to {stop}"
        others = np.delete(whole, slice(start, stop))
        assert (others == -5).all(), f"empty: memory beside {start} to {stop} was changed"


def _mismatch(comm: Communicator) -> None:
    """Ranks that do not agree are told so, all of them, and can go on."""
    odd_one = comm.rank == comm.size - 1
    x = np.ones(6, np.float32)
    calls: list[Callable[[], object]] = [
        lambda: comm.all_reduce(x, op="max" if odd_one else "sum"),
        lambda: comm.all_gather(x if odd_one else x.astype(np.float64)),
    ]
    for call in calls if comm.capabilities.checks_calls else calls[1:]:
        try:
            call()
        except MismatchError:
            continue
        raise AssertionError(f"mismatch: ranks disagreed, and rank {comm.rank} was not told")
    assert comm.all_reduce(np.array([1])) == comm.size, "mismatch: a wrong sum afterwards"


def _failing(comm: Communicator) -> None:
    """An operator that raises on one rank is an error on all of them, of the same call."""
    last = comm.size - 1

    def add(a: Array, b: Array) -> Array:
        if comm.rank == last:
            raise ArithmeticError("no such sum")
        return a + b

    raised: Exception
    try:
        found = comm.scan(np.array([comm.rank]), op=user_op(add))
    except (ArithmeticError, PeerFailedError) as error:
        raised = error
    else:
        raise AssertionError(
            f"failing: rank {comm.rank} was not told of an operator that raised, and got {found}"
        )
    own = isinstance(raised, ArithmeticError)
    assert own == (comm.rank == last), f"failing: rank {comm.rank} got {raised!r}"


def _leaving(comm: Communicator) -> None:
    """A rank that leaves while others need it is missed, and by its name."""
    comm.barrier()
    last = comm.size - 1
    if comm.rank == last:
        comm.close()
        return
    since = time.monotonic()
    try:
        comm.barrier()
    except PeerLostError as error:
        missed = error.ranks
    except CollectiveTimeoutError:
        missed = () if comm.capabilities.detects_lost_peers else (last,)
    else:
        raise AssertionError(f"leaving: a barrier without rank {last}, which had left")
    seconds = time.monotonic() - since
    assert last in missed, f"leaving: rank {last} was not missed, after {seconds:.1f} s"


_CONDUCT: dict[str, Callable[[Communicator], None]] = {
    "barrier": _barrier,
    "messages": _messages,
    "reuse": _reuse,
    "groups": _groups,
    "symmetric": _symmetric,
    "mismatch": _mismatch,
    "failing": _failing,
    "leaving": _leaving,
}

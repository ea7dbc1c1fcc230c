"""Checks of communicators that are made of other communicators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from collective import Communicator, MismatchError

from .checks import on_each_rank
from .samples import assert_same, expected, values


def _hold(
    comm: Communicator, group: Communicator, members: list[int], what: str, seed: int = 0
) -> None:
    """Check that ``group`` connects ``members``, which are ranks of ``comm``, in this order."""
    assert group.size == len(members), f"{what}: size {group.size}; expected {len(members)}"
    outer = comm.rank
    if members[group.rank] != outer:
        raise AssertionError(f"{what}: rank {outer} is {group.rank} there; members: {members}")
    for count in (5, 30_000):
        inputs = [values("float32", count, rank, seed) for rank in members]
        mine = values("float32", count, outer, seed)
        assert_same(group.all_reduce(mine), expected("sum", inputs), f"all_reduce in {what}")
        joined = group.all_gather(mine)
        assert_same(joined, np.concatenate(inputs), f"all_gather in {what}")
        root = group.size - 1
        assert_same(group.broadcast(mine, root=root), inputs[root], f"broadcast in {what}")
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    received = group.sendrecv(np.array([outer]), right, left)
    assert_same(received, np.array([members[left]]), f"sendrecv in {what}")


@on_each_rank()
def check_split(comm: Communicator) -> None:
    """Check that split() groups ranks by colour, orders them by key and leaves out colour None."""
    everyone = range(comm.size)
    parity: Any = np.bool_(comm.rank % 2)  # what a comparison of NumPy's numbers gives
    half = comm.split(parity)
    assert half is not None
    members = [rank for rank in everyone if rank % 2 == comm.rank % 2]
    _hold(comm, half, members, "split by parity", 90)
    turned = comm.split(7, key=-comm.rank)
    assert turned is not None
    _hold(comm, turned, list(reversed(everyone)), "split with falling keys", 91)
    some = comm.split(None if comm.rank == 0 else 1)
    assert (some is None) == (comm.rank == 0), f"split(None) gave rank {comm.rank} {some!r}"
    if some is not None:
        _hold(comm, some, list(range(1, comm.size)), "split without rank 0", 92)
        some.close()
    _hold(comm, half, members, "split by parity, again", 93)
    deeper = half.split(half.rank // 2)
    assert deeper is not None
    at = half.rank // 2 * 2
    _hold(comm, deeper, members[at : at + 2], "split of a split", 94)
    for group in (deeper, turned, half):
        group.close()
    _hold(comm, comm, list(everyone), "the communicator that was split", 95)


@on_each_rank(at_least=2)
def check_groups_side_by_side(comm: Communicator) -> None:
    """Check that disjoint and overlapping groups, made by their members alone, work at once."""
    size, rank = comm.size, comm.rank
    low, high = list(range(size // 2)), list(range(size // 2, size))
    mine = low if rank in low else high
    half = comm.group(mine)
    # The groups make different numbers of calls: no rank may wait for the other group.
    for turn in range(1 if rank in low else 4):
        _hold(comm, half, mine, f"group {mine}", turn)
    # Overlapping groups of neighbours. Every rank makes them in the same order.
    pairs = [[first, first + 1] for first in range(size - 1)]
    groups = [comm.group(pair) if rank in pair else None for pair in pairs]
    works = []
    for group, pair in zip(groups, pairs):
        if group is not None:
            works.append((group.all_reduce(np.array([rank]), async_op=True), sum(pair), pair))
    for work, total, pair in works:
        assert_same(work.wait(), np.array([total]), f"all_reduce in group {pair}")
    if rank == 0:
        alone = comm.group([0])
        _hold(comm, alone, [0], "a group of one")
        alone.close()
    if size > 2 and rank != 1:
        members = [r for r in reversed(range(size)) if r != 1]
        turned = comm.group(members)
        _hold(comm, turned, members, f"group {members}", 9)
        turned.close()
    for group in (*groups, half):
        if group is not None:
            group.close()


_OTHERS: dict[str, Callable[[int], list[int]]] = {
    "another order": lambda size: list(range(size))[::-1],
    "other ranks": lambda size: [0, size - 1],
}


@on_each_rank(
    lambda size: [{"what": what} for what in list(_OTHERS)[: size - 1]], at_least=2, fresh=True
)
def check_group_mismatch(comm: Communicator, what: str) -> None:
    """Check that group() with differing members raises MismatchError; no rank waits."""
    last, others = comm.size - 1, _OTHERS[what](comm.size)
    try:
        comm.group(others if comm.rank == last else range(comm.size))
    except MismatchError as error:
        text = str(error)
    else:
        raise AssertionError(f"rank {comm.rank} got a group although another rank names {what}")
    if what == "another order":
        _hold(comm, comm, list(range(comm.size)), "the communicator after a mismatch", 99)
    for word in (f"rank {last}: group", str(others)):
        assert word in text, f"rank {comm.rank}: the error does not contain {word!r}: {text}"


@on_each_rank()
def check_dup(comm: Communicator) -> None:
    """Check that calls of a dup() do not mix with its original's, with several in flight."""
    everyone = list(range(comm.size))
    first, second = comm.dup(), comm.dup()
    works = []
    for turn in range(5):
        for scale, communicator in ((1, comm), (100, first), (10_000, second)):
            if comm.rank % 2 and communicator is first:
                continue
            works.append(
                (communicator.all_reduce(np.array([scale + turn]), async_op=True), scale + turn)
            )
        if comm.rank % 2:
            works.append((first.all_reduce(np.array([100 + turn]), async_op=True), 100 + turn))
    for work, value in works:
        assert_same(work.wait(), np.array([value * comm.size]), f"all_reduce of {value}")
    if comm.size > 1:
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        sent = [
            communicator.send(np.array([scale]), right, async_op=True)
            for scale, communicator in ((1, comm), (2, first), (3, second))
        ]
        for scale, communicator in ((3, second), (1, comm), (2, first)):
            received = communicator.recv(None, left)
            assert_same(received, np.array([scale]), f"the message in communicator {scale}")
        for message in sent:
            message.wait()
    first.close()
    _hold(comm, second, everyone, "a dup whose sister is closed", 96)
    second.close()
    _hold(comm, comm, everyone, "a communicator whose dups are closed", 97)


@on_each_rank()
def check_split_by_host(comm: Communicator) -> None:
    """Check that split("host") gives the ranks of this host: all ranks if there is one host."""
    with comm.split("host") as local:
        hosts = comm.all_gather_object(comm.host)
        members = [rank for rank in range(comm.size) if hosts[rank] == comm.host]
        _hold(comm, local, members, "the ranks of this host", 98)
        local_place = (comm.local_rank, comm.local_size)
        wanted = (members.index(comm.rank), len(members))
        assert local_place == wanted, f"local rank and size: {local_place}; expected {wanted}"

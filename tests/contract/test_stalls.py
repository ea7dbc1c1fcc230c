"""Communicators that ranks use in different orders: a mismatch instead of a deadlock."""

from __future__ import annotations

import contextlib
import functools
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from collective.communicator import Communicator
from collective.contract.stalls import Circles, alone
from collective.errors import CollectiveTimeoutError, MismatchError
from collective.testing import RankPool, run_ranks
from tests.support.mpi_launches import REPEATED, VENDORS, launch_of
from tests.support.selection import in_whole

Run = Callable[..., list[Any]]
# A name and not an import, because MPI ranks import this module without needing PyTorch.
PAIRS = "tests.support.simulated_hosts:Pairs"

# -- ranks ----------------------------------------------------------------------------------------


def _crosswise(comm: Communicator) -> str:
    """Use two duplicates, the last rank in the opposite order; return the error's text."""
    first, second = comm.dup(), comm.dup()
    order = (first, second) if comm.rank < comm.size - 1 else (second, first)
    with pytest.raises(MismatchError) as caught:
        _all_reduce(order)
    return str(caught.value)


def _crosswise_gathers(comm: Communicator) -> str:
    """Gather over two duplicates, the last rank in the opposite order; return the error's text."""
    first, second = comm.dup(), comm.dup()
    order = (first, second) if comm.rank < comm.size - 1 else (second, first)
    with pytest.raises(MismatchError) as caught:
        _all_gather(order)
    return str(caught.value)


def _all_gather(order: Sequence[Communicator]) -> None:
    for comm in order:
        comm.all_gather(np.ones(3))


def _all_reduce(order: Sequence[Communicator]) -> None:
    for comm in order:
        comm.all_reduce(np.ones(3))


def _around(comm: Communicator) -> str:
    """Use groups of two neighbours, each rank first its group with the next rank."""
    size, rank = comm.size, comm.rank
    pairs = [sorted((first, (first + 1) % size)) for first in range(size)]
    groups = {first: comm.group(pairs[first]) for first in range(size) if rank in pairs[first]}
    with pytest.raises(MismatchError) as caught:
        groups[rank].barrier()
    return str(caught.value)


TRANSPORTS = [
    pytest.param("shm"), in_whole("tcp"), in_whole("gloo"), pytest.param(PAIRS), *REPEATED,
]  # fmt: skip
CASES = [
    pytest.param(*transport.values, function, marks=transport.marks)
    for transport in TRANSPORTS
    for function in (_crosswise, _crosswise_gathers, _around)
    # Hierarchical uses one transport for groups of one host and another for groups of several
    # hosts. The two transports do not exchange what they wait for.
    if (*transport.values, function) != (PAIRS, _around)
]


@pytest.fixture(scope="module")
def run_on() -> Iterator[Callable[[str], Run]]:
    """Yield a function that returns a runner on three ranks of a transport.

    The ranks stay alive for the module's other tests.
    """
    with contextlib.ExitStack() as opened:

        @functools.cache
        def run(transport: str) -> Run:
            if transport in ("gloo", PAIRS):
                pytest.importorskip("torch", reason="Gloo stands on PyTorch")
            launch = launch_of(transport) if transport in VENDORS else None
            backend = "mpi" if transport in VENDORS else transport
            return opened.enter_context(RankPool(3, backend, mpiexec=launch)).run

        yield run


@pytest.mark.parametrize(("transport", "function"), CASES)
def test_ranks_in_deadlock_get_mismatch_error(
    run_on: Callable[[str], Run], transport: str, function: Any
) -> None:
    for text in run_on(transport)(function):
        assert "wait for each other in calls of different communicators" in text
        for rank in (0, 2):
            assert str(rank) in text
        for number in (1, 2):
            assert f", communicator {number} (made at " in text
        assert f"in {function.__name__}" in text


def _with_a_deadline(comm: Communicator) -> list[float]:
    """Let the last rank's wait time out on purpose, then make the call that the others wait in."""
    first, second = comm.dup(), comm.dup()
    if comm.rank == comm.size - 1:
        with pytest.raises(CollectiveTimeoutError):
            second.barrier(timeout=2.5)
    x: list[float] = first.all_reduce(np.ones(1)).tolist()
    return x


@pytest.mark.parametrize("transport", ["shm", in_whole("tcp"), in_whole("gloo")])
def test_wait_with_explicit_deadline_is_not_a_deadlock(
    run_on: Callable[[str], Run], transport: str
) -> None:
    assert run_on(transport)(_with_a_deadline) == [[3.0]] * 3


# -- messages --------------------------------------------------------------------------------------


def _receive_first(comm: Communicator) -> str:
    """Receive from the next rank before any rank has sent; return the error's text."""
    group = comm.dup()
    with pytest.raises(MismatchError) as caught:
        group.recv(np.ones(1), (comm.rank + 1) % comm.size, tag=5)
    return str(caught.value)


def _receive_or_meet(comm: Communicator) -> str:
    """Wait for all ranks on rank 0, and for its message on the others; return the error's text."""
    group = comm.dup()
    with pytest.raises(MismatchError) as caught:
        group.barrier() if comm.rank == 0 else group.recv(np.ones(1), 0, tag=5)
    return str(caught.value)


@pytest.mark.parametrize("transport", ["shm", in_whole("tcp")])
@pytest.mark.parametrize("function", [_receive_first, _receive_or_meet])
def test_ranks_that_receive_from_each_other_get_mismatch_error(
    run_on: Callable[[str], Run], transport: str, function: Any
) -> None:
    for text in run_on(transport)(function):
        assert "the ranks wait for each other (ranks as numbered" in text
        assert f"recv(src=0, tag=5) at {__file__}" in text
        assert ("barrier()" if function is _receive_or_meet else "rank 2: recv") in text
        assert f"in {function.__name__}" in text


def _late_message(comm: Communicator) -> float:
    """Pass a message around that the last rank sends after some looks for circles."""
    x = np.array([4.0])
    if comm.rank == comm.size - 1:
        time.sleep(3.5)
    else:
        comm.recv(x, comm.rank + 1)
    if comm.rank:
        comm.send(x, comm.rank - 1)
    return float(x[0])


@pytest.mark.parametrize("transport", ["shm", in_whole("tcp")])
def test_late_message_is_not_a_deadlock(run_on: Callable[[str], Run], transport: str) -> None:
    assert run_on(transport)(_late_message) == [4.0] * 3


# -- ranks with other sources of calls -----------------------------------------------------------


def _others(comm: Communicator) -> list[bool]:
    results = [alone()]
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    results.append(alone())
    over.set()
    thread.join()
    results.append(alone())
    signal.signal(signal.SIGUSR2, lambda *_: None)
    results.append(alone())
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    if comm.rank == 0:
        work = comm.recv(None, 1, async_op=True)
        results.append(alone())
        comm.send(np.ones(1), 1)
        work.wait()
    else:
        comm.recv(None, 0)
        comm.send(np.ones(1), 0)
        results.append(False)
    results.append(alone())
    return results


def test_rank_with_threads_handlers_or_background_calls_is_not_alone() -> None:
    for results in run_ranks(2, _others, backend="shm"):
        assert results == [True, False, True, False, False, True]


# -- circles --------------------------------------------------------------------------------------


class Ranks:
    """Model of ranks that make barriers of several communicators, and publish notes about them.

    Args:
        plans: for each rank the names of the communicators that it uses, in order.
    """

    def __init__(self, plans: Sequence[Sequence[str]]) -> None:
        self.plans = plans
        self.at = [0] * len(plans)  # number of completed calls of each rank
        self.waits = [False] * len(plans)
        self.begun = [dict.fromkeys(sorted(set(plan)), 0) for plan in plans]
        self.beats = [0] * len(plans)
        self.notes: dict[int, Any] = {}

    def over(self, rank: int) -> bool:
        return self.at[rank] == len(self.plans[rank])

    def go_on(self, rank: int) -> None:
        """Begin the rank's next call, or leave its call if all members have entered it."""
        if self.over(rank):
            return
        name = self.plans[rank][self.at[rank]]
        if not self.waits[rank]:
            self.begun[rank][name] += 1
            self.waits[rank] = True
        elif all(b.get(name, self.begun[rank][name]) >= self.begun[rank][name] for b in self.begun):
            self.waits[rank] = False
            self.at[rank] += 1

    def note(self, rank: int) -> None:
        if self.waits[rank]:
            name = self.plans[rank][self.at[rank]]
            self.beats[rank] += 1
            self.notes[rank] = {
                "name": name,
                "number": self.begun[rank][name],
                "begun": dict(self.begun[rank]),
                "needs": None,
                "delivered": True,
                "header": {"operation": "barrier", "dtype": None, "options": {}, "site": ""},
                "made": name,
                "beat": self.beats[rank],
                "found": None,
            }

    def stuck(self) -> bool:
        """Advance all ranks as far as possible; return whether some plan is not complete."""
        all_ranks = range(len(self.plans))
        for _ in range(2 * sum(map(len, self.plans))):
            for rank in all_ranks:
                self.go_on(rank)
        return not all(map(self.over, all_ranks))


def _plans(random_: random.Random, legal: bool) -> list[list[str]]:
    """Return the ranks' plans.

    Args:
        legal: if true, all plans follow one order of calls; otherwise each has an order of its own.
    """
    size, names = random_.randint(2, 5), "ABCD"[: random_.randint(2, 4)]
    members = {name: random_.sample(range(size), random_.randint(2, size)) for name in names}
    calls = [random_.choice(names) for _ in range(12)]
    plans = [[name for name in calls if rank in members[name]] for rank in range(size)]
    if not legal:
        for plan in plans:
            random_.shuffle(plan)
    return plans


@pytest.mark.parametrize("seed", range(10))
def test_circles_are_not_found_among_late_ranks(seed: int) -> None:
    random_ = random.Random(seed)
    ranks, circles = Ranks(_plans(random_, legal=True)), Circles()
    all_ranks = range(len(ranks.plans))
    while not all(map(ranks.over, all_ranks)):
        random_.choice((ranks.go_on, ranks.note))(random_.choice(all_ranks))
        # A reader may see stale notes of some ranks beside recent notes of others.
        assert circles.found(ranks.notes) == ([], "")


@pytest.mark.parametrize("seed", range(20))
def test_circles_are_found_among_deadlocked_ranks(seed: int) -> None:
    random_ = random.Random(seed)
    ranks, circles = Ranks(_plans(random_, legal=False)), Circles()
    all_ranks = range(len(ranks.plans))
    calls: list[list[Any]] = []
    for _ in range(1500):
        random_.choice((ranks.go_on, ranks.note))(random_.choice(all_ranks))
        calls, _ = circles.found(ranks.notes)
        if calls:
            break
    inside = [
        (rank, ranks.at[rank])
        for rank in all_ranks
        if ranks.waits[rank] and ranks.plans[rank][ranks.at[rank]] in [name for name, _ in calls]
    ]
    assert bool(inside) == ranks.stuck()
    # Ranks inside the circle do not advance, whatever the other ranks do.
    assert all(ranks.at[rank] == at for rank, at in inside)

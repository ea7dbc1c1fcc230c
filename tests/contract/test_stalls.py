"""Communicators that ranks use in different orders: a mismatch, and no wait for each other."""

from __future__ import annotations

import contextlib
import functools
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from collective.communicator import Communicator
from collective.contract.stalls import Circles, alone
from collective.errors import CollectiveTimeoutError, MismatchError
from collective.testing import RankPool, run_ranks
from tests.support.mpi_launches import VENDORS, launch_of, needs

Run = Callable[..., list[Any]]
# By its name: ranks of MPI import this module, and need no PyTorch.
PAIRS = "tests.support.simulated_hosts:Pairs"

# -- ranks ----------------------------------------------------------------------------------------


def _crosswise(comm: Communicator) -> str:
    """Use two dups, the last rank in the other order; return what the error says."""
    first, second = comm.dup(), comm.dup()
    order = (first, second) if comm.rank < comm.size - 1 else (second, first)
    with pytest.raises(MismatchError) as caught:
        _all_reduce(order)
    return str(caught.value)


def _all_reduce(order: Sequence[Communicator]) -> None:
    for each in order:
        each.all_reduce(np.ones(3))


def _around(comm: Communicator) -> str:
    """Use groups of neighbours, each rank first that with the next one."""
    size, rank = comm.size, comm.rank
    pairs = [sorted((each, (each + 1) % size)) for each in range(size)]
    groups = {each: comm.group(pairs[each]) for each in range(size) if rank in pairs[each]}
    with pytest.raises(MismatchError) as caught:
        groups[rank].barrier()
    return str(caught.value)


CASES = [
    pytest.param(transport, function, marks=needs(transport) if transport in VENDORS else ())
    for transport in ("shm", "gloo", PAIRS, *VENDORS)
    for function in (_crosswise, _around)
    # Hierarchical's groups of one host and of several are of two transports, which do not let
    # each other know what they wait for.
    if (transport, function) != (PAIRS, _around)
]


@pytest.fixture(scope="module")
def run_on() -> Iterator[Callable[[str], Run]]:
    """Return what runs a function on three ranks of a transport, which stay for the next one."""
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
def test_ranks_that_wait_for_each_other_get_an_error(
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
    """Let the last rank give up its wait on purpose, and go on with what the others wait in."""
    first, second = comm.dup(), comm.dup()
    if comm.rank == comm.size - 1:
        with pytest.raises(CollectiveTimeoutError):
            second.barrier(timeout=2.5)
    x: list[float] = first.all_reduce(np.ones(1)).tolist()
    return x


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_wait_with_a_deadline_of_its_own_is_left_alone(
    run_on: Callable[[str], Run], transport: str
) -> None:
    assert run_on(transport)(_with_a_deadline) == [[3.0]] * 3


# -- who could make calls -------------------------------------------------------------------------


def _others(comm: Communicator) -> list[bool]:
    found = [alone()]
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    found.append(alone())
    over.set()
    thread.join()
    found.append(alone())
    signal.signal(signal.SIGUSR2, lambda *_: None)
    found.append(alone())
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    if comm.rank == 0:
        work = comm.recv(None, 1, async_op=True)
        found.append(alone())
        comm.send(np.ones(1), 1)
        work.wait()
    else:
        comm.recv(None, 0)
        comm.send(np.ones(1), 0)
        found.append(False)
    found.append(alone())
    return found


def test_a_rank_with_threads_handlers_or_calls_in_the_background_is_not_alone() -> None:
    for found in run_ranks(2, _others, backend="shm"):
        assert found == [True, False, True, False, False, True]


# -- circles --------------------------------------------------------------------------------------


class Ranks:
    """Ranks that make barriers of several communicators, and note now and then what they are in.

    Args:
        plans: for each rank the communicators that it uses, one after the other.
    """

    def __init__(self, plans: Sequence[Sequence[str]]) -> None:
        self.plans = plans
        self.at = [0] * len(plans)  # how many calls are over
        self.waits = [False] * len(plans)
        self.begun = [dict.fromkeys(sorted(set(plan)), 0) for plan in plans]
        self.beats = [0] * len(plans)
        self.notes: dict[int, Any] = {}

    def over(self, rank: int) -> bool:
        return self.at[rank] == len(self.plans[rank])

    def go_on(self, rank: int) -> None:
        """Begin the next call, or leave the one that all have come to."""
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
                "header": {"operation": "barrier", "dtype": None, "options": {}, "site": ""},
                "made": name,
                "beat": self.beats[rank],
                "found": None,
            }

    def stuck(self) -> bool:
        """Let all go on as far as they can; tell whether some are not through."""
        everybody = range(len(self.plans))
        for _ in range(2 * sum(map(len, self.plans))):
            for rank in everybody:
                self.go_on(rank)
        return not all(map(self.over, everybody))


def _plans(random_: random.Random, legal: bool) -> list[list[str]]:
    """Return what ranks do: in parts of one order of calls, or else in orders of their own."""
    size, names = random_.randint(2, 5), "ABCD"[: random_.randint(2, 4)]
    members = {name: random_.sample(range(size), random_.randint(2, size)) for name in names}
    calls = [random_.choice(names) for _ in range(12)]
    plans = [[name for name in calls if rank in members[name]] for rank in range(size)]
    if not legal:
        for plan in plans:
            random_.shuffle(plan)
    return plans


@pytest.mark.parametrize("seed", range(10))
def test_ranks_that_are_late_are_no_circle(seed: int) -> None:
    random_ = random.Random(seed)
    ranks, circles = Ranks(_plans(random_, legal=True)), Circles()
    everybody = range(len(ranks.plans))
    while not all(map(ranks.over, everybody)):
        random_.choice((ranks.go_on, ranks.note))(random_.choice(everybody))
        # As a reader finds them: some old, some new.
        assert circles.found(ranks.notes) == ([], "")


@pytest.mark.parametrize("seed", range(20))
def test_a_circle_is_found_where_nobody_can_go_on(seed: int) -> None:
    random_ = random.Random(seed)
    ranks, circles = Ranks(_plans(random_, legal=False)), Circles()
    everybody = range(len(ranks.plans))
    calls: list[list[Any]] = []
    for _ in range(1500):
        random_.choice((ranks.go_on, ranks.note))(random_.choice(everybody))
        calls, _ = circles.found(ranks.notes)
        if calls:
            break
    inside = [
        (rank, ranks.at[rank])
        for rank in everybody
        if ranks.waits[rank] and ranks.plans[rank][ranks.at[rank]] in [name for name, _ in calls]
    ]
    assert bool(inside) == ranks.stuck()
    # Whatever the others do, those in it do not get out.
    assert all(ranks.at[rank] == at for rank, at in inside)

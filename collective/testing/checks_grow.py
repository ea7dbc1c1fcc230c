"""Checks of growth: the right ranks are let in, and all ranks agree on them.

A rank that joins was a rank of the first generation and has left it. To the other ranks it is a
process like any other. As in the checks of losses, each rank contributes its own bit to a sum, so
the sum tells exactly which ranks took part.
"""

from __future__ import annotations

import time
from pathlib import Path

from collective import CollectiveError, CollectiveTimeoutError, Communicator, connect
from collective.generations.arrivals import Arrivals
from collective.inner import Backend, Capabilities, Deadline

from . import faults
from .checks import Case, RankFactory, able, check, on_each_rank
from .kinds import Kind, kind_of
from .survivors import (
    FAR_S,
    Survivor,
    await_files,
    gather,
    hold_generation,
    hold_refused,
    run_fresh,
    seen_of,
    survivors,
)

# How long a rank waits that no rank will let in.
_SOON_S = 0.05


_grows = able("grows", "does not let processes join")


#: The transport that connects a joining rank, and the kind of its arrays.
_Ours = tuple[str | type[Backend], str | Kind]


def _join(comm: Communicator, connection: _Ours, seconds: float) -> Communicator:
    """Leave, and join the other ranks again as a process that they do not know."""
    backend, kind = connection
    lineage, timeout = comm.inner.succession.lineage, comm.timeout
    assert lineage is not None
    comm.close()
    new = connect(
        lineage.root, backend, timeout=timeout, start_timeout=seconds,
        check=comm.inner.check, shrink_grace=lineage.grace, join=True,
    )  # fmt: skip
    array_kind = kind_of(kind)
    return new if array_kind is None else array_kind.communicator(new)


def _await_knocks(comm: Communicator, count: int) -> None:
    """Return when ``count`` ranks wait to join, on a communicator that some ranks have left.

    ``comm.membership.waiting()`` is a call of all ranks, so it cannot be used here.
    """
    assert comm.inner.succession.lineage is not None
    arrivals = Arrivals(comm.inner.succession.lineage.root.store, comm.backend)
    deadline = Deadline(FAR_S)
    while len(arrivals.waiting()) < count and not deadline.expired:
        time.sleep(0.001)


def _seen(comm: Communicator, first: int | None = None) -> tuple[int, Survivor]:
    """Return this rank's number, and the members that it sees.

    Args:
        first: the rank's first number, if it did not join. It is not taken from the grown
            communicator, which could be wrong.
    """
    number = comm.membership.origin[comm.rank] if first is None else first
    return number, seen_of(comm, number)


def _joiners(size: int) -> list[Case]:
    return [{"count": count} for count in range(min(3, size))]


@check(_joiners, needs=_grows)
def check_grow(factory: RankFactory, size: int, *, count: int) -> None:
    """Check that waiting ranks are the last of the next generation, without those who left."""
    results = run_fresh(factory, size, _grow, (factory.backend, factory.kind), count)
    members = [*range(size - count), *range(size, size + count)]
    outcomes = {number: seen for _, (number, seen) in results}
    assert len(outcomes) == size, f"some have the same number: {results}"
    hold_generation(outcomes, members, range(size - count, size), (1,))
    waited = [waiting for waiting, _ in results]
    assert waited == [0] * size, f"before anybody waited waiting() was {waited}"


def _grow(
    comm: Communicator, marks: str, connection: _Ours, count: int
) -> tuple[int, tuple[int, Survivor]]:
    waiting, first = comm.membership.waiting(), comm.rank
    gather(comm, marks)
    if first >= comm.size - count:
        with _join(comm, connection, FAR_S) as new:
            return waiting, _seen(new)
    _await_knocks(comm, count)
    with comm.grow() as new:
        return waiting, _seen(new, first)


def _moments() -> list[Case]:
    return [
        {"victim": victim, "when": when} for victim in (0, 1) for when in ("decision", "connect")
    ]


@check(lambda size: _moments() * (size == 3), at_least=3, needs=_grows)
def check_grow_when(factory: RankFactory, size: int, *, victim: int, when: str) -> None:
    """Check that a rank may die while the others decide whom to let in, or connect."""
    plan = [faults.kill(victim, in_shrink=when)]
    results = survivors(
        factory, size, (victim,), _grow, (factory.backend, factory.kind), 1, plan=plan
    )
    outcomes = {number: seen for _, (number, seen) in results.values()}
    members = [rank for rank in range(size - 1) if rank != victim] + [size]
    hold_generation(outcomes, members, (victim, size - 1), (1, 2, 3))


@check(at_least=3, needs=_grows)
def check_grow_after_a_loss(factory: RankFactory, size: int) -> None:
    """Check that if one rank shrinks after a loss, all do; a waiting rank joins at the next."""
    results = run_fresh(factory, size, _grow_late, (factory.backend, factory.kind))
    hold_generation(dict(last for _, last in results), [*range(size - 1), size], (), (2,))
    before = {rank: first for rank, (first, _) in enumerate(results[:-1])}
    hold_generation(before, range(size - 1), (size - 1,), (1,))


def _grow_late(
    comm: Communicator, marks: str, connection: _Ours
) -> tuple[Survivor | None, tuple[int, Survivor]]:
    number = comm.rank
    comm.membership.waiting()
    gather(comm, marks)
    if comm.rank == comm.size - 1:
        with _join(comm, connection, FAR_S) as new:
            return None, _seen(new)
    _await_knocks(comm, 1)
    comm = comm.grow() if comm.rank else comm.shrink()
    _, first = _seen(comm, number)
    while not comm.membership.waiting():
        pass
    with comm.grow() as new:
        return first, _seen(new, number)


@check(at_least=2, needs=_grows)
def check_grow_without_one_that_gave_up(factory: RankFactory, size: int) -> None:
    """Check that a rank that is not let in in time gets an error, and no rank waits for it."""
    *results, error = run_fresh(factory, size, _give_up, (factory.backend, factory.kind))
    assert isinstance(error, CollectiveTimeoutError), f"the rank that gave up got {error!r}"
    assert "grow()" in str(error), f"the error does not say that no rank called grow(): {error}"
    hold_generation(dict(enumerate(results)), range(size - 1), (size - 1,), (1,))


def _give_up(comm: Communicator, marks: str, connection: _Ours) -> Survivor | CollectiveError:
    first = comm.rank
    comm.membership.waiting()
    gather(comm, marks)
    if first == comm.size - 1:
        try:
            _join(comm, connection, _SOON_S).close()
        except CollectiveError as error:
            Path(marks, "gave-up").touch()
            return error
    await_files(Path(marks, "gave-up"))
    with comm.grow() as new:
        return _seen(new, first)[1]


def _stays(capabilities: Capabilities) -> str | None:
    return "lets processes join" if capabilities.grows else None


@on_each_rank([{"call": call} for call in ("grow", "waiting")], needs=_stays)
def check_grow_unsupported(comm: Communicator, call: str) -> None:
    """Check that a transport without growth refuses, names a remedy, and stays usable."""
    hold_refused(comm, call)

"""Checks of shrinking after a loss: the survivors go on, and all of them agree on the members.

In each check, a rank adds two to the power of its first number, so that a sum tells exactly which
ranks took part.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from collective import (
    CollectiveError,
    Communicator,
    CommunicatorAbortedError,
    CommunicatorClosedError,
    ExcludedError,
    PeerLostError,
)
from collective.inner import Capabilities, Deadline, platform

from . import faults
from .checks import Case, RankFactory, able, check, on_each_rank
from .heard import Trouble, hold, listen
from .survivors import (
    FAR_S,
    Survivor,
    await_files,
    gather,
    hold_generation,
    hold_refused,
    run_fresh,
    seen_of,
    sum_of,
    survivors,
)

# Seconds that the other ranks wait for a rank that is stopped: the grace in these checks.
_SILENT_S = 1.0


_shrinks = able("shrinks", "does not go on after a loss")


def _killable(capabilities: Capabilities) -> str | None:
    why = "threads cannot be killed in the middle, or stopped"
    return _shrinks(capabilities) or (why if capabilities.in_process else None)


def _losses(size: int) -> list[tuple[int, ...]]:
    """Return every non-empty proper subset of the ranks."""
    subsets = (itertools.combinations(range(size), count) for count in range(1, size))
    return [*itertools.chain.from_iterable(subsets)]


def _next_of(comm: Communicator, first: int) -> tuple[Communicator, Survivor]:
    new = comm.shrink()
    return new, seen_of(new, first)


def _go_on(comm: Communicator, first: int, **options: Any) -> Survivor:
    """Return what the rank sees in the next generation, and leave that generation."""
    with comm.shrink(**options) as new:
        return seen_of(new, first)


def _hold_survivors(
    outcomes: dict[int, Any], size: int, victims: Sequence[int], numbers: Sequence[int] = (1,)
) -> None:
    """Check that exactly the ranks other than ``victims`` form the next generation, in order."""
    left = [rank for rank in range(size) if rank not in victims]
    hold_generation(outcomes, left, victims, numbers)


# -- lost ranks ----------------------------------------------------------------------------


def _killed(size: int) -> list[Case]:
    return [{"victims": victims} for victims in _losses(size)]


@check(_killed, at_least=2, needs=_shrinks)
def check_shrink(factory: RankFactory, size: int, *, victims: tuple[int, ...]) -> None:
    """Check that whichever ranks die, the survivors go on with each other alone."""
    plan = [faults.kill(victim, at_call=1) for victim in victims]
    outcomes = survivors(factory, size, victims, _lose, "killed", plan=plan)
    _hold_survivors(outcomes, size, victims)


def _gone(size: int) -> list[Case]:
    return [{"victims": v, "how": how} for v in _losses(size) for how in ("raises", "leaves")]


@check(_gone, at_least=2, needs=_shrinks)
def check_shrink_left(
    factory: RankFactory, size: int, *, victims: tuple[int, ...], how: str
) -> None:
    """Check that if ranks raise or leave too early, the others go on as after a death."""
    outcomes = survivors(factory, size, victims, _lose, how, victims)
    _hold_survivors(outcomes, size, victims)


def _large(comm: Communicator) -> None:
    x = np.ones(1 << 21, np.float32)
    comm.all_reduce(x, out=x, op="max")


# The call that ranks make while others are lost, by the kind of loss. Without an entry the loss
# is in shrink() itself.
_MEANWHILE: dict[str, Callable[[Communicator], Any]] = {
    **dict.fromkeys(("killed", "raises", "leaves"), lambda comm: sum_of(comm, comm.rank)),
    "async": lambda comm: comm.all_reduce(np.ones(1000), async_op=True).wait(),
    "middle": _large,
}


def _lose(comm: Communicator, marks: str, how: str, victims: Sequence[int] = ()) -> Survivor | None:
    first = comm.rank
    gather(comm, marks)
    if first in victims and how == "raises":
        raise Trouble("out of luck")
    if first in victims and how == "leaves":
        comm.close()
        return None
    if how in _MEANWHILE:
        listen(partial(_MEANWHILE[how], comm))
    return _go_on(comm, first)


def _moments(size: int) -> list[Case]:
    alone = sorted({(0,), (size - 1,)})
    both = [(0, 1)] if size > 2 else []
    return [
        {"victims": victims, "when": when}
        for victims in (*alone, *both)
        for when in ("async", "decision", "connect")
    ]


@check(_moments, at_least=2, needs=_shrinks)
def check_shrink_when(
    factory: RankFactory, size: int, *, victims: tuple[int, ...], when: str
) -> None:
    """Check that a rank may die in a background call, in shrink(), or after the decision."""
    where = {"at_call": 1} if when == "async" else {"in_shrink": when}
    plan = [faults.kill(victim, **where) for victim in victims]
    outcomes = survivors(factory, size, victims, _lose, when, plan=plan)
    # If a rank dies after a decision to keep it, the ranks decide again.
    numbers = {"async": (1,), "decision": (1, 2, 3), "connect": (2, 3)}[when]
    _hold_survivors(outcomes, size, victims, numbers)


@check([{"victim": "first"}, {"victim": "last"}], at_least=2, needs=_killable)
def check_shrink_in_the_middle(factory: RankFactory, size: int, *, victim: str) -> None:
    """Check that a rank may die in the middle of a large operation."""
    lost = 0 if victim == "first" else size - 1
    plan = [faults.kill(lost, at_call=3, after=0.002)]
    outcomes = survivors(factory, size, [lost], _lose, "middle", plan=plan)
    _hold_survivors(outcomes, size, [lost])


@check(at_least=3, needs=_shrinks)
def check_shrink_twice(factory: RankFactory, size: int) -> None:
    """Check two losses of rank 0 in a row: ``origin`` has the numbers of generation 0."""
    outcomes = survivors(factory, size, (0, 1), _lose_twice)
    hold_generation(outcomes, range(2, size), (0,), (2,))


def _lose_twice(comm: Communicator, marks: str) -> Survivor | None:
    first = comm.rank
    for victim in range(2):
        gather(comm, marks, f"turn {victim}")
        if first == victim:
            comm.close()
            return None
        listen(comm.barrier)
        comm, seen = _next_of(comm, first)
    comm.close()
    return seen


# -- no lost rank, or only a lost rank that lives ------------------------------------------


@check(needs=_shrinks)
def check_shrink_of_nobody(factory: RankFactory, size: int) -> None:
    """Check that shrink() without a loss gives the same ranks in a new generation, repeatedly."""
    for turn, outcomes in enumerate(zip(*run_fresh(factory, size, _shrink_again), strict=True)):
        _hold_survivors(dict(enumerate(outcomes)), size, (), (turn + 1,))


def _shrink_again(comm: Communicator, marks: str) -> list[Survivor]:
    first, seen = comm.rank, []
    for turn in range(3):
        gather(comm, marks, f"turn {turn}")
        comm, survivor = _next_of(comm, first)
        seen.append(survivor)
    comm.close()
    return seen


def _each(size: int) -> list[Case]:
    return [{"victim": rank} for rank in sorted({0, size - 1})]


@check(_each, at_least=2, needs=_shrinks)
def check_shrink_exclude(factory: RankFactory, size: int, *, victim: int) -> None:
    """Check that a live rank that another rank excludes gets ExcludedError."""
    outcomes = dict(enumerate(run_fresh(factory, size, _exclude, victim)))
    excluded = outcomes.pop(victim)
    assert isinstance(excluded, ExcludedError), f"the excluded rank got {excluded!r}"
    _hold_survivors(outcomes, size, (victim,))


def _exclude(comm: Communicator, marks: str, victim: int) -> Survivor | CollectiveError:
    first = comm.rank
    gather(comm, marks)
    somebody = (victim + 1) % comm.size
    try:
        return _go_on(comm, first, exclude=[victim] if first == somebody else [])
    except ExcludedError as error:
        return error


def _deadlines(size: int) -> list[Case]:
    # These cases are the only ones that wait for the grace: once for each number of ranks.
    return [{"deadline": "long" if size == 2 else "short"}] if size <= 3 else []


@check(_deadlines, at_least=2, needs=_shrinks)
def check_shrink_without_one_that_is_late(
    factory: RankFactory, size: int, *, deadline: str
) -> None:
    """Check that a rank that is silent or stopped for longer than the grace is out for good.

    Its late calls harm no other rank. The other ranks go on, also if the deadline of a call is
    shorter than the grace.
    """
    outcomes = dict(
        enumerate(run_fresh(factory, size, _come_late, deadline, shrink_grace=_SILENT_S))
    )
    late = outcomes.pop(size - 1)
    assert [type(each) for each in late] == [ExcludedError] * 2, f"the late rank got {late}"
    _hold_survivors(outcomes, size, (size - 1,))


def _come_late(comm: Communicator, marks: str, deadline: str) -> Any:
    first, last = comm.rank, comm.size - 1
    Path(marks, f"pid-{first}").write_text(str(os.getpid()))
    gather(comm, marks)
    late = Path(marks, "late")
    if first == last:
        if not comm.capabilities.in_process:
            os.kill(os.getpid(), signal.SIGSTOP)
        await_files(*(Path(marks, f"gone-on-{rank}") for rank in range(last)))
        # Repeat the call: the other ranks' decision is final, so the answer must not change.
        errors = []
        for _ in range(2):
            try:
                comm.shrink()
            except CollectiveError as error:
                errors.append(error)
        late.touch()
        return errors
    pid = int(Path(marks, f"pid-{last}").read_text())
    if not comm.capabilities.in_process:
        _await_stopped(pid)
    usual = comm.timeout
    if deadline == "short":
        comm.timeout = _SILENT_S / 4
    new = comm.shrink()
    new.timeout = usual
    seen = seen_of(new, first)
    Path(marks, f"gone-on-{first}").touch()
    if first == 0 and not comm.capabilities.in_process:
        os.kill(pid, signal.SIGCONT)
    while not new.membership.agree(late.exists()):
        sum_of(new, first)
    seen = seen._replace(total=sum_of(new, first))
    new.close()
    return seen


def _await_stopped(pid: int) -> None:
    deadline = Deadline(FAR_S)
    while not deadline.expired:
        if _state(pid) == "T":
            return
        time.sleep(0.002)


def _state(pid: int) -> str:
    """Return the letter of a process's state."""
    try:
        status = platform.process_status(pid)
    except OSError:  # the system tells only ps
        command = ["ps", "-o", "state=", "-p", str(pid)]
        return subprocess.run(command, capture_output=True, text=True).stdout[:1]
    return status.state if status else ""


# -- errors on the other ranks, and the old communicator -----------------------------------


@check(at_least=2, needs=_shrinks)
def check_shrink_breaks_a_sound_one(factory: RankFactory, size: int) -> None:
    """Check that shrink() on one rank makes calls of the others raise: call shrink() too."""
    outcomes = run_fresh(factory, size, _shrink_soundly)
    for rank, (error, _) in enumerate(outcomes[1:], start=1):
        what = f"rank {rank}, waiting in a call"
        hold(error, CommunicatorAbortedError, what, "call shrink() too", rank=0)
    _hold_survivors({rank: each[1] for rank, each in enumerate(outcomes)}, size, ())


def _shrink_soundly(comm: Communicator, marks: str) -> Any:
    first, error = comm.rank, None
    gather(comm, marks)
    if first:
        error = listen(comm.barrier)
    return error, _go_on(comm, first)


@check(at_least=3, needs=_shrinks)
def check_shrink_below_the_floor(factory: RankFactory, size: int) -> None:
    """Check that with fewer ranks than min_ranks, all ranks raise PeerLostError."""
    outcomes = survivors(factory, size, (1,), _shrink_below)
    assert sorted(outcomes) == [rank for rank in range(size) if rank != 1]
    for rank, error in outcomes.items():
        assert isinstance(error, PeerLostError), f"rank {rank} got {error!r}"
        assert error.ranks == (1,), f"rank {rank}: .ranks is {error.ranks}"
        assert "min_ranks" in str(error), f"rank {rank}: {error}"


def _shrink_below(comm: Communicator, marks: str) -> CollectiveError | None:
    gather(comm, marks)
    if comm.rank == 1:
        comm.close()
        return None
    try:
        comm.shrink(min_ranks=comm.size)
    except CollectiveError as error:
        return error
    return None


@check(at_least=2, needs=_shrinks)
def check_shrink_closes_groups(factory: RankFactory, size: int) -> None:
    """Check that shrink() closes the old communicator and its groups; the new can make groups."""
    for rank, (closed, total) in enumerate(run_fresh(factory, size, _shrink_with_groups)):
        assert closed == [CommunicatorClosedError] * 3, f"rank {rank}: old ones raise {closed}"
        assert total == 2.0**size - 1, f"rank {rank}: the new group adds up to {total}"


def _shrink_with_groups(comm: Communicator, marks: str) -> tuple[list[type], float]:
    first = comm.rank
    child = comm.dup()
    grandchild = child.dup()
    gather(comm, marks)
    new = comm.shrink()
    closed = []
    for old in (comm, child, grandchild):
        try:
            old.barrier()
        except CollectiveError as error:
            closed.append(type(error))
    with new, new.dup() as group:
        return closed, sum_of(group, first)


@check(at_least=3, needs=_shrinks)
def check_shrink_a_group(factory: RankFactory, size: int) -> None:
    """Check that a group can be shrunk alone; its parent goes on if groups can break alone."""
    outcomes = run_fresh(factory, size, _shrink_group)
    for rank, (seen, total) in enumerate(outcomes):
        assert total in (None, 2.0**size - 1), f"rank {rank}: all ranks add up to {total}"
        if rank:
            expected = Survivor(
                rank - 1, size - 1, 1, tuple(range(size - 1)), frozenset(), 2.0**size - 2
            )
            assert seen == expected, f"rank {rank} says {seen} instead of {expected}"


def _shrink_group(comm: Communicator, marks: str) -> tuple[Survivor | None, float | None]:
    seen = None
    group = comm.group(range(1, comm.size)) if comm.rank else None
    gather(comm, marks)
    if group is not None:
        seen = _go_on(group, comm.rank)
    try:
        return seen, sum_of(comm, comm.rank)
    except CommunicatorAbortedError:  # the transport cannot break the group alone
        return seen, None


def _stays(capabilities: Capabilities) -> str | None:
    return "goes on after a loss" if capabilities.shrinks else None


@on_each_rank([{"call": call} for call in ("shrink", "agree")], needs=_stays)
def check_shrink_unsupported(comm: Communicator, call: str) -> None:
    """Check that a transport without shrinking refuses, names a remedy, and stays usable."""
    hold_refused(comm, call)


# -- agreement -----------------------------------------------------------------------------


@on_each_rank(fresh=True, needs=_shrinks)
def check_agree(comm: Communicator) -> None:
    """Check that agree() is true if all ranks pass true, equal on all ranks, and repeatable."""
    flags = [True, *(comm.rank != other for other in range(comm.size)), True]
    answers = [comm.membership.agree(flag) for flag in flags]
    expected = [True] + [False] * comm.size + [True]
    assert answers == expected, f"rank {comm.rank}: {answers} instead of {expected}"


@check(_each, at_least=2, needs=_shrinks)
def check_agree_after_a_loss(factory: RankFactory, size: int, *, victim: int) -> None:
    """Check that agree() works on a broken communicator, and does not wait for a lost rank."""
    outcomes = survivors(factory, size, (victim,), _agree_after_a_loss, victim)
    assert set(outcomes.values()) == {(True, size == 2)}, f"the survivors agree on {outcomes}"


def _agree_after_a_loss(comm: Communicator, marks: str, victim: int) -> tuple[bool, bool] | None:
    gather(comm, marks)
    if comm.rank == victim:
        comm.close()
        return None
    listen(comm.barrier)
    one = min(rank for rank in range(comm.size) if rank != victim)
    return comm.membership.agree(True), comm.membership.agree(comm.rank == one)

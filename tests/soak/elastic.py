"""Random kills of ranks whose job continues: is there a hang, a wrong sum, or anything left over?

Each job begins with several ranks and ends with one, which the seed decides. In each generation one
or two ranks die at a random moment: during calls, while the others shrink, or both. Each rank adds
two to the power of its number in ``comm.membership.origin``, so every sum identifies the ranks in
it.

With spares the job keeps its size while spares remain. After a loss as many spares are released as
ranks are missing, and they join. Ranks also die while they wait for spares, and while they grow.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pickle
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from collective.communicator import Communicator
from collective.contract.backend import Backend
from collective.errors import CollectiveError
from collective.generations.arrivals import Arrivals
from collective.start.connecting import connect_alone, joined_by
from collective.testing import RankPool, RanksFailedError
from collective.testing.ranks import GRACE_S, backend_class
from tests.support.simulated_hosts import Pairs

__all__ = ["Lives", "lives"]

SIZE = 4
# After _JOB_S a rank counts as hanging, and the failure shows its stack. _CALL_S limits one call.
_JOB_S, _CALL_S = 180.0, 45.0
# Time limit for the end of threads that are ending.
_SETTLE_S = 5.0
_SHARED_MEMORY = Path("/dev/shm")
# Probability that a rank dies while its generation grows.
_LOST_WHILE_GROWING = 0.4


@dataclass
class Lives:
    """Result of :func:`lives`.

    Attributes:
        kills: number of killed ranks, by the phase in which they were killed.
        generations: number of generations that began.
        calls: number of sums that were checked.
        problems: a paragraph for each job that failed.
        longest_s: longest time from an error to the first sum of the next generation, in seconds.
        joined: number of processes that joined.
    """

    kills: Counter[str] = field(default_factory=Counter)
    joined: int = 0
    generations: int = 0
    calls: int = 0
    problems: list[str] = field(default_factory=list)
    longest_s: float = 0.0


@dataclass
class _Life:
    """Result of the rank that survives a job."""

    kills: Counter[str]
    generations: int
    calls: int
    longest_s: float
    open: list[int]
    threads: list[int]  # beyond one of each name

    def count(self, comm: Communicator) -> None:
        """Count the ranks that a generation has lost."""
        if comm.membership.lost:
            self.kills[f"{len(comm.membership.lost)} at once"] += len(comm.membership.lost)


@dataclass(frozen=True)
class _Plan:
    """Parameters of one job.

    Attributes:
        transport: registered name or class of the transport.
        seed: seed of the random choices.
        spares: number of processes that can join.
        marks: directory of the files by which ranks and spares signal each other.
    """

    transport: str | type[Backend]
    seed: int
    spares: int
    marks: Path


def lives(
    transports: Sequence[str], kills: int, seed: int, seconds: float, spares: int = 0
) -> Lives:
    """Kill at least ``kills`` ranks of jobs over the transports in turn.

    Args:
        seed: seed of the random choices.
        seconds: time after which no further job starts.
        spares: number of each job's spare processes, which replace lost ranks.
    """
    result, since, turn = Lives(), time.monotonic(), 0
    while result.kills.total() < kills and time.monotonic() - since < seconds:
        name = transports[turn % len(transports)]
        before = _shared_memory()
        try:
            _job(name, seed + turn, spares, result)
        except AssertionError as error:
            result.problems.append(f"{name}, seed {seed + turn}: {error}")
            result.kills["a job that failed"] += SIZE - 1
        if left := _shared_memory() - before:
            result.problems.append(f"{name}, seed {seed + turn}: {sorted(left)} in /dev/shm")
        turn += 1
    return result


def _shared_memory() -> set[str]:
    """Return this package's names in /dev/shm; other programs may be running MPI there."""
    return {name for name in os.listdir(_SHARED_MEMORY) if "collective" in name}


def _job(transport: str, seed: int, spares: int, result: Lives) -> None:
    backend = Pairs if transport == "hierarchical" else transport
    with contextlib.ExitStack() as stack:
        marks = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        plan = _Plan(backend, seed, spares, marks)
        ranks = stack.enter_context(RankPool(SIZE, backend, timeout=_JOB_S))
        others = stack.enter_context(ThreadPoolExecutor(1)).submit(_outcomes_of_spares, plan)
        stack.callback(Path(marks, "over").touch)
        outcomes = _outcomes(ranks, _begin, plan)
        Path(marks, "over").touch()
        outcomes += others.result()
    ended = [outcome for outcome in outcomes if isinstance(outcome, _Life)]
    killed = [outcome for outcome in outcomes if "signal 9" in str(outcome)]
    assert (len(ended), len(killed)) == (1, SIZE - 1 + spares), "\n".join(map(str, outcomes))
    (last,) = ended
    result.kills.update(last.kills)
    if unseen := len(killed) - last.kills.total():
        result.kills["as soon as they had joined"] += unseen
    result.generations += last.generations
    result.joined += spares
    result.calls += last.calls
    result.longest_s = max(result.longest_s, last.longest_s)
    for what, counts in (("descriptors", last.open), ("threads", last.threads)):
        assert counts[-1] <= max(counts[:2]), f"{what} from generation to generation: {counts}"


def _outcomes_of_spares(plan: _Plan) -> list[Any]:
    if not plan.spares:
        return []
    with RankPool(plan.spares, "shm", timeout=_JOB_S) as pool:
        return _outcomes(pool, _join, plan)


def _outcomes(pool: RankPool, function: Callable[..., Any], plan: _Plan) -> list[Any]:
    """Return the result or the error of each rank."""
    try:
        return pool.run(function, plan, call_timeout=_CALL_S)
    except RanksFailedError as failure:
        return [*failure.results.values(), *failure.errors.values()]


# -- a rank ----------------------------------------------------------------------------------


def _begin(comm: Communicator, plan: _Plan) -> _Life:
    """Publish the world for spares, and run as one of the first ranks."""
    comm.barrier()  # otherwise a rank could die while another is still in init()
    if comm.rank == 0:
        assert comm.inner.succession.lineage is not None
        Path(plan.marks, "new").write_bytes(pickle.dumps(comm.inner.succession.lineage.root))
        Path(plan.marks, "new").rename(Path(plan.marks, "world"))
    return _live(comm, plan, comm.rank)


def _join(spares: Communicator, plan: _Plan) -> _Life | str:
    """Wait for the release of this spare, join, and run as one of the ranks."""
    mark = Path(plan.marks, f"spare-{spares.rank}")
    spares.close()
    while not mark.exists():
        if Path(plan.marks, "over").exists():
            return "not needed"
        time.sleep(0.002)
    world = pickle.loads(Path(plan.marks, "world").read_bytes())
    find = functools.partial(joined_by, backend_class(plan.transport))
    with connect_alone(world, find, timeout=_CALL_S, shrink_grace=GRACE_S) as alone:
        comm = alone.grow(timeout=_CALL_S)
    return _live(comm, plan, comm.membership.origin[comm.rank])


def _live(comm: Communicator, plan: _Plan, number: int) -> _Life:
    """Call, lose ranks, shrink and grow until this rank is killed or alone.

    Args:
        number: this rank's original number, which never changes.
    """
    life = _Life(Counter(), 0, 0, 0.0, [], [])
    since = time.monotonic()
    while True:
        gc.collect()  # an error keeps its frames, and their open files, alive in a cycle
        life.threads.append(_threads_too_many())
        life.open.append(len(os.listdir("/proc/self/fd")))
        life.generations += 1
        # All ranks of this generation draw the same numbers.
        dice = random.Random(f"{plan.seed} {comm.membership.generation}")
        mortal = [rank for rank in comm.membership.origin if rank != plan.seed % SIZE]
        dying = dice.sample(mortal, min(dice.choice((1, 1, 2)), len(mortal)))
        within = {rank: dice.choice(("calls", "shrink")) for rank in dying}
        within.update(dict.fromkeys(dying[:1], "calls"))  # without a loss no rank would shrink
        lost_while_growing = dice.random() < _LOST_WHILE_GROWING
        spread = dice.random() * 0.01
        try:
            awaited = _let_go(comm, plan)
            if awaited and lost_while_growing and within.get(number) == "calls":
                _die_after(spread + random.random() * 0.1)
            if awaited:
                while comm.membership.waiting() < awaited:
                    time.sleep(0.005)
                comm = comm.grow(timeout=_CALL_S)
                life.count(comm)
                continue
        except CollectiveError:
            within.clear()  # this generation has already had its loss
        else:
            if comm.size == 1:
                comm.close()
                return life
            if within.get(number) == "calls":
                _die_after(spread + random.random() * 0.01)
            life.calls += _call(comm, number, life, since)
        since = time.monotonic()
        if within.get(number) == "shrink":
            _die_after(random.random() * 0.01)
        comm = comm.shrink(timeout=_CALL_S)
        life.count(comm)


def _let_go(comm: Communicator, plan: _Plan) -> int:
    """Release as many spares as ranks are missing; return on all ranks how many to wait for."""
    outside = 0
    if comm.rank == 0 and plan.spares:
        assert comm.inner.succession.lineage is not None
        gone = len(list(plan.marks.glob("spare-*")))
        outside = gone - len(
            Arrivals(comm.inner.succession.lineage.root.store, comm.backend).admitted()
        )
        for nth in range(gone, min(plan.spares, gone + SIZE - comm.size - outside)):
            Path(plan.marks, f"spare-{nth}").touch()
            outside += 1
    awaited = int(comm.all_reduce(np.array([outside]))[0])
    # A spare that was admitted by a decision that failed waits once more.
    return max(awaited, comm.membership.waiting()) if plan.spares else 0


def _threads_too_many() -> int:
    """Return the number of threads beyond one of each name, after ending threads have ended.

    Rank 0 of a generation has a hub, whose thread ends after the last rank has left.
    """
    end = time.monotonic() + _SETTLE_S
    while True:
        names = [thread.name for thread in threading.enumerate()]
        if len(names) == len(set(names)) or time.monotonic() > end:
            return len(names) - len(set(names))
        time.sleep(0.01)


def _die_after(seconds: float) -> None:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def _call(comm: Communicator, number: int, life: _Life, since: float) -> int:
    """Make calls until a rank of this communicator is lost; return the number of calls."""
    mine, total = np.full(1000, 2.0**number), sum(2.0**rank for rank in comm.membership.origin)
    calls = 0
    while True:
        try:
            result = comm.all_reduce(mine)
        except CollectiveError:
            return calls
        if not calls:
            life.longest_s = max(life.longest_s, time.monotonic() - since)
        calls += 1
        assert (result == total).all(), f"{result[0]} instead of {total} in {comm}"

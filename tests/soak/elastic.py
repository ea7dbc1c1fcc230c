"""Random kills of ranks that go on without: is there a hang, a wrong sum, or anything left?

Each job begins with some ranks and ends with one, which the seed says. In each generation one or
two are to die at a random moment: while they call, or while the others shrink, or both. Each adds
two to the power of its first number, so that every sum tells who was in it.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from collective.communicator import Communicator
from collective.errors import CollectiveError
from collective.testing import RankPool, RanksFailedError
from tests.pretended import Pairs

__all__ = ["Lives", "lives"]

SIZE = 4
# A rank that hangs is shown with its stack, after that.
_JOB_S = 90.0
# How long what is ending may take to.
_SETTLE_S = 5.0
_SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Lives:
    """What came of it.

    Attributes:
        kills: how many ranks were killed, by what they were killed in.
        generations: how many began.
        calls: how many sums were held.
        problems: a paragraph a job that did not end well.
        longest_s: the longest time from an error to the first sum of the next generation.
    """

    kills: Counter[str] = field(default_factory=Counter)
    generations: int = 0
    calls: int = 0
    problems: list[str] = field(default_factory=list)
    longest_s: float = 0.0


@dataclass
class _Life:
    """What a rank that was left to the end tells."""

    kills: Counter[str]
    generations: int
    calls: int
    longest_s: float
    open: list[int]
    threads: list[int]  # beyond one of each name


def lives(transports: Sequence[str], kills: int, seed: int, seconds: float) -> Lives:
    """Kill ``kills`` ranks, or some more, of jobs over the transports in turn.

    Args:
        seed: of what is random.
        seconds: after which it ends early.
    """
    found, since, turn = Lives(), time.monotonic(), 0
    while found.kills.total() < kills and time.monotonic() - since < seconds:
        name = transports[turn % len(transports)]
        before = _shared_memory()
        try:
            _job(name, seed + turn, found)
        except AssertionError as error:
            found.problems.append(f"{name}, seed {seed + turn}: {error}")
            found.kills["a job that failed"] += SIZE - 1
        if left := _shared_memory() - before:
            found.problems.append(f"{name}, seed {seed + turn}: {sorted(left)} in /dev/shm")
        turn += 1
    return found


def _shared_memory() -> set[str]:
    """Return what there is of ours: others of this machine may be running MPI."""
    return {name for name in os.listdir(_SHARED_MEMORY) if "collective" in name}


def _job(transport: str, seed: int, found: Lives) -> None:
    backend = Pairs if transport == "hierarchical" else transport
    with RankPool(SIZE, backend, timeout=_JOB_S) as pool:
        try:
            pool.run(_live, seed)
        except RanksFailedError as failure:
            failed = failure
        else:
            raise AssertionError("nobody was killed")
    ended = [each for each in failed.results.values() if isinstance(each, _Life)]
    killed = [error for error in failed.errors.values() if "signal 9" in str(error)]
    assert (len(ended), len(killed)) == (1, SIZE - 1), failed
    (last,) = ended
    found.kills.update(last.kills)
    found.generations += last.generations
    found.calls += last.calls
    found.longest_s = max(found.longest_s, last.longest_s)
    for what, counts in (("descriptors", last.open), ("threads", last.threads)):
        assert counts[-1] <= max(counts[:2]), f"{what} from generation to generation: {counts}"


def _live(comm: Communicator, seed: int) -> _Life:
    first = comm.rank
    life = _Life(Counter(), 0, 0, 0.0, [], [])
    since = time.monotonic()
    comm.barrier()  # or somebody would die in another's init()
    while True:
        gc.collect()  # an error holds frames, and they what they had open, in a circle
        life.threads.append(_threads_too_many())
        life.open.append(len(os.listdir("/proc/self/fd")))
        life.generations += 1
        if comm.size == 1:
            comm.close()
            return life
        # The same on all ranks of this generation.
        dice = random.Random(f"{seed} {comm.generation}")
        mortal = [rank for rank in comm.origin if rank != seed % SIZE]
        dying = dice.sample(mortal, min(dice.choice((1, 1, 2)), len(mortal)))
        within = {rank: dice.choice(("calls", "shrink")) for rank in dying}
        within[dying[0]] = "calls"  # or nobody would shrink
        if within.get(first) == "calls":
            _die_after(dice.random() * 0.01 + random.random() * 0.01)
        life.calls += _call(comm, first, life, since)
        since = time.monotonic()
        if within.get(first) == "shrink":
            _die_after(random.random() * 0.01)
        before = comm.size
        comm = comm.shrink(timeout=_JOB_S / 2)
        life.kills[f"{before - comm.size} at once"] += before - comm.size


def _threads_too_many() -> int:
    """Return how many threads there are beyond one of each name, when those are over that end.

    Rank 0 of a generation has a hub, whose thread ends once it has heard of the last that left.
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


def _call(comm: Communicator, first: int, life: _Life, since: float) -> int:
    """Make calls until one of this communicator's ranks is lost; return how many."""
    mine, total = np.full(1000, 2.0**first), sum(2.0**rank for rank in comm.origin)
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

"""What a rank hears of a fault, and what its process holds before and after it."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from collective.communicator import Communicator

__all__ = [
    "Heard",
    "Held",
    "Program",
    "Survived",
    "heard_in",
    "heard_of",
    "held",
    "raised",
    "survive",
]

# How long a rank may take to let go of what it does not need any more.
_SETTLED_S = 5.0


class Heard(NamedTuple):
    """What one rank heard of a fault.

    Attributes:
        error: the name of the class of what the call raised; "" if it returned what it should,
            "wrong" if it returned anything else.
        ranks: whom the error names.
        seconds: how long the call took.
        later: "usable" if a later call gave what it should, or the name of what that raised.
        text: the errors, for whoever has to find out why a test fails.
    """

    error: str
    ranks: tuple[int, ...]
    seconds: float
    later: str
    text: str


class Held(NamedTuple):
    """What a process holds.

    Attributes:
        descriptors: where they lead.
        threads: their names in the kernel.
        segments: files below /dev/shm that are mapped.
    """

    descriptors: list[str]
    threads: list[str]
    segments: list[str]

    def more_than(self, other: Held) -> bool:
        """Return whether there is more of anything than in ``other``."""
        return any(len(mine) > len(theirs) for mine, theirs in zip(self, other))


class Survived(NamedTuple):
    """One rank's part in a fault that left its process alive.

    Attributes:
        heard: what it heard.
        before, after: what its process held, the communicator of the fault not yet made, and
            closed again.
    """

    heard: Heard
    before: Held
    after: Held


#: What the ranks of a fault do.
Program = Callable[[Communicator], Heard]


def survive(comm: Communicator, programs: dict[str, Program]) -> dict[str, Survived]:
    """Run one program after the other, each on a communicator of its own."""
    found = {}
    for name, program in programs.items():
        before = held()
        group = comm.dup()
        heard = program(group)
        group.close()
        del group
        comm.barrier()
        found[name] = Survived(heard, before, _settled(comm, before))
    return found


def _settled(comm: Communicator, before: Held) -> Held:
    """Return what this process holds, once that is no more than ``before`` on any rank."""
    end = time.monotonic() + _SETTLED_S
    while True:
        now = held()
        if now.more_than(before):
            gc.collect()  # tracebacks refer to frames that refer to them
            now = held()
        waits = now.more_than(before) and time.monotonic() < end
        # What the others still hold may be held here for their sake.
        if not comm.all_reduce(np.array([int(waits)]), op="max")[0]:
            return now
        time.sleep(0.01)


def held(_: Communicator | None = None) -> Held:
    """Return what this process holds."""
    descriptors = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{entry}")
            # Ranks that are threads look at the same time, which opens what is below.
            if not name.startswith("/proc/"):
                descriptors.append(name)
    threads = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            threads.append((task / "comm").read_text().strip())
    maps = Path("/proc/self/maps").read_text().splitlines()
    segments = {line.split(maxsplit=5)[5] for line in maps if " /dev/shm/" in line}
    return Held(sorted(descriptors), sorted(threads), sorted(segments))


def raised(call: Callable[[], object]) -> BaseException | None:
    """Return what ``call`` raises."""
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:  # a fault may raise anything
        return error
    return None


def _later(comm: Communicator) -> tuple[str, str]:
    """Return "usable" or the name of an error, and the error."""
    found: list[Any] = []
    error = raised(lambda: found.append(comm.all_reduce(np.arange(3) + comm.rank)))
    if error is not None:
        return type(error).__name__, repr(error)
    right = np.arange(3) * comm.size + sum(range(comm.size))
    return ("usable" if np.array_equal(found[0], right) else "wrong"), str(found)


def heard_in(comm: Communicator, call: Callable[[], object], *, again: bool = False) -> Heard:
    """Make ``call``, ``again`` and again until it raises, and then another."""
    while True:
        since = time.monotonic()
        error = raised(call)
        seconds = time.monotonic() - since
        if error is not None or not again:
            break
    return heard_of(comm, error, seconds)


def heard_of(comm: Communicator, error: BaseException | None, seconds: float) -> Heard:
    """Return what this rank heard that has got ``error``, after another call."""
    ranks = getattr(error, "ranks", None) or tuple(
        rank for rank in [getattr(error, "rank", None)] if rank is not None
    )
    name = "" if error is None else type(error).__name__
    if isinstance(error, AssertionError):
        name = "wrong"
    elif type(error) is not MemoryError and isinstance(error, MemoryError):
        # NumPy's own subclass of it is private.
        name = "MemoryError" if name.startswith("_") else name
    later, text = _later(comm)
    return Heard(name, ranks, seconds, later, f"{error!r}; later: {text}")

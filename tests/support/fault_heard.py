"""Errors that a rank gets from a fault, and resources of its process before and after the fault.

Use :func:`survive` for faults that leave processes alive, and :func:`heard_in` for a single call.
"""

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

# Seconds that a rank may take to release resources that it does not need any more.
_SETTLED_S = 5.0


class Heard(NamedTuple):
    """Effect of a fault on the calls of one rank.

    Attributes:
        error: class name of the exception of the call; "" for a right result, "wrong" for a wrong
            result.
        ranks: ranks that the error names.
        seconds: duration of the call.
        later: "usable" if a later call gave a right result, "wrong" for a wrong result, otherwise
            the class name of its exception.
        text: the errors, for the report of a failed test.
    """

    error: str
    ranks: tuple[int, ...]
    seconds: float
    later: str
    text: str


class Held(NamedTuple):
    """Resources of a process.

    Attributes:
        descriptors: targets of its file descriptors.
        threads: names of its threads in the kernel.
        segments: files below /dev/shm that it has mapped.
    """

    descriptors: list[str]
    threads: list[str]
    segments: list[str]

    def more_than(self, other: Held) -> bool:
        """Return whether there are more of some resource than in ``other``."""
        return any(len(mine) > len(theirs) for mine, theirs in zip(self, other))


class Survived(NamedTuple):
    """One rank's part in a fault that left its process alive.

    Attributes:
        heard: effect on the rank's calls.
        before, after: resources before the fault's communicator was made, and after it was closed.
    """

    heard: Heard
    before: Held
    after: Held


#: The part of each rank in a fault.
Program = Callable[[Communicator], Heard]


def survive(comm: Communicator, programs: dict[str, Program]) -> dict[str, Survived]:
    """Run one program after the other, each on a new communicator."""
    outcomes = {}
    for name, program in programs.items():
        before = held()
        group = comm.dup()
        effect = program(group)
        group.close()
        del group
        comm.barrier()
        outcomes[name] = Survived(effect, before, _settled(comm, before))
    return outcomes


def _settled(comm: Communicator, before: Held) -> Held:
    """Return the resources of this process, once no rank has more than ``before``."""
    end = time.monotonic() + _SETTLED_S
    while True:
        resources = held()
        if resources.more_than(before):
            gc.collect()  # Tracebacks and frames form cycles.
            resources = held()
        waits = resources.more_than(before) and time.monotonic() < end
        # This rank may hold resources as long as other ranks hold theirs.
        if not comm.all_reduce(np.array([int(waits)]), op="max")[0]:
            return resources
        time.sleep(0.01)


def held(_: Communicator | None = None) -> Held:
    """Return the resources of this process."""
    descriptors = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{entry}")
            # Other thread ranks read /proc at the same time, which opens descriptors there.
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
    """Return the exception of ``call``, or None."""
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:  # a fault may raise anything
        return error
    return None


def _later(comm: Communicator) -> tuple[str, str]:
    """Make another call; return "usable", "wrong" or an error's name, and the result or error."""
    results: list[Any] = []
    error = raised(lambda: results.append(comm.all_reduce(np.arange(3) + comm.rank)))
    if error is not None:
        return type(error).__name__, repr(error)
    right = np.arange(3) * comm.size + sum(range(comm.size))
    return ("usable" if np.array_equal(results[0], right) else "wrong"), str(results)


def heard_in(comm: Communicator, call: Callable[[], object], *, again: bool = False) -> Heard:
    """Make ``call`` once, or with ``again`` until it raises; then make another call."""
    while True:
        since = time.monotonic()
        error = raised(call)
        seconds = time.monotonic() - since
        if error is not None or not again:
            break
    return heard_of(comm, error, seconds)


def heard_of(comm: Communicator, error: BaseException | None, seconds: float) -> Heard:
    """Make another call; return the effect of a fault whose call raised ``error``."""
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

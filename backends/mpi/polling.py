"""Waiting for an MPI request without handing the process over to MPI."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from collective.request import in_thread

from .library import leave_unfinished, waiting

if TYPE_CHECKING:
    from collective.backends.peers.channel import Wait

__all__ = ["POLLS", "finish", "settle", "spin"]

#: Polls before the core is given away: a peer that is on its way comes within microseconds.
POLLS = range(50)
# MPI moves data only inside its calls, and a poll moves a part of a long message: pauses
# have to stay short while one is under way. (A sleep of 50 µs takes about 100.)
_TURNS = 2000
_NAP_S = 50e-6


def finish(test: Callable[[], bool], wait: Wait, moving: bool = True) -> None:
    """Poll until ``test()`` is true.

    Args:
        test: asks MPI.
        wait: raises what is to be raised meanwhile: a lost peer, a deadline.
        moving: whether data may be under way. Otherwise only somebody's arrival is awaited,
            which may take long, and pauses grow.
    """
    turns = 0
    with waiting() as pause_for_good:
        # MPI is not finalised while a thread says that it polls. Here it hears that MPI is to be,
        # and stays for good instead of calling it again.
        pause_for_good()
        while not test():
            pause_for_good()
            turns += 1
            # Who awaits an arrival may nap ever longer: nothing moves before.
            if not moving or turns < _TURNS:
                wait.turn()
            else:
                wait.check()
                time.sleep(_NAP_S)


def spin(test: Callable[[], bool]) -> bool:
    """Poll for some microseconds; return whether ``test()`` came true.

    Not in the background: MPI may be finalised before a thread there has said that it polls.
    """
    if in_thread.site is None:
        for _ in POLLS:
            if test():
                return True
    return False


def settle(requests: list[Any], make_wait: Callable[[], Wait], moving: bool = True) -> None:
    """Wait for all of ``requests``.

    Whatever is raised, MPI may still write to the memory of those that are not over: they
    are kept with it.
    """
    try:
        for request in requests:
            if not spin(request.Test):
                finish(request.Test, make_wait(), moving)
    except BaseException:
        for request in requests:
            leave_unfinished(request)
        raise

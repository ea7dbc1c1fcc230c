"""Waits for MPI requests by polling, without a blocking call of MPI."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from collective.request import in_thread

from .library import leave_unfinished, waiting

if TYPE_CHECKING:
    from collective.backends.peers.wait import Wait

#: Polls before the core is yielded: a peer that is about to come does so within microseconds.
POLLS = range(50)
# MPI moves data only inside its calls, and a poll moves a part of a long message. So pauses must
# stay short while a message is in flight. (A sleep of 50 µs takes about 100 µs.)
_TURNS = 2000
_NAP_S = 50e-6


def finish(test: Callable[[], bool], wait: Wait, moving: bool = True) -> None:
    """Poll until ``test()`` is true.

    Args:
        test: function that asks MPI.
        wait: wait that raises errors meanwhile, such as a lost peer or an expired deadline.
        moving: whether data may be in flight. Otherwise the call only awaits the arrival of a peer.
            An arrival may take long, so pauses grow.
    """
    turns = 0
    with waiting() as pause_for_good:
        # MPI is not finalised while a thread is registered as polling. If MPI is about to be
        # finalised, pause_for_good() blocks this thread for good, so it does not call MPI again.
        pause_for_good()
        while not test():
            pause_for_good()
            turns += 1
            # While the call awaits an arrival, pauses may grow: no data moves before the arrival.
            if not moving or turns < _TURNS:
                wait.turn()
            else:
                wait.check()
                time.sleep(_NAP_S)


def spin(test: Callable[[], bool]) -> bool:
    """Poll for some microseconds; return whether ``test()`` came true.

    In the background this polls nothing: MPI may be finalised before such a thread has registered
    as polling.
    """
    if in_thread.site is None:
        for _ in POLLS:
            if test():
                return True
    return False


def settle(requests: list[Any], make_wait: Callable[[], Wait], moving: bool = True) -> None:
    """Wait for all of ``requests``.

    After an exception MPI may still write to the memory of requests that are not over. So these
    requests and their memory are kept alive.
    """
    try:
        for request in requests:
            if not spin(request.Test):
                finish(request.Test, make_wait(), moving)
    except BaseException:
        for request in requests:
            leave_unfinished(request)
        raise

"""Start the ranks, and all of them again when too many have failed."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable

from collective.deadline import Deadline

from .supervisor import Supervisor

__all__ = ["pause_after", "run_attempts", "wait"]

# An attempt that fails sooner has probably failed of what the next will fail of, too.
_QUICK_S = 10.0
# Before the restart after the first such attempt; after each further one it is twice as long.
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


def run_attempts(
    attempt: Callable[[int, int], Supervisor], size: int, restarts: int, control: int
) -> int:
    """Run attempts until one does not fail, and return its exit code, or that of the last.

    Args:
        attempt: makes one, given its number from 0 and ``control``.
        size: how many ranks each starts.
        restarts: how many there may be after the first.
        control: as :class:`Supervisor` takes it.
    """
    quick = 0
    for number in range(restarts + 1):
        started = time.monotonic()
        supervisor = attempt(number, control)
        code = supervisor.run()
        if number == restarts or not supervisor.failed:
            break
        quick = quick + 1 if time.monotonic() - started < _QUICK_S else 0
        pause = pause_after(quick)
        delay = f" in {pause:g} s" if pause else ""
        print(
            f"collective run: all {size} ranks start again{delay} (restart {number + 1} of "
            f"{restarts})",
            file=sys.stderr,
            flush=True,
        )
        ending = wait(control, Deadline(pause))
        if ending is not None:
            if ending == signal.SIGINT:
                print(
                    f"collective run: interrupted before restart {number + 1} of {restarts}",
                    file=sys.stderr,
                    flush=True,
                )
            return 128 + ending
    return code


def pause_after(quick: int) -> float:
    """Return how many seconds to wait after ``quick`` attempts in a row that failed at once."""
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (quick - 1)) if quick else 0.0


def wait(control: int, deadline: Deadline) -> int | None:
    """Wait, and return the number of a signal that ends the launch meanwhile, or None.

    While the launcher is suspended nothing is started: the wait is over when it goes on.
    """
    suspended = False
    ready = select.poll()
    ready.register(control, select.POLLIN)
    while suspended or ready.poll(deadline.left() * 1000):
        numbers = os.read(control, 64)
        if not numbers:  # the launcher is gone
            return int(signal.SIGKILL)
        for number in numbers:
            if number not in (signal.SIGTSTP, signal.SIGCONT):
                return number
            suspended = number == signal.SIGTSTP
    return None

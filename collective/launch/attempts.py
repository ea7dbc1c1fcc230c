"""Attempts of a run: start the ranks, and start all of them again after too many failures."""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from collective.deadline import Deadline

from .supervisor import Supervisor

__all__ = ["pause_after", "run_attempts", "wait"]

# If an attempt fails sooner than this, the next one will probably fail for the same reason.
_QUICK_S = 10.0
# Pause before the restart after the first such attempt. It doubles after each further one.
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
# Seconds between two calls of `beat` in a pause.
_BEAT_S = 1.0


def run_attempts(
    attempt: Callable[[int, int], AbstractContextManager[Supervisor]],
    size: int,
    restarts: int,
    control: int,
    beat: Callable[[], None] | None = None,
) -> int:
    """Run attempts until one succeeds or restarts run out; return the exit code of the last one.

    Args:
        attempt: function whose context has the supervisor of an attempt, and what the attempt
            needs until its end. Its arguments are the attempt's number, from 0, and ``control``.
        size: number of ranks that each attempt starts.
        restarts: how many attempts may follow the first one.
        control: as in :class:`Supervisor`.
        beat: function to call again and again between two attempts, or None.
    """
    quick = 0
    for number in range(restarts + 1):
        started = time.monotonic()
        with attempt(number, control) as supervisor:
            code = supervisor.run()
            failed = supervisor.failed  # asks the store, which ends with the attempt
        if number == restarts or not failed:
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
        ending = wait(control, Deadline(pause), beat)
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
    """Return the pause in seconds after ``quick`` consecutive attempts that failed quickly."""
    return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (quick - 1)) if quick else 0.0


def wait(control: int, deadline: Deadline, beat: Callable[[], None] | None = None) -> int | None:
    """Wait; return the number of a signal that ends the launch in the meantime, or None.

    While the launcher is suspended, no ranks may start. So the wait lasts at least until the
    launcher continues.
    """
    suspended = False
    ready = select.poll()
    ready.register(control, select.POLLIN)
    while suspended or not deadline.expired or ready.poll(0):
        if beat is not None:
            beat()
        longest = math.inf if beat is None else _BEAT_S
        left = longest if suspended else min(longest, deadline.left())
        if not ready.poll(None if left == math.inf else left * 1000):
            continue
        numbers = os.read(control, 64)
        if not numbers:  # end of file: the launcher has ended
            return int(signal.SIGKILL)
        for number in numbers:
            if number not in (signal.SIGTSTP, signal.SIGCONT):
                return number
            suspended = number == signal.SIGTSTP
    return None

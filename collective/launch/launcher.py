"""The launcher: a process that waits, and its child, which runs attempts as their supervisor.

No rank may stay behind, whichever process is killed. SIGKILL lets a process run no code, so another
one has to clean up. The two watch each other:

* If the launcher is killed, the supervisor sees the end of a pipe and ends the ranks. It has its
  own session, so that a signal to the launcher's process group or terminal does not end it, too.
* If the supervisor is killed, the kernel kills the ranks, whose parent it was. The launcher is a
  subreaper, so it becomes the parent of what the ranks have started, and ends that.

While the launcher is suspended, the supervisor still answers the agents of other hosts, which would
otherwise give it up. Each of those agents is a pair of processes for the same reasons.

Attempts of a run follow one another in the supervisor's process. Each has its own store and secret,
so that it finds nothing of an earlier one.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from collective import CollectiveError
from collective.inner import Deadline, platform

from .loop import end_children

if TYPE_CHECKING:
    from .supervisor import Supervisor
    from .variables import Run

# Signals that the first process passes on. A signal that is ignored, such as SIGHUP under nohup,
# stays ignored.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PAUSING = (signal.SIGTSTP, signal.SIGCONT)

# If an attempt fails sooner than this, the next one will probably fail for the same reason.
_QUICK_S = 10.0
# Pause before the restart after the first such attempt. It doubles after each further one.
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
# How often the launcher checks whether a rank still reads what is typed.
_LOOK_S = 0.1
# Seconds between two calls of `beat` in a pause.
_BEAT_S = 1.0


def watch_over(supervise: Callable[[int], int], clean_up: Callable[[], None]) -> int:
    """Run ``supervise`` in a child of this process and return its exit code.

    Args:
        supervise: function of the read end of a pipe; it returns the exit code. Each byte in the
            pipe is the number of a signal that this process received. End of file means that this
            process has ended.
        clean_up: function that the child calls at its end.
    """
    platform.adopt_orphans()
    control, handle = os.pipe()
    typed = os.pipe() if os.isatty(0) else None
    sys.stdout.flush()
    sys.stderr.flush()
    signals = [s for s in _ENDING if signal.getsignal(s) is not signal.SIG_IGN]
    signals += _PAUSING
    # Block the signals until both processes have installed their handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    with warnings.catch_warnings():
        # Python warns about a fork with threads. NumPy's threads are idle, and the child does not
        # call NumPy, so the fork is safe.
        warnings.simplefilter("ignore", DeprecationWarning)
        supervisor = os.fork()
    if supervisor == 0:
        os.close(handle)
        if typed is not None:
            os.dup2(typed[0], 0)
            os.close(typed[0])
            os.close(typed[1])
        _be_supervisor(partial(supervise, control), clean_up, signals)
    os.close(control)
    if typed is not None:
        os.close(typed[0])
        threading.Thread(target=_relay_terminal, args=(typed[1],), daemon=True).start()

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(OSError):  # the supervisor has ended, so waitpid() returns soon
            os.write(handle, bytes([number]))
        if number == signal.SIGTSTP:
            os.kill(os.getpid(), signal.SIGSTOP)

    before = {number: signal.signal(number, pass_on) for number in signals}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    _, status = os.waitpid(supervisor, 0)
    end_children(0.0)
    for number, handler in before.items():
        signal.signal(number, handler)
    os.close(handle)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        print(f"collective run: the supervisor was killed by signal {-code}", file=sys.stderr)
        return 128 - code
    return code


def _relay_terminal(output: int) -> None:
    """Pass on what is typed at the terminal, which only this process may read, until its end.

    The supervisor and the ranks have other sessions. In the background this process must not read,
    either: the terminal would stop it.
    """
    typed = select.poll()
    typed.register(0, select.POLLIN)
    ended = select.poll()
    ended.register(output, 0)  # reports that nobody reads any more
    with contextlib.suppress(OSError):  # the terminal or all readers are gone
        while not ended.poll(0):
            if not typed.poll(_LOOK_S * 1000):
                continue
            if os.tcgetpgrp(0) != os.getpgrp():
                time.sleep(_LOOK_S)
                continue
            line = os.read(0, 1 << 16)
            if not line:
                break
            os.write(output, line)
    os.close(output)


def _be_supervisor(
    supervise: Callable[[], int], clean_up: Callable[[], None], signals: Sequence[int]
) -> None:
    """Run the supervisor in the forked child and exit; never return into the launcher's code."""
    code = 1
    try:
        os.setsid()  # signals to the launcher's process group or terminal do not arrive here
        for number in signals:
            signal.signal(number, signal.SIG_DFL)  # drop the handlers inherited from the launcher
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        code = supervise()
        clean_up()  # the launcher also cleans up, unless it was killed
    except CollectiveError as error:
        code = 2
        print(f"collective: {error}", file=sys.stderr)
    except OSError as error:
        print(f"collective run: the ranks could not be started: {error}", file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def run_attempts(
    attempt: Callable[[int, int], AbstractContextManager[Supervisor]],
    run: Run,
    control: int,
    beat: Callable[[], None] | None = None,
) -> int:
    """Run attempts until one succeeds or restarts run out; return the exit code of the last one.

    Args:
        attempt: function whose context has the supervisor of an attempt, and what the attempt
            needs until its end. Its arguments are the attempt's number, from 0, and ``control``.
        run: what each attempt starts, and how many may follow the first one.
        control: as in :class:`Supervisor`.
        beat: function to call again and again between two attempts, or None.
    """
    quick, restarts = 0, run.max_restarts
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
            f"collective run: all {run.size} ranks start again{delay} (restart {number + 1} of "
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

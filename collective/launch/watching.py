"""Two processes that watch each other, so that one of them ends what the other leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial

from collective.errors import CollectiveError
from collective.platform import adopt_orphans

from .processes import end_children

__all__ = ["watch_over"]

# Signals that the first process passes on. A signal that is ignored, such as SIGHUP under nohup,
# stays ignored.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PAUSING = (signal.SIGTSTP, signal.SIGCONT)


def watch_over(supervise: Callable[[int], int], clean_up: Callable[[], None]) -> int:
    """Run ``supervise`` in a child of this process and return its exit code.

    Args:
        supervise: function of the read end of a pipe; it returns the exit code. Each byte in the
            pipe is the number of a signal that this process received. End of file means that this
            process has ended.
        clean_up: function that the child calls at its end.
    """
    adopt_orphans()
    control, handle = os.pipe()
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
        _be_supervisor(partial(supervise, control), clean_up, signals)
    os.close(control)

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

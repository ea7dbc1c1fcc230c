"""Handling of signals, and of a standard output that accepts no more data.

A signal whose default action would end the process at once raises an exception instead. So the
process can clean up on the way out: it ends ranks and removes directories.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import tempfile
from typing import NoReturn

# The signals that end a command in the background, or one whose terminal is closed.
_ENDING = (signal.SIGTERM, signal.SIGHUP)
# The errors of writing to an output that accepts no more data.
_FULL = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


class EndedBySignal(KeyboardInterrupt):
    """A signal asked this process to end. Handlers of ``KeyboardInterrupt`` catch it, too.

    Attributes:
        number: number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def raise_on_signals() -> None:
    """Raise :class:`EndedBySignal` in the main thread at the first SIGTERM or SIGHUP.

    Further signals are ignored, so that the clean-up of the first one can finish. A signal that
    was ignored before, as under nohup, stays ignored.
    """

    def end(number: int, _: object) -> NoReturn:
        for handled in heeded:
            signal.signal(handled, signal.SIG_IGN)
        raise EndedBySignal(number)

    heeded = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in heeded:
        signal.signal(number, end)


def have_descriptors() -> bool:
    """Return whether standard output is open; open missing standard descriptors on /dev/null.

    Otherwise a file that is opened later would take the number of a closed descriptor, and would
    get the output for standard output or standard error.
    """
    is_open = sys.stdout is not None
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    return is_open


def explain(error: OSError) -> str | None:
    """Return a line that says why a command could not go on, or "" if nobody can read it.

    None stands for any other error, which needs its traceback.
    """
    if isinstance(error, FileNotFoundError):
        try:
            tempfile.gettempdir()
        except FileNotFoundError as nowhere:
            return f"{nowhere.strerror}. Set TMPDIR to a directory that can be written to."
    if error.filename is not None or error.errno not in _FULL or not _stdout_fails():
        return None
    # Nothing more can be written to standard output, not even at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if error.errno == errno.EPIPE:
        return ""  # the reader has closed the pipe, so it needs no more output
    return f"standard output: {error.strerror}."


def _stdout_fails() -> bool:
    """Tell whether standard output accepts no more data, by writing an empty line."""
    try:
        sys.stdout.flush()
        os.write(1, b"\n")  # an empty buffer makes flush() succeed in any case
    except OSError:
        return True
    return False

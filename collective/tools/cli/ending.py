"""How a command ends from outside: a signal, or an output that takes no more.

A signal whose default action would end the process at once raises instead, so that what is open
is closed on the way out: ranks end, and directories are removed.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import tempfile
from typing import NoReturn

__all__ = ["Ended", "explain", "have_descriptors", "raise_on_signals"]

# What ends a command that runs in the background, or whose terminal is closed.
_ENDING = (signal.SIGTERM, signal.SIGHUP)
# How an output fails that takes no more.
_FULL = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


class Ended(KeyboardInterrupt):
    """A signal has asked this process to end; handled where an interrupt is.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def raise_on_signals() -> None:
    """Raise :class:`Ended` in the main thread at the first SIGTERM or SIGHUP.

    Further ones are not heeded: what the first set in motion is to come to its end. One that
    is ignored, as by nohup, stays ignored.
    """

    def end(number: int, _: object) -> NoReturn:
        for each in heeded:
            signal.signal(each, signal.SIG_IGN)
        raise Ended(number)

    heeded = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    for number in heeded:
        signal.signal(number, end)


def have_descriptors() -> bool:
    """Return whether standard output is open; open what else is missing on /dev/null.

    A file that is opened later would take the number of one that is closed, and get what is
    meant for it.
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
    """Return in a line why a command could not go on, "" where nobody is to be told.

    None says that it is an error of its own, which needs its traceback.
    """
    if isinstance(error, FileNotFoundError):
        try:
            tempfile.gettempdir()
        except FileNotFoundError as nowhere:
            return f"{nowhere.strerror}. Set TMPDIR to a directory that can be written to."
    if error.filename is not None or error.errno not in _FULL or not _stdout_fails():
        return None
    # Nothing more can be written there, also not at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if error.errno == errno.EPIPE:
        return ""  # whoever read it has seen enough
    return f"standard output: {error.strerror}."


def _stdout_fails() -> bool:
    """Tell whether standard output takes no more, by an empty line."""
    try:
        sys.stdout.flush()
        os.write(1, b"\n")  # where nothing is buffered there is nothing to flush
    except OSError:
        return True
    return False

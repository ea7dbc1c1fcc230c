"""File descriptors: whether this process has room for some more."""

from __future__ import annotations

import errno
import os
import resource

__all__ = ["RAISE_THE_LIMIT", "shortage"]

# Other libraries open files, too: this many descriptors are left to them.
_SPARE = 16

#: What helps whoever has run out of them.
RAISE_THE_LIMIT = (
    "Close communicators that are not needed any more, or raise the limit of open files (ulimit -n)"
)


def shortage(needed: int) -> str:
    """Return what is wrong if this process cannot open ``needed`` more files, else "".

    For those who cannot fail well when they run out: Gloo ends the process.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if not needed or limit == resource.RLIM_INFINITY:
        return ""
    try:
        used = len(os.listdir("/dev/fd")) - 1  # this listing has one itself
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        used = limit  # not even one for that
    if used + needed + _SPARE <= limit:
        return ""
    return (
        f"{used} of {limit} file descriptors are in use, and it takes {needed} (and {_SPARE} to "
        f"spare). {RAISE_THE_LIMIT}"
    )

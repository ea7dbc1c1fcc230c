"""Check whether this process can open some more file descriptors."""

from __future__ import annotations

import errno
import os
import resource

__all__ = ["RAISE_THE_LIMIT", "shortage"]

# Number of descriptors to leave free for the files that other libraries open.
_SPARE = 16

#: Remedy for a lack of file descriptors, for error texts.
RAISE_THE_LIMIT = (
    "Close communicators that are not needed any more, or raise the limit of open files (ulimit -n)"
)


def shortage(needed: int) -> str:
    """Return an error text if this process cannot open ``needed`` more files, else "".

    Transports call this before they use a library that cannot report the failure: without file
    descriptors, Gloo ends the process.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if not needed or limit == resource.RLIM_INFINITY:
        return ""
    try:
        used = len(os.listdir("/dev/fd")) - 1  # the listing itself takes one
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        used = limit  # not even the listing could be opened
    if used + needed + _SPARE <= limit:
        return ""
    return (
        f"{used} of {limit} file descriptors are in use, and {needed} more are needed (plus "
        f"{_SPARE} to spare). {RAISE_THE_LIMIT}"
    )

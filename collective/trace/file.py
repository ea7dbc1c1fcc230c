"""The file of a trace: opened so that nothing else is ever overwritten."""

from __future__ import annotations

import errno
import fcntl
import os
import stat

__all__ = ["HEAD", "open_file"]

#: How each of our traces begins.
HEAD = '{"displayTimeUnit": "ns", "otherData": {'


def open_file(path: str) -> int:
    """Return a descriptor of a new trace, or of one of this user's from an earlier run.

    The directory may be one in which others can put files, such as /tmp: what is there already
    is not followed, not waited for, and not overwritten unless it is such a trace.

    Raises:
        OSError: it cannot be written, is being written, or is something else; with the path.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if os.path.islink(path):
            raise FileExistsError(
                errno.EEXIST, "a link is there; it is not followed", path
            ) from None
        file = os.open(path, flags)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(0, "another process is writing it", path) from None
        except OSError:
            pass  # a file system without locks
        status = os.fstat(file)
        head = HEAD.encode()
        # Of a run that was killed or had no room left there may be a part.
        if not stat.S_ISREG(status.st_mode) or not head.startswith(os.pread(file, len(head), 0)):
            raise FileExistsError(errno.EEXIST, "it is there and is no trace; it stays", path)
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"it belongs to uid {status.st_uid}", path)
    except BaseException:
        os.close(file)
        raise
    return file

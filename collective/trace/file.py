"""The file of a trace, opened such that no other file is ever overwritten."""

from __future__ import annotations

import errno
import fcntl
import os
import stat

__all__ = ["HEAD", "open_file"]

#: Beginning of every trace that this package writes.
HEAD = '{"displayTimeUnit": "ns", "otherData": {'


def open_file(path: str) -> int:
    """Return a file descriptor of a new trace, or of a trace of the same user from an earlier run.

    Other users may be able to put files into the directory, such as /tmp. So an existing link is
    not followed, an existing pipe is not waited for, and an existing file is overwritten only if it
    is a trace of this user.

    Raises:
        OSError: the file cannot be written, another process is writing it, or it is no such trace;
            with the path.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if os.path.islink(path):
            raise FileExistsError(
                errno.EEXIST, "a link is there, and it is not followed", path
            ) from None
        file = os.open(path, flags)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(0, "another process is writing it", path) from None
        except OSError:
            pass  # the file system has no locks
        status = os.fstat(file)
        head = HEAD.encode()
        # After a run that was killed or had no space left, the file may hold a part of the head.
        if not stat.S_ISREG(status.st_mode) or not head.startswith(os.pread(file, len(head), 0)):
            raise FileExistsError(errno.EEXIST, "it is no trace; it is not overwritten", path)
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"the file belongs to uid {status.st_uid}", path)
    except BaseException:
        os.close(file)
        raise
    return file

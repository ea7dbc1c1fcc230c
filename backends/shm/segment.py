"""Shared mappings without names, which leave no files behind when processes are killed.

A segment is anonymous memory, which the other ranks open by way of this process. The segment is
never in a file system, so it ends with its last process, and the size of ``/dev/shm`` does not
limit it. Where Python cannot make such memory, a segment is a file of mode 0600 among the temporary
files, which is deleted once all ranks have opened it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
import weakref

from collective.contract.process import RAISE_THE_LIMIT
from collective.errors import BackendUnavailableError
from collective.platform import fix_length, is_file, shared_file, still_leads_to, want_huge_pages

#: Error codes of open(2) for a process or a system without a free descriptor.
TOO_MANY_FILES = frozenset({errno.EMFILE, errno.ENFILE})

_NAME = "collective"
# Memory below this size has no use for huge pages.
_HUGE = 2 << 20


class Segment:
    """Shared mapping.

    A process shows that it lives by a lock on a byte of the segment. The kernel drops the lock when
    the process dies, however it dies, before its parent has reaped it. Forked children do not
    inherit the lock. The byte need not exist.

    Args:
        nbytes: length of a new segment, or least length of a peer's.
        path: path of a peer's segment; empty to make a new one, see :meth:`create`.
        rank: byte to lock for as long as this process lives and keeps the descriptor, or None.

    Attributes:
        path: path by which other processes of this user open the segment, until :meth:`unlink`.
        map: the mapping. It is never closed explicitly, since arrays may still refer to it. It
            ends with the last of these arrays.
    """

    def __init__(self, nbytes: int, path: str = "", rank: int | None = None) -> None:
        is_new, descriptor = not path, -1
        try:
            if is_new:
                descriptor, path = shared_file(_NAME)
                os.fchmod(descriptor, 0o600)
                os.ftruncate(descriptor, max(nbytes, mmap.PAGESIZE))
                fix_length(descriptor)
            else:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                if not still_leads_to(path, _NAME):
                    raise FileNotFoundError(errno.ENOENT, "no longer a segment", path)
                if os.fstat(descriptor).st_size < nbytes:
                    raise OSError(errno.EINVAL, f"shorter than {nbytes} bytes", path)
            self.map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
            if len(self.map) >= _HUGE:
                want_huge_pages(self.map)
            if rank is not None:
                # The lock belongs to the process. It is released when the process closes any
                # descriptor of the segment, not only this one (fcntl_locking(2)). So a process that
                # holds a lock does not open its segment a second time.
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except BaseException:
            if descriptor >= 0:
                os.close(descriptor)
            raise
        self.path = path
        self._unlinkable = is_new and is_file(path)
        self._descriptor = descriptor
        self._closing = threading.Lock()
        # A program may drop a communicator without closing it.
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False

    @classmethod
    def create(cls, nbytes: int, rank: int | None = None) -> Segment:
        """Return a new segment of zeros.

        Raises:
            BackendUnavailableError: the system has no memory or no place for it.
        """
        try:
            return cls(nbytes, rank=rank)
        except (OSError, ValueError) as error:
            few = isinstance(error, OSError) and error.errno in TOO_MANY_FILES
            remedy = RAISE_THE_LIMIT if few else "Free memory, or start fewer ranks"
            raise BackendUnavailableError(
                f"shm: a shared segment of {nbytes} bytes cannot be created: {error}. {remedy}."
            ) from error

    @classmethod
    def open(cls, path: str, nbytes: int, rank: int | None = None) -> Segment:
        """Map a segment of at least ``nbytes`` bytes that a peer has created.

        Raises:
            OSError: the peer's process is gone or belongs to another user, or the segment is too
                short.
        """
        return cls(nbytes, path, rank)

    def unlink(self) -> None:
        """Remove the segment's path; processes that have opened the segment keep it."""
        if self._unlinkable:
            self._unlinkable = False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def close_descriptor(self) -> None:
        """Close the descriptor; the mapping stays."""
        # Another thread may be testing a lock. Its descriptor must not become that of another file.
        with self._closing:
            self._descriptor = -1
            self._close()

    def alive(self, rank: int) -> bool:
        """Tell whether another process holds byte ``rank``."""
        with self._closing:
            if self._descriptor < 0:
                return True
            try:
                # Use a shared lock: two ranks that test at the same time do not block each other,
                # and neither takes the other's test for the lock of the owner.
                fcntl.lockf(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, rank)
            except OSError:
                return True
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, rank)
            return False


def map_shared(path: str, identity: tuple[int, int], nbytes: int) -> mmap.mmap:
    """Map the first bytes of shared memory that another library made.

    Args:
        path: path from :func:`~collective.platform.descriptor_path` of a process that has the
            memory open.
        identity: device and inode of the memory. They are compared, since the process may have
            died and the path may lead to another file by now.
        nbytes: number of bytes to map.

    Raises:
        OSError: the memory is gone, belongs to another user, or is not the announced file.
        ValueError: the memory is shorter than ``nbytes``.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != identity:
            raise FileNotFoundError(errno.ENOENT, "no longer the announced file", path)
        mapped = mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)
    if nbytes >= _HUGE:
        want_huge_pages(mapped)
    return mapped

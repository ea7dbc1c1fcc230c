"""Shared mappings without names, which leave no files behind when processes are killed.

If the kernel has memfd_create(2), a segment is anonymous memory. Other processes of the same user
open it through ``/proc/PID/fd/N``. The segment is never in a file system, so it ends with its last
process, and the size of ``/dev/shm`` does not limit it. On other systems a segment is a file of
mode 0600 among the temporary files, which is deleted once all ranks have opened it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Callable

from collective.contract.descriptors import RAISE_THE_LIMIT
from collective.errors import BackendUnavailableError

__all__ = ["SHARED_MEMORY", "TOO_MANY_FILES", "Segment", "map_shared", "process_vm_readv"]

#: Directory of POSIX shared memory, shm_open(3), on Linux.
SHARED_MEMORY = "/dev/shm"

#: Error codes of open(2) for a process or a system without a free descriptor.
TOO_MANY_FILES = frozenset({errno.EMFILE, errno.ENFILE})

_NAME = "collective"
_MEMFD = f"/memfd:{_NAME}"  # beginning of a segment's link in /proc/PID/fd


class Segment:
    """Shared mapping.

    Attributes:
        path: path by which other processes of this user open the segment, until :meth:`unlink`.
        map: the mapping. It is never closed explicitly, since arrays may still refer to it. It
            ends with the last of these arrays.
    """

    def __init__(self, descriptor: int, path: str, owner: bool) -> None:
        self.path = path
        self._unlinkable = owner and not path.startswith("/proc/")
        self.map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._descriptor = descriptor
        # A program may drop a communicator without closing it.
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False
        _want_huge_pages(self.map)

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """Return a new segment of zeros.

        Raises:
            BackendUnavailableError: the system has no memory or no place for it.
        """
        path = ""
        descriptor = -1
        try:
            if hasattr(os, "memfd_create"):
                flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
                descriptor = os.memfd_create(_NAME, flags)
                path = f"/proc/{os.getpid()}/fd/{descriptor}"
            else:
                descriptor, path = tempfile.mkstemp(prefix=f"{_NAME}-")
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, max(nbytes, mmap.PAGESIZE))
            _seal(descriptor)
            return cls(descriptor, path, owner=True)
        except (OSError, ValueError) as error:
            if descriptor >= 0:
                os.close(descriptor)
            few = isinstance(error, OSError) and error.errno in TOO_MANY_FILES
            remedy = RAISE_THE_LIMIT if few else "Free memory, or start fewer ranks"
            raise BackendUnavailableError(
                f"shm: a shared segment of {nbytes} bytes cannot be created: {error}. {remedy}."
            ) from error

    @classmethod
    def open(cls, path: str, nbytes: int) -> Segment:
        """Map a segment of at least ``nbytes`` bytes that a peer has created.

        Raises:
            OSError: the peer's process is gone or belongs to another user, or the segment is too
                short.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # The process may have died. Another process may have its number by now, and the path
            # may lead to a file of that process.
            if path.startswith("/proc/") and not os.readlink(path).startswith(_MEMFD):
                raise FileNotFoundError(errno.ENOENT, "no longer a segment", path)
            if os.fstat(descriptor).st_size < nbytes:
                raise OSError(errno.EINVAL, f"shorter than {nbytes} bytes", path)
            return cls(descriptor, path, owner=False)
        except BaseException:
            os.close(descriptor)
            raise

    def unlink(self) -> None:
        """Remove the segment's path; processes that have opened the segment keep it."""
        if self._unlinkable:
            self._unlinkable = False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def close_descriptor(self) -> None:
        """Close the descriptor; the mapping stays."""
        self._descriptor = -1
        self._close()

    # A process shows that it lives by a lock on a byte of the segment. The kernel drops the lock
    # when the process dies, however it dies, before its parent has reaped it. Forked children do
    # not inherit the lock. The byte need not exist.

    def lock_alive(self, rank: int) -> None:
        """Hold byte ``rank`` for as long as this process lives and keeps the descriptor."""
        # The lock belongs to the process. It is released when the process closes any descriptor of
        # the segment, not only this one (fcntl_locking(2)). So a process that holds a lock does not
        # open its segment a second time.
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    def alive(self, rank: int) -> bool:
        """Tell whether another process holds byte ``rank``."""
        if self._descriptor < 0:
            return True
        try:
            # Use a shared lock: two ranks that test at the same time do not block each other, and
            # neither takes the other's test for the lock of the owner.
            fcntl.lockf(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return True
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, rank)
        return False


def _seal(descriptor: int) -> None:
    """Fix the length of anonymous memory permanently, if the system supports seals.

    Without the seals any process of this user could shorten the memory through ``/proc/PID/fd/N``.
    Then each rank would die of SIGBUS at its next access behind the new end. A file in a directory
    has no seals.
    """
    if hasattr(fcntl, "F_ADD_SEALS"):
        with contextlib.suppress(OSError):
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)


def map_shared(path: str, identity: tuple[int, int], nbytes: int) -> mmap.mmap:
    """Map the first bytes of shared memory that another library made.

    Args:
        path: ``/proc/PID/fd/N`` of a process that has the memory open.
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
    _want_huge_pages(mapped)
    return mapped


def _want_huge_pages(mapped: mmap.mmap) -> None:
    """Ask for transparent huge pages; with them there are a tenth as many page faults."""
    if hasattr(mmap, "MADV_HUGEPAGE") and len(mapped) >= 2 << 20:
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _load() -> Callable[..., int] | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None, use_errno=True)
    function = getattr(library, "process_vm_readv", None)
    if function is None:
        return None
    function.restype = ctypes.c_ssize_t
    function.argtypes = (
        ctypes.c_int,
        ctypes.POINTER(_IoVec),
        ctypes.c_ulong,
        ctypes.POINTER(_IoVec),
        ctypes.c_ulong,
        ctypes.c_ulong,
    )
    loaded: Callable[..., int] = function
    return loaded


_function: Callable[..., int] | None = None
_loaded = False


def process_vm_readv(pid: int, address: int, into: int, nbytes: int) -> bool:
    """Copy ``nbytes`` from ``address`` of process ``pid`` to address ``into`` of this process.

    The kernel makes a single copy, by process_vm_readv(2). Return False if the system has no such
    call or forbids it; see :mod:`.permission`.

    Raises:
        ProcessLookupError: the process is gone.
    """
    global _function, _loaded
    if not _loaded:
        _function, _loaded = _load(), True
    if _function is None:
        return False
    local, remote = _IoVec(into, nbytes), _IoVec(address, nbytes)
    while nbytes:
        copied = _function(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if copied == nbytes:
            return True
        if copied < 0:
            if ctypes.get_errno() == errno.ESRCH:
                raise ProcessLookupError(errno.ESRCH, f"process {pid} is gone")
            return False
        # A single call moves at most 2 GiB less a page.
        nbytes -= copied
        local = _IoVec(local.base + copied, nbytes)
        remote = _IoVec(remote.base + copied, nbytes)
    return True

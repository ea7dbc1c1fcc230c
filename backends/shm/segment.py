"""Shared mappings without names: nothing is left behind, whatever is killed.

Where the kernel has memfd_create(2), a segment is anonymous memory that other processes
of the same user open through ``/proc/PID/fd/N``. It is never in a file system, so it is
gone with its last process and is not limited by the size of ``/dev/shm``. Elsewhere it
is a file of mode 0600 in a private directory, deleted once everybody has opened it.
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

#: Where POSIX shared memory, shm_open(3), is on Linux.
SHARED_MEMORY = "/dev/shm"

#: What open(2) says when the process or the system has no descriptor left.
TOO_MANY_FILES = frozenset({errno.EMFILE, errno.ENFILE})

_NAME = "collective"
_MEMFD = f"/memfd:{_NAME}"  # how /proc/PID/fd shows one


class Segment:
    """A shared mapping.

    Attributes:
        path: where other processes of this user open it, until :meth:`unlink`.
        map: the mapping. It is never closed by hand: arrays may still refer to it, and
            it goes with the last of them.
    """

    def __init__(self, descriptor: int, path: str, owner: bool) -> None:
        self.path = path
        self._unlinkable = owner and not path.startswith("/proc/")
        self.map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._descriptor = descriptor
        # A communicator may be dropped without having been closed.
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
                f"shm: a shared segment of {nbytes} bytes cannot be made: {error}. {remedy}."
            ) from error

    @classmethod
    def open(cls, path: str, nbytes: int) -> Segment:
        """Map a segment that a peer created, of at least ``nbytes`` bytes.

        Raises:
            OSError: its process is gone, or belongs to another user, or it is too short.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # The number of a dead process may be another's by now, with a file of its own.
            if path.startswith("/proc/") and not os.readlink(path).startswith(_MEMFD):
                raise FileNotFoundError(errno.ENOENT, "no longer a segment", path)
            if os.fstat(descriptor).st_size < nbytes:
                raise OSError(errno.EINVAL, f"shorter than {nbytes} bytes", path)
            return cls(descriptor, path, owner=False)
        except BaseException:
            os.close(descriptor)
            raise

    def unlink(self) -> None:
        """Take its name away; those who have opened it keep it."""
        if self._unlinkable:
            self._unlinkable = False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def close_descriptor(self) -> None:
        """Let go of the descriptor; the mapping stays."""
        self._descriptor = -1
        self._close()

    # A process shows that it lives by a lock on a byte of the segment. The kernel drops the lock
    # when the process dies, however it dies, before its parent has reaped it. Forked children do
    # not inherit the lock. The byte need not exist.

    def lock_alive(self, rank: int) -> None:
        """Hold byte ``rank`` for as long as this process lives and keeps the descriptor."""
        # The lock is the process's, and goes with any descriptor of the segment that the process
        # closes, not with this one alone (fcntl_locking(2)). So a process that holds a lock does
        # not open its segment a second time.
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    def alive(self, rank: int) -> bool:
        """Tell whether another process holds byte ``rank``."""
        if self._descriptor < 0:
            return True
        try:
            # Shared, so that two ranks which ask at once do not take each other for it.
            fcntl.lockf(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return True
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, rank)
        return False


def _seal(descriptor: int) -> None:
    """Fix the length of anonymous memory for good, where the system can.

    Any process of this user could shorten it through ``/proc/PID/fd/N``, and each rank would die
    of SIGBUS at its next access behind the end. A file in a directory has no seals.
    """
    if hasattr(fcntl, "F_ADD_SEALS"):
        with contextlib.suppress(OSError):
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)


def map_shared(path: str, identity: tuple[int, int], nbytes: int) -> mmap.mmap:
    """Map the first bytes of shared memory that another library made.

    Args:
        path: ``/proc/PID/fd/N`` of a process that has it open.
        identity: its device and inode: that of a dead process may be another file by now.

    Raises:
        OSError: it is gone, belongs to another user, or is not what was announced.
        ValueError: it is shorter than that.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if (found.st_dev, found.st_ino) != identity:
            raise FileNotFoundError(errno.ENOENT, "no longer what was announced", path)
        mapped = mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)
    _want_huge_pages(mapped)
    return mapped


def _want_huge_pages(mapped: mmap.mmap) -> None:
    """Ask for transparent huge pages: a tenth of the page faults, where the system has them."""
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
    """Copy ``nbytes`` from ``address`` of process ``pid`` to address ``into`` of this one.

    One copy by the kernel, process_vm_readv(2). Returns False where the system has no
    such call or forbids it; see :mod:`.permission`.

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

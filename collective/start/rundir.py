"""Run directories: private, shared by the processes of one launch, gone after the last.

Every launch meets in a directory of its own below ``<tempdir>/collective-<uid>``. Each
process that uses one holds a shared ``flock`` on it. That lock is what makes the rest
simple, for the kernel drops it however a process ends: a directory that nobody holds
is a leftover. It is emptied by the first process that joins it, so a launch whose name
was used before never reads the keys of an earlier one, and any later launch sweeps it
away.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from collective.errors import RendezvousError

from .file_store import FileStore

__all__ = ["RunStore", "join", "leave"]


def join(name: str) -> tuple[Path, int]:
    """Create or join the run directory ``name`` and hold it.

    Args:
        name: a file name; all processes of one launch give the same, no other does.

    Returns:
        The directory, and the descriptor that holds it. Whoever has a copy of the
        descriptor, a forked child too, holds the directory.

    Raises:
        RendezvousError: there is no directory for temporary files, the place for run
            directories belongs to somebody else, or is on a file system without locks.
    """
    try:
        parent = Path(tempfile.gettempdir()) / f"collective-{os.geteuid()}"
    except FileNotFoundError as error:
        raise RendezvousError(
            f"run directory: {error.strerror}. Set TMPDIR to a directory that can be written to, "
            "or COLLECTIVE_STORE to a private directory that all ranks share."
        ) from error
    FileStore(parent)  # refuses a directory that another user could have laid out
    _sweep(parent)
    path = parent / name
    try:
        while True:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue  # the last one of an earlier run has just left
            if _lock_alone(descriptor) and _is_still(path, descriptor):
                _empty(path)
            # Not atomic, but all that can slip in between is another process that
            # finds the directory as empty as we left it, or removes it.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if _is_still(path, descriptor):
                return path, descriptor
            os.close(descriptor)
    except OSError as error:
        raise RendezvousError(
            f"run directory {path}: {error}; a directory of uid {os.geteuid()} on a local "
            "file system is needed. Set TMPDIR to one, or COLLECTIVE_STORE to a private "
            "directory that all ranks share."
        ) from error


def leave(path: Path, descriptor: int) -> None:
    """Let go of a run directory, and remove it if nobody else holds it."""
    try:
        if _lock_alone(descriptor) and _is_still(path, descriptor):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


class RunStore(FileStore):
    """A store in a run directory, held until the store is collected or the process ends."""

    def __init__(self, name: str) -> None:
        path, descriptor = join(name)
        super().__init__(path)
        weakref.finalize(self, _leave_unless_forked, path, descriptor, os.getpid())


def _leave_unless_forked(path: Path, descriptor: int, owner: int) -> None:
    # A forked child shares the lock itself, not only the file: what it did to it on
    # its way out would be done to its parent.
    if os.getpid() == owner:
        leave(path, descriptor)


def _lock_alone(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(path: Path, descriptor: int) -> bool:
    """Whether ``path`` is what ``descriptor`` was opened on, and not removed since."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _empty(path: Path) -> None:
    for entry in list(os.scandir(path)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.path)


def _sweep(parent: Path) -> None:
    """Remove the run directories that nobody holds any more."""
    for entry in list(os.scandir(parent)):
        try:
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # removed meanwhile, or no directory
        with contextlib.suppress(OSError):
            leave(Path(entry.path), descriptor)

"""Run directories: private, shared by the processes of one launch, removed after the last.

Every launch meets in its own directory below ``<tempdir>/collective-<uid>``. Each process that
uses the directory holds a shared ``flock`` on it. The kernel drops this lock however a process
ends, so a directory without a lock is a leftover. The first process that joins a leftover
directory empties it. So a launch that has the name of an earlier one never reads the keys of the
earlier launch. Any later launch removes leftover directories.

Beside the directories there is the file ``places``, in which each rank locks a byte. Children of a
rank do not inherit this lock, and the kernel drops it when the rank ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from collective.errors import RendezvousError

from .stores import FileStore

# The file ``places`` of each parent of run directories. It stays open, since a process that closes
# any descriptor of a file loses all its locks there.
_files: dict[Path, int] = {}
# How often this process holds the byte of a file.
_held: Counter[tuple[int, int]] = Counter()


def join(name: str) -> tuple[Path, int]:
    """Create or join the run directory ``name`` and hold it.

    Args:
        name: a file name that all processes of this launch pass, and no other launch.

    Returns:
        The directory, and the descriptor that holds its lock. A process that has a copy of the
        descriptor, such as a forked child, holds the directory, too.

    Raises:
        RendezvousError: there is no directory for temporary files, or the parent of the run
            directories belongs to another user or is on a file system without locks.
    """
    parent = _parent()
    _sweep(parent)
    path = parent / name
    try:
        while True:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            except FileNotFoundError:
                continue  # the last process of an earlier run has just removed it
            if _lock_alone(descriptor) and _is_still(path, descriptor):
                _empty(path)
            # Emptying the directory and taking the shared lock are not atomic. In between, another
            # process can only join the empty directory, or remove it; _is_still() detects that.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if _is_still(path, descriptor):
                return path, descriptor
            os.close(descriptor)
    except OSError as error:
        raise RendezvousError(
            f"run directory {path}: {error}. It must be on a local file system and belong to uid "
            f"{os.geteuid()}. Set TMPDIR to such a directory, or COLLECTIVE_STORE to a private "
            "directory that all ranks share."
        ) from error


def _parent() -> Path:
    try:
        parent = Path(tempfile.gettempdir()) / f"collective-{os.geteuid()}"
    except FileNotFoundError as error:
        raise RendezvousError(
            f"run directory: {error.strerror}. Set TMPDIR to a directory that can be written to, "
            "or COLLECTIVE_STORE to a private directory that all ranks share."
        ) from error
    FileStore(parent)  # raises if another user could have created the directory
    return parent


def claim(bytes_: Sequence[int]) -> Callable[[], None]:
    """Lock bytes of the file ``places`` for this process, and return a function that unlocks them.

    Where there is no place for such a file, nothing is locked.

    Args:
        bytes_: the bytes. Only the first one must be free; the others are locked if they are.

    Raises:
        BlockingIOError: another process has locked the first byte.
    """
    held: list[tuple[int, int]] = []
    with contextlib.suppress(RendezvousError, OSError):
        parent = _parent()
        if parent not in _files:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            _files[parent] = os.open(parent / "places", flags, 0o600)
        held = [(_files[parent], byte) for byte in bytes_]
    taken = [place for place in held if _lock_byte(*place)]
    if held and held[0] not in taken:
        _unlock(taken)
        raise BlockingIOError
    return functools.partial(_unlock, taken)


def _lock_byte(descriptor: int, byte: int) -> bool:
    """Lock a byte, once more if this process has it; return whether no other process has it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return True  # a file system without locks
    _held[descriptor, byte] += 1
    return True


def _unlock(places: Sequence[tuple[int, int]]) -> None:
    for place in places:
        _held[place] -= 1
        if _held[place] == 0:
            del _held[place]
            with contextlib.suppress(OSError):
                fcntl.lockf(place[0], fcntl.LOCK_UN, 1, place[1])


# A forked child has none of its parent's locks.
os.register_at_fork(after_in_child=_held.clear)


def leave(path: Path, descriptor: int) -> None:
    """Release a run directory, and remove it if no other process holds it."""
    try:
        if _lock_alone(descriptor) and _is_still(path, descriptor):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)


class RunStore(FileStore):
    """Store in a run directory, held until the store is collected or the process ends."""

    def __init__(self, name: str) -> None:
        path, descriptor = join(name)
        super().__init__(path)
        weakref.finalize(self, _leave_unless_forked, path, descriptor, os.getpid())


def _leave_unless_forked(path: Path, descriptor: int, owner: int) -> None:
    # A forked child shares the lock itself, and not only the file. If it released the lock at
    # its exit, its parent would lose it as well.
    if os.getpid() == owner:
        leave(path, descriptor)


def _lock_alone(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(path: Path, descriptor: int) -> bool:
    """Return whether ``path`` is still the directory on which ``descriptor`` was opened."""
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
    """Remove the run directories that no process holds any more."""
    for entry in list(os.scandir(parent)):
        try:
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # another process has removed it, or it is not a directory
        with contextlib.suppress(OSError):
            leave(Path(entry.path), descriptor)

"""Store in a directory, for ranks of one host or of hosts that share a file system."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from collective.contract.store import Store
from collective.errors import RendezvousError

__all__ = ["FileStore"]

_REMEDY = "Set COLLECTIVE_STORE, or TMPDIR for all launches, to a private directory."
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a file",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFLNK: "a link",
}


class FileStore(Store):
    """Private directory of the user (mode 0700) with one file for each key.

    Raises:
        RendezvousError: the directory belongs to another user, or other users have access to
            it. They could then write values that this job reads. Or the directory cannot be made,
            since something else has its name.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        try:
            # Another user may have put anything into a world-writable /tmp: lstat() shows it, and
            # nothing opens it.
            with contextlib.suppress(FileExistsError):
                self.directory.mkdir(mode=0o700, parents=True)
            status = os.lstat(self.directory)
        except OSError as error:
            raise RendezvousError(
                f"rendezvous directory {self.directory}: it cannot be made: {error}. {_REMEDY}"
            ) from error
        private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
        if status.st_uid != os.geteuid() or not private:
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a special file")
            raise RendezvousError(
                f"rendezvous directory {self.directory}: it is {kind} of uid {status.st_uid} with "
                f"mode {stat.S_IMODE(status.st_mode):04o}; it must be a directory of uid "
                f"{os.geteuid()} with mode 0700. Its owner can remove it. {_REMEDY}"
            )

    def __str__(self) -> str:
        return str(self.directory)

    def set(self, key: str, value: bytes) -> None:
        os.replace(self._written(key, value), self.directory / key)

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        scratch = self._written(key, value)
        try:
            # link(2) never replaces a file, also over NFS. The file is complete before it gets
            # its name, while open(2) with O_EXCL would show an empty file first.
            os.link(scratch, self.directory / key)
            return value
        except FileExistsError:
            won = self.try_get(key)
            # Another rank has deleted the key in between, so try again.
            return self.put_if_absent(key, value) if won is None else won
        except OSError as error:
            raise self._unfit(error) from error
        finally:
            scratch.unlink(missing_ok=True)

    def _written(self, key: str, value: bytes) -> Path:
        """Return a new file that contains ``value``, under a name that no reader looks for."""
        scratch = self.directory / f".{key}.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            with open(scratch, "xb", opener=_open_private) as file:
                file.write(value)
        except OSError as error:
            scratch.unlink(missing_ok=True)
            raise self._unfit(error) from error
        return scratch

    def _unfit(self, error: OSError) -> RendezvousError:
        return RendezvousError(
            f"rendezvous directory {self.directory}: {error}. The directory must exist for as long "
            "as any rank runs, with free space, on a file system with hard links. Set "
            "COLLECTIVE_STORE to such a directory."
        )

    def try_get(self, key: str) -> bytes | None:
        try:
            return (self.directory / key).read_bytes()
        except FileNotFoundError:
            return None

    def delete(self, key: str) -> None:
        (self.directory / key).unlink(missing_ok=True)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)

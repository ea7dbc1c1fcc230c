"""A store that is a directory, for the ranks of one host or of a file system that hosts share."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from collective.contract.store import Store
from collective.errors import RendezvousError

__all__ = ["FileStore"]


class FileStore(Store):
    """A directory of the user's own (mode 0700), one file a key.

    Raises:
        RendezvousError: the directory belongs to somebody else, or others can write
            to it: another user could then feed this job.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # lstat: a symbolic link in a world-writable /tmp may be somebody's trap.
        status = os.lstat(self.directory)
        private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
        if status.st_uid != os.geteuid() or not private:
            raise RendezvousError(
                f"rendezvous directory {self.directory}: owner uid {status.st_uid}, mode "
                f"{stat.S_IMODE(status.st_mode):04o}; it must be a directory of uid "
                f"{os.geteuid()} with mode 0700. Remove it, or set COLLECTIVE_STORE to "
                "a private directory."
            )

    def __str__(self) -> str:
        return str(self.directory)

    def set(self, key: str, value: bytes) -> None:
        os.replace(self._written(key, value), self.directory / key)

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        scratch = self._written(key, value)
        try:
            # link(2) never replaces a file, over NFS either, and the file is whole before it has
            # its name: open(2) with O_EXCL would show it empty first.
            os.link(scratch, self.directory / key)
            return value
        except FileExistsError:
            won = self.try_get(key)
            # It was deleted in between, and may be put again.
            return self.put_if_absent(key, value) if won is None else won
        except OSError as error:
            raise self._unfit(error) from error
        finally:
            scratch.unlink(missing_ok=True)

    def _written(self, key: str, value: bytes) -> Path:
        """Return a file with ``value`` that nobody knows of yet."""
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
            f"rendezvous directory {self.directory}: {error}; it must be there for as long as a "
            "rank is, with room, on a file system that has hard links. Set COLLECTIVE_STORE to "
            "such a directory."
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

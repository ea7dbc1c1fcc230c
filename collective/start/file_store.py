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
        scratch = self.directory / f".{key}.{os.getpid()}.{secrets.token_hex(4)}"
        with open(scratch, "xb", opener=_open_private) as file:
            file.write(value)
        os.replace(scratch, self.directory / key)

    def try_get(self, key: str) -> bytes | None:
        try:
            return (self.directory / key).read_bytes()
        except FileNotFoundError:
            return None

    def delete(self, key: str) -> None:
        (self.directory / key).unlink(missing_ok=True)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)

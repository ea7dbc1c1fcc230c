"""Rendezvous: a small key-value store in which the ranks of a job find each other.

The contract is :class:`Store`; :class:`FileStore` serves one host. A store is needed
only until a transport is connected: everything later travels over the transport.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from abc import ABC, abstractmethod
from pathlib import Path

from collective.errors import RendezvousError

__all__ = ["FileStore", "Store"]

# A poll costs one failed open(2), some microseconds; ranks of one job start
# milliseconds apart at best, so there is nothing to win below a millisecond.
_POLL_FIRST_S = 0.001
_POLL_LAST_S = 0.02


class Store(ABC):
    """What every rendezvous store promises. Keys are short ASCII words, values bytes."""

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Publish ``value``. Readers see all of it or nothing; a second set replaces it."""

    def get(self, key: str, deadline: float) -> bytes:
        """Return the value of ``key``, waiting for it until ``deadline``.

        Args:
            key: what some rank has published or will publish.
            deadline: on the clock of ``time.monotonic()``, in seconds.

        Raises:
            RendezvousError: the deadline passed and the key is still absent.
        """
        pause = _POLL_FIRST_S
        while (value := self.try_get(key)) is None:
            if time.monotonic() >= deadline:
                raise RendezvousError(f"rendezvous: nobody published {key!r} at {self}")
            time.sleep(pause)
            pause = min(pause * 1.5, _POLL_LAST_S)
        return value

    @abstractmethod
    def try_get(self, key: str) -> bytes | None:
        """Return the value of ``key``, or None if nobody has published it yet."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Forget ``key``. An absent key is no error."""

    def close(self) -> None:  # noqa: B027  an offer, not a duty
        """Let go of what works for the store: this rank neither asks nor tells any more."""

    def check(self) -> None:  # noqa: B027  an offer, not a duty
        """Raise if it is known that the ranks will not meet; asked while they are awaited."""


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

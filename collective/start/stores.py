"""Rendezvous stores without a server: in memory, in a directory; and wrappers, sealed and late."""

from __future__ import annotations

import contextlib
import functools
import hmac
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from collective.control.secret import COMPARE, Secret
from collective.control.store import NotPublishedError, Store, WrappedStore
from collective.deadline import Deadline
from collective.errors import RendezvousError

_REMEDY = "Set COLLECTIVE_STORE, or TMPDIR for all launches, to a private directory."
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a file",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFLNK: "a link",
}
# Bytes of a sealed value before and after its content.
_NONCE_BYTES, _TAG_BYTES = 16, 32


class MemoryStore(Store):
    """Dictionary of ranks that are threads of one process; each of its operations is atomic."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def __str__(self) -> str:
        return "the memory of this process"

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        return self._values.setdefault(key, value)

    def try_get(self, key: str) -> bytes | None:
        return self._values.get(key)

    def delete(self, key: str) -> None:
        self._values.pop(key, None)


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


class SealedStore(WrappedStore):
    """Wrapper of a store that authenticates names and values with a secret.

    A value is stored as ``nonce | value | tag``. The tag is HMAC-SHA256 (RFC 2104) over the key's
    name, the nonce and the value. A name is stored as its own HMAC. Both HMAC keys are derived
    from the secret, which belongs to one job and one rendezvous of it. So a value that is copied
    from another job, rendezvous or name has no valid tag. Values are not encrypted: everybody who
    can read the store can read them.

    Args:
        store: store to wrap, of any kind.
        secret: secret that all ranks share.

    Raises:
        RendezvousError: a method that reads finds a value without a valid tag, which another
            program has written.
    """

    def __init__(self, store: Store, secret: Secret) -> None:
        super().__init__(store)
        self._of_names, self._of_values = secret.key("store names"), secret.key("store values")

    def set(self, key: str, value: bytes) -> None:
        super().set(key, self._sealed(key, value))

    def get(self, key: str, deadline: Deadline) -> bytes:
        try:
            sealed = super().get(key, deadline)
        except NotPublishedError as error:
            raise NotPublishedError(
                f"{error}; a rank with another secret, or none, cannot publish it. {COMPARE}."
            ) from error
        return self._opened(key, sealed)

    def try_get(self, key: str) -> bytes | None:
        sealed = super().try_get(key)
        return None if sealed is None else self._opened(key, sealed)

    def _poll(self, key: str, deadline: Deadline) -> bytes | None:
        sealed = super()._poll(key, deadline)
        return None if sealed is None else self._opened(key, sealed)

    def put_if_absent(self, key: str, value: bytes) -> bytes:
        return self._opened(key, super().put_if_absent(key, self._sealed(key, value)))

    def _name(self, key: str) -> str:
        return hmac.digest(self._of_names, key.encode(), "sha256").hex()

    def _tag(self, key: str, content: bytes) -> bytes:
        # The name's length comes first, so that no two pairs of name and content give the same
        # bytes.
        name = key.encode()
        message = len(name).to_bytes(4, "big") + name + content
        return hmac.digest(self._of_values, message, "sha256")

    def _sealed(self, key: str, value: bytes) -> bytes:
        content = secrets.token_bytes(_NONCE_BYTES) + value
        return content + self._tag(key, content)

    def _opened(self, key: str, sealed: bytes) -> bytes:
        content, tag = sealed[:-_TAG_BYTES], sealed[-_TAG_BYTES:]
        if len(sealed) < _NONCE_BYTES + _TAG_BYTES or not hmac.compare_digest(
            tag, self._tag(key, content)
        ):
            raise RendezvousError(
                f"rendezvous: the store at {self._store} holds a value for {key!r} that does not "
                "belong to this job: its writer does not know the job's secret. Another program "
                "can write to the store. Use a store for this launch only, or restrict access to "
                "it."
            )
        return content[_NONCE_BYTES:]


def seal(store: Store, secret: Secret | None) -> Store:
    """Return ``store`` sealed with ``secret``, or ``store`` itself if ``secret`` is None."""
    return store if secret is None else SealedStore(store, secret)


class LateStore(WrappedStore):
    """Store that is opened at its first use, if any."""

    def __init__(self, open_store: Callable[[], Store]) -> None:
        self._open = open_store

    @functools.cached_property
    def _store(self) -> Store:  # type: ignore[override]  # an attribute elsewhere
        return self._open()

    @property
    def _is_open(self) -> bool:
        return "_store" in vars(self)

    def __str__(self) -> str:
        return super().__str__() if self._is_open else "a store that is not open yet"

    def check(self) -> None:
        # Another thread may be opening the store, and wait for the other ranks in it.
        if self._is_open:
            super().check()

    def close(self) -> None:
        if self._is_open:
            super().close()

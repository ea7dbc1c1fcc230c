"""Reading of a job's secret, and of other private files that no other user can read."""

from __future__ import annotations

import os
import stat

from collective.contract.secret import LEAST_BYTES, REMEDY, Secret
from collective.errors import ConfigError

__all__ = ["private_bytes", "read"]

_MOST_BYTES = 4096


def private_bytes(name: str, path: str, origin: str) -> bytes:
    """Return the content of a file that no other user can read, at most some kibibytes.

    Args:
        name: name of the setting that gives the path.
        path: path of the file.
        origin: source of the setting.

    Raises:
        ConfigError: the file cannot be read, or another user can read it or may have made it.
    """
    where = f"{name}: {path!r} ({origin})"
    try:
        # Check the file after opening it, so that nobody can exchange it in between. With
        # O_NONBLOCK, the open does not wait at a named pipe that another user has put there.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            content = file.read(_MOST_BYTES + 2) if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        raise ConfigError(
            f"{where}: cannot be read: {error.strerror}. The file must exist on every host, with "
            "mode 0600. Correct the path, or copy the file to this host."
        ) from error
    private = stat.S_ISREG(status.st_mode) and not status.st_mode & 0o077
    if status.st_uid not in (os.geteuid(), 0) or not private:
        raise ConfigError(
            f"{where}: it has owner uid {status.st_uid} and mode "
            f"{stat.S_IMODE(status.st_mode):04o}; it must be a file of uid {os.geteuid()} or root "
            f"that nobody else can read. Run: chmod 600 {path}"
        )
    return content


def read(path: str, origin: str) -> Secret:
    """Return the secret that is in a file.

    Args:
        path: path of the file.
        origin: source of the setting ``secret_file``.

    Raises:
        ConfigError: the file is missing, too short or too long, or other users can read it.
    """
    content = private_bytes("secret_file", path, origin)
    value = content.removesuffix(b"\n").removesuffix(b"\r")
    if not LEAST_BYTES <= len(value) <= _MOST_BYTES:
        raise ConfigError(
            f"secret_file: {path!r} ({origin}): it has {len(value)} bytes; it must have "
            f"{LEAST_BYTES} to {_MOST_BYTES}. {REMEDY}."
        )
    return Secret(value)

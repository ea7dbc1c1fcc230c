"""Where a job's secret is read from: a setting, or a file that nobody else can read."""

from __future__ import annotations

import os
import stat

from collective.contract.secret import LEAST_BYTES, REMEDY, Secret
from collective.errors import ConfigError

__all__ = ["private_bytes", "read"]

_MOST_BYTES = 4096


def private_bytes(name: str, path: str, origin: str) -> bytes:
    """Return what is in a file that nobody else can read, up to some kibibytes.

    Args:
        name: of the setting that names it.
        path: of the file.
        origin: of the setting.

    Raises:
        ConfigError: it cannot be read, or others can read or could have made it.
    """
    where = f"{name}: {path!r} ({origin})"
    try:
        # What is judged is what was opened. A pipe that somebody put there must not hold us up.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            content = file.read(_MOST_BYTES + 2) if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        raise ConfigError(
            f"{where}: cannot be read: {error.strerror}; it must be a file of mode 0600 on each "
            "host. Correct the path, or copy the file there."
        ) from error
    private = stat.S_ISREG(status.st_mode) and not status.st_mode & 0o077
    if status.st_uid not in (os.geteuid(), 0) or not private:
        raise ConfigError(
            f"{where}: owner uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}; it must "
            f"be a file of uid {os.geteuid()} or of root that nobody else can read. "
            f"chmod 600 {path}"
        )
    return content


def read(path: str, origin: str) -> Secret:
    """Return the secret that is in a file.

    Args:
        path: of the file.
        origin: of the setting ``secret_file`` that names it.

    Raises:
        ConfigError: it is missing, too short, or others can read it.
    """
    content = private_bytes("secret_file", path, origin)
    value = content.removesuffix(b"\n").removesuffix(b"\r")
    if not LEAST_BYTES <= len(value) <= _MOST_BYTES:
        raise ConfigError(
            f"secret_file: {path!r} ({origin}): {len(value)} bytes; it must have {LEAST_BYTES} to "
            f"{_MOST_BYTES}. {REMEDY}."
        )
    return Secret(value)

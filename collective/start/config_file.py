"""Files of settings: the search for the settings file, the secret, and whether to trust a file.

A setting can name a library to load or a directory to write to. So this module must not use a
file that another user could have planted above the working directory. Its rules are those of
git's ``safe.directory`` and ssh's ``StrictModes``. Trust depends on the owner of the file and of
its directory, and on who else may write to them.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from collective.control.secret import LEAST_BYTES, REMEDY, Secret
from collective.errors import ConfigError

_NAMES = ("collective.toml", "pyproject.toml")
# A directory with one of these is the root of a project. Files above it belong to other programs.
_ROOTS = ("pyproject.toml", ".git", ".hg", ".svn", ".jj")
# Most pyproject.toml files have no settings for this package. Such a file needs no parser, no
# valid syntax and no trust. The pattern avoids \s, which also matches newlines: the search would
# then take quadratic time on a file that has only empty lines.
_MENTIONED = re.compile(r"^[ \t]*\[[ \t]*tool[ \t]*\.[ \t]*[\"']?collective\b", re.MULTILINE)
# Number of bytes of an untrusted file that are searched for settings of this package, to decide
# whether a warning is due.
_GLANCE = 1 << 16
# Most bytes of a secret.
_MOST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Found:
    """Result of :func:`find`.

    Attributes:
        path: the settings file, or None.
        table: the settings in this file.
        exposed: why the file is not private or does not belong to the user; empty if it is
            private and the user's.
        refused: closer files that were not trusted, each with the reason.
    """

    path: Path | None = None
    table: Mapping[str, Any] = field(default_factory=dict)
    exposed: str = ""
    refused: Mapping[Path, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Text:
    """Text of a file, with the reasons not to trust it and not to call it private, or ""."""

    text: str
    distrust: str = ""
    exposed: str = ""


def find() -> Found:
    """Return the nearest file with settings of this package, from the working directory upwards.

    The search ends at the root of the project, which has a ``pyproject.toml`` or a folder of a
    version control system, or at the home directory. A file is trusted if it and its directory
    belong to the user or root, and nobody else can write to either. A directory with the sticky
    bit, such as /tmp, is allowed, too: others can add files there, but not change this file.

    Raises:
        ConfigError: a trusted file cannot be read or is not valid TOML.
    """
    refused: dict[Path, str] = {}
    for directory in _directories():
        for name in _NAMES:
            path = directory / name
            found = _read_if_there(path)
            if found is None:
                continue
            about_us = name == "collective.toml" or _MENTIONED.search(found.text)
            if found.distrust and about_us:
                refused[path] = found.distrust
            elif about_us and (table := _table(path, found.text)) is not None:
                return Found(path, table, found.exposed, refused)
    return Found(refused=refused)


def distrust(status: os.stat_result, what: str) -> str:
    """Return why another user could have made or changed a file or directory, or "".

    Args:
        status: status of the file or directory, from ``os.stat``.
        what: its name in the reason.
    """
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if _others_write(status) and not sticky:
        return f"others can write to {what} (mode {stat.S_IMODE(status.st_mode):04o})"
    return _stranger(status, what)


def _directories() -> Iterator[Path]:
    try:
        here = Path.cwd()
    except FileNotFoundError:  # the working directory was removed
        return
    home = os.path.realpath(os.path.expanduser("~"))
    for directory in (here, *here.parents):
        yield directory
        if str(directory) == home or any(os.path.lexists(directory / name) for name in _ROOTS):
            return


def _read_if_there(path: Path) -> _Text | None:
    """Return the text of ``path`` and whether to trust it, or None if there is no file."""
    try:
        status = path.lstat()
        real = path
        why_not = distrust(path.parent.stat(), str(path.parent))
        if stat.S_ISLNK(status.st_mode):
            # In a sticky directory, others can create a link to a file of this user or of root.
            # So check the owner of the link, and the directory of the file.
            real = Path(os.path.realpath(path))
            why_not = why_not or _stranger(status, f"the link {path}")
            why_not = why_not or distrust(real.parent.stat(), str(real.parent))
    except OSError:
        return None
    try:
        # _read() checks the open file, which nobody can exchange in between. With O_NONBLOCK,
        # the open does not wait at a named pipe that another user has put there.
        descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        return _Text("", why_not or f"{real} cannot be opened: {error.strerror}")
    with open(descriptor, "rb") as file:
        return _read(real, file, why_not)


def _read(path: Path, file: BinaryIO, why_not: str) -> _Text | None:
    status = os.fstat(file.fileno())
    if stat.S_ISDIR(status.st_mode):
        return None
    if not stat.S_ISREG(status.st_mode):
        return _Text("", f"{path} is not a regular file")
    why_not = why_not or distrust(status, str(path))
    if why_not:
        return _Text(file.read(_GLANCE).decode(errors="replace"), why_not)
    exposed = ""
    if status.st_uid != os.geteuid():
        exposed = f"belongs to uid {status.st_uid}, and this process has uid {os.geteuid()}"
    elif status.st_mode & 0o077:
        exposed = f"has mode {stat.S_IMODE(status.st_mode):04o}, not 0600"
    try:
        return _Text(file.read().decode(), exposed=exposed)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}.") from error


def _stranger(status: os.stat_result, what: str) -> str:
    if status.st_uid in (os.geteuid(), 0):
        return ""
    return f"{what} belongs to uid {status.st_uid}, and this process has uid {os.geteuid()}"


def _others_write(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_group_of_one(status)


def _is_group_of_one(status: os.stat_result) -> bool:
    """Return whether the group contains only the owner.

    Many systems give each user such a group. There, the usual umask makes all new files of a
    user writable by this group.
    """
    try:
        owner, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    return (
        group.gr_name == owner.pw_name
        and group.gr_gid == owner.pw_gid
        and set(group.gr_mem) <= {owner.pw_name}
    )


def _table(path: Path, text: str) -> dict[str, Any] | None:
    """Return the settings of a file, or None if it is not about this package."""
    # Most ranks read no file, and starting them must not take longer for it.
    import tomllib

    try:
        content: dict[str, Any] | None = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}.") from error
    if content is not None and path.name == "pyproject.toml":
        content = content.get("tool", {}).get("collective")
    return content


# -- files that no other user can read ------------------------------------------------------


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


def read_secret(path: str, origin: str) -> Secret:
    """Return the secret that is in a file.

    Args:
        path: path of the file.
        origin: source of the setting ``secret``.

    Raises:
        ConfigError: the file is missing, too short or too long, or other users can read it.
    """
    content = private_bytes("secret", path, origin)
    value = content.removesuffix(b"\n").removesuffix(b"\r")
    if not LEAST_BYTES <= len(value) <= _MOST_BYTES:
        raise ConfigError(
            f"secret: {path!r} ({origin}): it has {len(value)} bytes; it must have "
            f"{LEAST_BYTES} to {_MOST_BYTES}. {REMEDY}."
        )
    return Secret(value)

"""The file that settings come from: where it is looked for, and whether it is believed.

A setting can name a library to load or a directory to write to, so a file that somebody else
could have planted above the working directory must not be read. The rules are those of git's
``safe.directory`` and ssh's ``StrictModes``: what counts is who owns a file and its directory,
and who else may write to them.
"""

from __future__ import annotations

import errno
import grp
import importlib
import os
import pwd
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from collective.errors import ConfigError

__all__ = ["Found", "distrust", "find"]

_NAMES = ("collective.toml", "pyproject.toml")
# Where a project begins; what is above it is not about this program.
_ROOTS = ("pyproject.toml", ".git", ".hg", ".svn", ".jj")
# Most pyproject.toml say nothing about us; they need no parser, no valid syntax and no trust.
# No \s: on a file of nothing but empty lines it would take the square of its length.
_MENTIONED = re.compile(r"^[ \t]*\[[ \t]*tool[ \t]*\.[ \t]*[\"']?collective\b", re.MULTILINE)
# As much of a file that is not believed is looked at to see whether it is about us at all.
_GLANCE = 1 << 16


@dataclass(frozen=True, slots=True)
class Found:
    """What :func:`find` found.

    Attributes:
        path: the file whose settings hold, or None.
        table: its settings.
        exposed: why it is not the user's own and private; empty if it is.
        refused: files that stood nearer and were not believed, and why each was not.
    """

    path: Path | None = None
    table: Mapping[str, Any] = field(default_factory=dict)
    exposed: str = ""
    refused: Mapping[Path, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Text:
    """What a file says, and why it is not believed or not private; empty if it is."""

    text: str
    distrust: str = ""
    exposed: str = ""


def find() -> Found:
    """Return the nearest file about this package, from the working directory upwards.

    The search ends with the root of the project (a ``pyproject.toml`` or a folder of version
    control is there) or with the home directory. A file is believed if the user or root owns
    it and the directory that holds it, and nobody else can write to either; in a directory
    with the sticky bit, such as /tmp, others can add files, but not change this one.

    Raises:
        ConfigError: a file that is believed cannot be read or is not valid TOML.
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
    """Return why somebody else could have made a file or directory what it is, or "".

    Args:
        status: the file's or directory's.
        what: what it is to be called.
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
    """Return what ``path`` says and whether to believe it, or None where there is no file."""
    try:
        status = path.lstat()
        real = path
        why_not = distrust(path.parent.stat(), str(path.parent))
        if stat.S_ISLNK(status.st_mode):
            # In a sticky directory others can put a link to a file of ours or of root's.
            real = Path(os.path.realpath(path))
            why_not = why_not or _stranger(status, f"the link {path}")
            why_not = why_not or distrust(real.parent.stat(), str(real.parent))
    except OSError:
        return None
    try:
        # What is judged below is what was opened: nobody can exchange it in between. A pipe
        # that somebody put there must not hold us up.
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
        return _Text("", f"{path} is no regular file")
    why_not = why_not or distrust(status, str(path))
    if why_not:
        return _Text(file.read(_GLANCE).decode(errors="replace"), why_not)
    exposed = ""
    if status.st_uid != os.geteuid():
        exposed = f"belongs to uid {status.st_uid}, and this is uid {os.geteuid()}"
    elif status.st_mode & 0o077:
        exposed = f"has mode {stat.S_IMODE(status.st_mode):04o}, and not 0600"
    try:
        return _Text(file.read().decode(), exposed=exposed)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}.") from error


def _stranger(status: os.stat_result, what: str) -> str:
    if status.st_uid in (os.geteuid(), 0):
        return ""
    return f"{what} belongs to uid {status.st_uid}, and this is uid {os.geteuid()}"


def _others_write(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_group_of_one(status)


def _is_group_of_one(status: os.stat_result) -> bool:
    """Tell whether the group is the owner's own, as many systems give each user one.

    Where they do, the usual umask makes whatever a user writes writable by that group.
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
    toml = _parser(path)
    try:
        content: dict[str, Any] | None = toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}.") from error
    if content is not None and path.name == "pyproject.toml":
        content = content.get("tool", {}).get("collective")
    return content


def _parser(path: Path) -> Any:
    for module in ("tomllib", "tomli"):  # in the standard library from Python 3.11 on
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError:
            continue
    raise ConfigError(
        f"{path}: reading it takes Python >= 3.11 or the package tomli; pip install tomli"
    )

"""The files that a command is to write: refused before hours of work, and never a traceback."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path

from collective.errors import InvalidArgumentError

__all__ = ["check_directory", "check_file", "written"]


def check_file(option: str, path: Path | None, suffixes: Collection[str] = ()) -> None:
    """Refuse a file that cannot be written.

    Args:
        option: what names it, such as ``--json``.
        path: the file; None where the option is not given.
        suffixes: those that are known, without the dot; empty if any will do.

    Raises:
        InvalidArgumentError: its directory is not there, or it cannot be written, or its
            suffix is unknown.
    """
    if path is None:
        return
    if suffixes and path.suffix[1:].lower() not in suffixes:
        raise InvalidArgumentError(
            f"{option} {path}: its suffix {path.suffix!r} says no known format; one of "
            f"{', '.join(sorted(suffixes))}."
        )
    try:
        _try(path)
    except OSError as error:
        raise InvalidArgumentError(
            f"{option} {path}: it cannot be written: {error.strerror}. Name a file in a directory "
            "that is there and can be written to."
        ) from error


def check_directory(option: str, path: Path) -> None:
    """Make a directory, and refuse it if files cannot be written there.

    Raises:
        InvalidArgumentError: it cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        _try(path / f".collective-{os.getpid()}")
    except OSError as error:
        raise InvalidArgumentError(
            f"{option} {path}: no files can be written there: {error.strerror}. Name a directory "
            "that can be made and written to."
        ) from error


def _try(path: Path) -> None:
    """Open a file as it will be opened later, and leave all as it was."""
    flags = os.O_WRONLY | os.O_CLOEXEC
    try:
        # The kernel decides: permission bits say nothing of quotas or read-only file systems.
        os.close(os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600))
        path.unlink()
    except FileExistsError:
        if path.is_file() or path.is_dir():  # opening a pipe would wait for its reader
            os.close(os.open(path, flags))


def written(option: str, path: Path | None, write: Callable[[Path], object]) -> bool:
    """Write a file that was asked for; say so on standard error if that fails after all.

    Returns:
        Whether all is well, also where no file was asked for.
    """
    if path is None:
        return True
    try:
        write(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            print(f"collective: {option} {path}: {error.strerror}.", file=sys.stderr)
        return False
    return True

"""Output files of a command: unusable files are refused early, and errors have no traceback."""

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
        option: option that names the file, such as ``--json``.
        path: the file; None if the option is not given.
        suffixes: known suffixes without the dot; empty if any suffix will do.

    Raises:
        InvalidArgumentError: its directory does not exist, or the file cannot be written, or its
            suffix is unknown.
    """
    if path is None:
        return
    if suffixes and path.suffix[1:].lower() not in suffixes:
        raise InvalidArgumentError(
            f"{option} {path}: its suffix {path.suffix!r} is not a known format; use one of "
            f"{', '.join(sorted(suffixes))}."
        )
    try:
        _try(path)
    except OSError as error:
        raise InvalidArgumentError(
            f"{option} {path}: it cannot be written: {error.strerror}. Name a file in an existing "
            "directory that you can write to."
        ) from error


def check_directory(option: str, path: Path) -> None:
    """Create a directory, and refuse it if no files can be written there.

    Raises:
        InvalidArgumentError: the directory cannot be created or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        _try(path / f".collective-{os.getpid()}")
    except OSError as error:
        raise InvalidArgumentError(
            f"{option} {path}: no files can be written there: {error.strerror}. Name a directory "
            "that you can create and write to."
        ) from error


def _try(path: Path) -> None:
    """Open a file as it will be opened later, and leave everything as it was."""
    flags = os.O_WRONLY | os.O_CLOEXEC
    try:
        # Ask the kernel: permission bits do not show quotas or read-only file systems.
        os.close(os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600))
        path.unlink()
    except FileExistsError:
        if path.is_file() or path.is_dir():  # opening a pipe would wait for a reader
            os.close(os.open(path, flags))


def written(option: str, path: Path | None, write: Callable[[Path], object]) -> bool:
    """Write a file; report on standard error if that fails in spite of the earlier check.

    Returns:
        False if writing failed; True also if ``path`` is None.
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

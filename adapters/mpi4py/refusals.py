"""Parts of MPI that this module refuses: files and sessions, and how classes refuse."""

from __future__ import annotations

from typing import Any

from .exceptions import CLASSES, refusing
from .handles import Handle

__all__ = ["File", "Session", "refuse_all"]


class File(Handle, kind=True):
    """File that ranks share, refused."""

    __slots__ = ()
    null_error = CLASSES["ERR_FILE"]


class Session(Handle, kind=True):
    """Session, refused."""

    __slots__ = ()
    null_error = CLASSES["ERR_SESSION"]


def refuse_all(cls: Any, names: str, why: str, instead: str) -> None:
    """Let methods of a class refuse, by names that spaces separate."""
    for name in names.split():
        setattr(cls, name, refusing(f"{cls.__name__}.{name}", why, instead))


refuse_all(
    File,
    "Open Delete Create_errhandler",
    "it has no files that ranks share",
    "Use one file for each rank, numpy.memmap of one file, or h5py without MPI on rank 0.",
)
refuse_all(
    Session,
    "Init Create_errhandler",
    "it has one world, which is there from the import on",
    "Use COMM_WORLD.",
)
FILE_NULL = File._constant("FILE_NULL", None)
SESSION_NULL = Session._constant("SESSION_NULL", None)

"""Parts of MPI that this module refuses: files, windows, sessions, intercommunicators."""

from __future__ import annotations

from typing import Any

from .exceptions import CLASSES, refusing
from .handles import Handle

__all__ = ["File", "Session", "Win", "refusing"]


class Win(Handle, kind=True):
    """Window for one-sided communication, refused."""

    __slots__ = ()
    null_error = CLASSES["ERR_WIN"]


class File(Handle, kind=True):
    """File that ranks share, refused."""

    __slots__ = ()
    null_error = CLASSES["ERR_FILE"]


class Session(Handle, kind=True):
    """Session, refused."""

    __slots__ = ()
    null_error = CLASSES["ERR_SESSION"]


def _refuse_all(cls: Any, names: str, why: str, instead: str) -> None:
    for name in names.split():
        setattr(cls, name, refusing(f"{cls.__name__}.{name}", why, instead))


_refuse_all(
    Win,
    "Create Allocate Allocate_shared Create_dynamic Create_keyval Free_keyval Create_errhandler "
    "Put Get Accumulate Get_accumulate Fetch_and_op Compare_and_swap Rput Rget Raccumulate "
    "Rget_accumulate Fence Start Complete Post Wait Test Lock Unlock Lock_all Unlock_all Flush "
    "Flush_all Flush_local Flush_local_all Sync Shared_query Attach Detach",
    "its engine has no one-sided access",
    "Use messages, or collectives; for memory that the ranks of a host share, "
    "multiprocessing.shared_memory.",
)
_refuse_all(
    File,
    "Open Delete Create_errhandler",
    "it has no files that ranks share",
    "Use one file for each rank, numpy.memmap of one file, or h5py without MPI on rank 0.",
)
_refuse_all(
    Session,
    "Init Create_errhandler",
    "it has one world, which is there from the import on",
    "Use COMM_WORLD.",
)
WIN_NULL = Win._constant("WIN_NULL")
FILE_NULL = File._constant("FILE_NULL", None)
SESSION_NULL = Session._constant("SESSION_NULL", None)

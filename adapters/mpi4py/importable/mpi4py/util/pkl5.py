"""Objects of any size, as ``mpi4py.util.pkl5`` offers them.

mpi4py needs this module for objects above two GiB and for receives of unknown length. Messages of
``mpi4py.MPI`` have neither limit here, so these classes only have its names.
"""

from __future__ import annotations

from typing import Any

from .. import MPI
from ..MPI import ANY_SOURCE, ANY_TAG, PROC_NULL, ROOT, Message, Pickle, Request, Status, pickle

__all__ = [
    "ANY_SOURCE", "ANY_TAG", "PROC_NULL", "ROOT", "Comm", "Intercomm", "Intracomm", "Message",
    "Pickle", "Request", "Status", "pickle",
]  # fmt: skip


class Comm(MPI.Comm):  # type: ignore[misc]
    """Communicator."""

    __slots__ = ()


class Intracomm(Comm, MPI.Intracomm):  # type: ignore[misc]
    """Communicator of one group."""

    __slots__ = ()


class Intercomm(Comm, MPI.Intercomm):  # type: ignore[misc]
    """Communicator of two groups; every handle is null."""

    __slots__ = ()


class _BigMPI:
    """Description of a buffer for one message, of any length."""

    blocksize = 1024**3

    def __init__(self) -> None:
        self.cache: dict[int, Any] = {}

    def __enter__(self) -> _BigMPI:
        return self

    def __exit__(self, *error: object) -> None:
        self.cache.clear()

    def __call__(self, buf: Any) -> tuple[Any, int, Any]:
        """Return the buffer, its length in bytes, and their datatype."""
        return buf, memoryview(buf).nbytes, MPI.BYTE


_bigmpi = _BigMPI()

"""``MPI.Win``: memory that ranks of one host share; other windows, files and sessions refuse."""

from __future__ import annotations

import mmap
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from collective.backends.shm.fence import fence

from .communicators import world
from .exceptions import CLASSES, TRANSLATED, MPIError, refuse, refuse_all
from .groups import PROC_NULL, Group
from .handles import Handle, OpaqueObject
from .info import INFO_NULL, Info
from .memory import Bytes, buffer

_LOCK_EXCLUSIVE = 1


class Win(Handle, kind=True):
    """Window: memory that the ranks of one host share.

    It names the communicator, each rank's part of the memory, and their units of displacements.
    """

    __slots__ = ()
    null_error = CLASSES["ERR_WIN"]

    @classmethod
    def Allocate_shared(
        cls, size: int, disp_unit: int = 1, info: Info = INFO_NULL, comm: Any = None
    ) -> Any:
        """Return a window of memory that all ranks of ``comm`` map; all of them call this.

        The ranks' parts follow each other. The memory goes with the last rank that uses it, however
        the ranks end.

        Args:
            size, disp_unit: length of this rank's part in bytes, and its unit of displacements.
            info: not used.
            comm: ranks of one host, such as those of ``Split_type(COMM_TYPE_SHARED)``.

        Raises:
            MissingPartError: the transport shares no memory.
            MPIError: the ranks are on several hosts, or there is no memory.
        """
        context = (world.alone if comm is None else comm)._live
        comm = context.kind._of(context)
        parts = comm.allgather((int(size), int(disp_unit)))
        ends = list(accumulate((nbytes for nbytes, _ in parts), initial=0))
        memory = _shared(context, ends[-1])
        pieces = [memory[start:stop] for start, stop in pairwise(ends)]
        return cls._of(OpaqueObject(comm=comm, parts=pieces, units=[unit for _, unit in parts]))

    def Shared_query(self, rank: int) -> tuple[buffer, int]:
        """Return a rank's part and its unit; with ``PROC_NULL`` the first part with a length."""
        window = self._live
        if rank == PROC_NULL:
            rank = next((r for r, part in enumerate(window.parts) if part.size), 0)
        if not 0 <= rank < len(window.parts):
            raise MPIError(CLASSES["ERR_RANK"], f"rank {rank} of {len(window.parts)}")
        return buffer(window.parts[rank]), window.units[rank]

    def tomemory(self) -> buffer:
        """Return this rank's part."""
        return self.Shared_query(self._live.comm.rank)[0]

    def Get_group(self) -> Group:
        """Return the ranks."""
        return self._live.comm.Get_group()  # type: ignore[no-any-return]

    group = property(Get_group)
    group_rank = property(lambda self: self._live.comm.rank)
    group_size = property(lambda self: self._live.comm.size)

    def Sync(self) -> None:
        """Order this rank's accesses to the memory before the call and after it."""
        self._live  # noqa: B018
        fence(full=True)

    def Fence(self, assertion: int = 0) -> None:
        """Wait for all ranks; each sees what the others wrote before."""
        if not self:
            refuse("Win.Fence", "a refused window leaves WIN_NULL", "Use Allocate_shared.")
        self.Sync()
        self._live.comm.Barrier()

    def Lock(self, rank: int, lock_type: int = _LOCK_EXCLUSIVE, assertion: int = 0) -> None:
        """Begin to access a rank's part, together with others; locks for one rank are refused."""
        if lock_type == _LOCK_EXCLUSIVE:
            refuse(
                "Win.Lock(LOCK_EXCLUSIVE)",
                "the ranks access the memory themselves, so nobody could stop them",
                "Use LOCK_SHARED, and mpi4py.util.sync.Mutex or messages for exclusion.",
            )
        self.Sync()

    def Unlock(self, rank: int) -> None:
        """End the access to a rank's part."""
        self.Sync()

    def Lock_all(self, assertion: int = 0) -> None:
        """Begin to access all parts, together with others."""
        self.Sync()

    Unlock_all = Flush_all = Flush_local_all = Sync
    Flush = Flush_local = Unlock

    def Free(self) -> None:
        """Clear the handle once all ranks have come here. Arrays of the memory stay valid."""
        self._live.comm.Barrier()
        self._inner = None


def _shared(context: Any, nbytes: int) -> Bytes:
    """Return memory that all ranks of a communicator map; all of them call this."""
    size = context.size
    if size == 1:
        return np.zeros(nbytes, np.uint8)
    with TRANSLATED:
        if context.plans is None:
            context.plans = context.world.group(context.ranks)
        core = context.plans
        if not core.capabilities.symmetric_memory:
            refuse(
                "Win.Allocate_shared", f"the transport {core.backend} shares no memory",
                "Use --backend shm, or hierarchical for several hosts.",
            )  # fmt: skip
        share = -(-nbytes // (size * mmap.PAGESIZE)) * mmap.PAGESIZE
        mapped: Any = core.empty(share, "uint8").base
    # The array is this rank's share of a mapping of all shares, those of its host.
    if mapped.size < share * size:
        raise MPIError(CLASSES["ERR_RMA_SHARED"], "Allocate_shared: ranks of several hosts")
    return mapped  # type: ignore[no-any-return]


class File(Handle, kind=True):
    """File that ranks share, refused."""

    __slots__ = ()
    null_error = CLASSES["ERR_FILE"]


class Session(Handle, kind=True):
    """Session, refused."""

    __slots__ = ()
    null_error = CLASSES["ERR_SESSION"]


refuse_all(
    Win,
    "Create Allocate Create_dynamic Create_keyval Free_keyval Create_errhandler Put Get Accumulate "
    "Get_accumulate Fetch_and_op Compare_and_swap Rput Rget Raccumulate Rget_accumulate Start "
    "Complete Post Wait Test Attach Detach",
    "its engine has no one-sided access",
    "Use messages, or collectives; for memory that the ranks of a host share, Allocate_shared.",
)
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
WIN_NULL, FILE_NULL = Win._constant("WIN_NULL"), File._constant("FILE_NULL")
SESSION_NULL = Session._constant("SESSION_NULL")

"""Ranks under ``mpiexec`` or Slurm: MPI's own operations through mpi4py.

MPI is fast and says nothing about peers: a rank that called something else, that is late
or that died lets the others wait for ever, or write over their memory. So every
collective call is two steps. First all ranks *arrive*: a non-blocking reduction of the
calls' digests, polled, so that a deadline, a dead or an aborting peer and a disagreement
are noticed while nothing has been moved yet (:class:`.carrying.Arrival`). Then comes MPI's own
operation, blocking, since everybody is there; in the background the non-blocking one,
polled too, which leaves the core to the program.

Nobody can call a thread back out of a blocking MPI call. If a peer dies meanwhile, a
watchdog ends the process with an explanation (:mod:`.watchdog`), as ``mpiexec`` does by
itself; Open MPI started with ``--with-ft ulfm`` returns an error instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from collective.deadline import Deadline

from . import library
from .cuda_aware import CudaAwareMpi
from .library import Library, describe
from .store import MpiStore
from .transport import MpiTransport

if TYPE_CHECKING:
    from collective.contract.world import World

__all__ = ["Library", "MpiBackend", "MpiStore", "describe"]


class MpiBackend(MpiTransport):
    """Ranks of one MPI communicator, with arrays of the CPU; see the package's docstring."""

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> Any:
        """Join the other ranks; a CUDA-aware library takes arrays of GPUs, too.

        See :meth:`MpiTransport.connect`.
        """
        library.start(deadline)
        if cls is MpiBackend and describe().cuda_aware:
            return CudaAwareMpi.connect(world, deadline)
        return super().connect(world, deadline)

"""The class that is registered as ``mpi``; which one connects is known when MPI has started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import library
from .cuda_aware import CudaAwareMpi
from .transport import MpiTransport

if TYPE_CHECKING:
    from collective.contract.world import World

__all__ = ["MpiBackend"]


class MpiBackend(MpiTransport):
    """Ranks of one MPI communicator, with arrays of the CPU; see the package's docstring."""

    @classmethod
    def connect(cls, world: World, timeout: float) -> Any:
        """Join the other ranks; a CUDA-aware library takes arrays of GPUs, too.

        See :meth:`MpiTransport.connect`.
        """
        library.start(timeout)
        if cls is MpiBackend and library.describe().cuda_aware:
            return CudaAwareMpi.connect(world, timeout)
        return super().connect(world, timeout)

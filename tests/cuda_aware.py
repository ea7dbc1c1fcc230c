"""``mpi`` on a library that takes the memory of GPUs, over the ABI fake.

The fake's memory is the host's, which every MPI can read: only what the library says of itself
is pretended. So these classes are chosen in the place of what it would say.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from fakes import environment
from on_gpu import pretend

from collective import calls, cuda
from collective.backends.mpi.cuda_aware import CudaAwareMpi
from collective.calls import Calls
from collective.point_to_point import PointToPoint
from collective.work import Work
from collective.world import World

__all__ = ["CudaAware"]


class CudaAware(CudaAwareMpi):
    """``mpi`` for arrays that are NumPy's, and taken for a GPU's."""

    name = "mpi-cuda"

    @classmethod
    def connect(cls, world: World, timeout: float) -> CudaAware:
        os.environ.update(environment(host_pointers=1, log=0))
        pretend(world.local_rank)
        _wait_before_reading(world.local_rank)
        return super().connect(world, timeout)


def _wait_before_reading(ordinal: int) -> None:
    """Have calls wait for the stream of their results, as a program does before it reads."""
    if hasattr(Calls._go, "__wrapped__"):
        return
    stream = cuda.device(ordinal).stream(0)

    def waiting(method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            stream.synchronize()
            return result

        # In reports of where a call was made this frame passes for the library's own.
        call.__code__ = call.__code__.replace(co_filename=calls.__file__)
        return call

    Calls._go = waiting(Calls._go)  # type: ignore[method-assign]
    PointToPoint._post = waiting(PointToPoint._post)  # type: ignore[method-assign]
    Work.wait = waiting(Work.wait)  # type: ignore[method-assign]

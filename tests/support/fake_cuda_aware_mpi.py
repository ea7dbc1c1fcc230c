"""``mpi`` on a library that takes the memory of GPUs, over the ABI fake.

The fake's memory is host memory, which every MPI can read. The library does not report that it
takes GPU memory, so tests name these classes instead of the class that such a report selects.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from collective import cuda
from collective.backends.mpi import MpiBackend, library
from collective.backends.mpi.cuda_aware import CudaAwareMpi
from collective.communicator import Communicator
from collective.contract.world import World
from collective.testing import Kind
from collective.testing.kinds import kind_of
from tests.fakes import environment

__all__ = ["CudaAware", "Entry", "OnOddRanks", "OnSomeRanks", "SaysSo", "Staged", "Watched"]


# -- for the public suite ------------------------------------------------------------------------


class CudaAware(CudaAwareMpi):
    """``mpi`` for arrays of the fake's GPUs."""

    name = "mpi-cuda"

    @classmethod
    def connect(cls, world: World, timeout: float) -> Any:
        os.environ.update(environment(delay_us=20, log=0))
        return super().connect(world, timeout)


class OnSomeRanks(CudaAware):
    """CUDA-aware ``mpi`` on ranks 1, 3, …; the other ranks have CPU arrays and plain ``mpi``."""

    name = "mpi-cuda-on-some"

    @classmethod
    def connect(cls, world: World, timeout: float) -> Any:
        return (super() if world.rank % 2 else MpiBackend).connect(world, timeout)


@dataclass(frozen=True)
class OnOddRanks(Kind):
    """GPU arrays on ranks 1, 3, …"""

    def communicator(self, comm: Communicator) -> Any:
        cuda_arrays = kind_of("cuda")
        assert cuda_arrays is not None
        return cuda_arrays.communicator(comm) if comm.rank % 2 else comm


# -- for arrays of the fake ----------------------------------------------------------------------


class Entry(NamedTuple):
    """A call of an MPI method with GPU memory.

    Attributes:
        name: name of the method.
        current: whether the GPU's context was current in the thread.
    """

    name: str
    current: bool


class Watched(CudaAwareMpi):
    """``mpi`` that records the calls of MPI with GPU memory.

    Attributes:
        entries: calls of this process, oldest first.
    """

    name = "mpi-cuda-watched"
    entries: list[Entry] = []  # noqa: RUF012  # one list for each process

    @classmethod
    def connect(cls, world: World, timeout: float) -> Any:
        os.environ.update(environment(delay_us=0))
        return super().connect(world, timeout)

    def __init__(self, module: Any, comm: Any, channel: Any, unlike: Any) -> None:
        super().__init__(module, comm, channel, unlike)
        self._comm = self._messages._comm = _Spy(module, comm)
        self._all_reduce = self._comm.Allreduce


class _Spy:
    def __init__(self, module: Any, comm: Any) -> None:
        self._module = module
        self._made = comm

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._made, name)

        def call(*arguments: Any) -> Any:
            ordinals = {self._ordinal(each) for each in arguments} - {None}
            if ordinals:
                (ordinal,) = ordinals
                context = cuda.device(ordinal).context
                Watched.entries.append(Entry(name, cuda.driver().current() == context))
            return attribute(*arguments)

        return call if callable(attribute) else attribute

    def _ordinal(self, argument: Any) -> int | None:
        """Return the ordinal of the GPU whose memory an argument is in, or None."""
        if type(argument) is not tuple:
            return None
        buffer = argument[0]
        if isinstance(buffer, np.ndarray):
            return cuda.owner_of(buffer.ctypes.data) if buffer.size else None
        assert isinstance(buffer, self._module.buffer)
        return cuda.owner_of(buffer.address) if buffer.nbytes else None


class Staged(MpiBackend):
    """``mpi`` on a library without GPU support."""

    name = "mpi-staged"

    @classmethod
    def connect(cls, world: World, timeout: float) -> Any:
        os.environ.update(environment(delay_us=0))
        return super().connect(world, timeout)


class SaysSo(MpiBackend):
    """``mpi`` on a library that reports, after its start, that it takes the memory of GPUs."""

    name = "mpi-says-so"

    @classmethod
    def connect(cls, world: World, timeout: float) -> Any:
        library._cuda_aware = lambda path: True
        return MpiBackend.connect(world, timeout)

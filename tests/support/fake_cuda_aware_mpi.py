"""``mpi`` on a library that takes the memory of GPUs, over the ABI fake.

The fake's memory is the host's, which every MPI can read: only what the library says of itself
is pretended. So these classes take the place of what it would have chosen.
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
    """The same on ranks 1, 3, …; the others have arrays of the CPU, and a library without."""

    name = "mpi-cuda-on-some"

    @classmethod
    def connect(cls, world: World, timeout: float) -> Any:
        return (super() if world.rank % 2 else MpiBackend).connect(world, timeout)


@dataclass(frozen=True)
class OnOddRanks(Kind):
    """Arrays of GPUs on ranks 1, 3, …"""

    def communicator(self, comm: Communicator) -> Any:
        cuda_arrays = kind_of("cuda")
        assert cuda_arrays is not None
        return cuda_arrays.communicator(comm) if comm.rank % 2 else comm


# -- for arrays of the fake's own -----------------------------------------------------------------


class Entry(NamedTuple):
    """A call of MPI's with memory of a GPU.

    Attributes:
        name: of the method.
        current: whether that GPU's context was current in the thread.
    """

    name: str
    current: bool


class Watched(CudaAwareMpi):
    """``mpi`` that takes note of what MPI is called with.

    Attributes:
        entries: of this process, the oldest first.
    """

    name = "mpi-cuda-watched"
    entries: list[Entry] = []  # noqa: RUF012  # one a process

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
        found = getattr(self._made, name)

        def call(*arguments: Any) -> Any:
            ordinals = {self._ordinal(each) for each in arguments} - {None}
            if ordinals:
                (ordinal,) = ordinals
                context = cuda.device(ordinal).context
                Watched.entries.append(Entry(name, cuda.driver().current() == context))
            return found(*arguments)

        return call if callable(found) else found

    def _ordinal(self, argument: Any) -> int | None:
        """Return the GPU in whose memory an argument is, None for all others."""
        if type(argument) is not tuple:
            return None
        given = argument[0]
        if isinstance(given, np.ndarray):
            return cuda.owner_of(given.ctypes.data) if given.size else None
        assert isinstance(given, self._module.buffer)
        return cuda.owner_of(given.address) if given.nbytes else None


class Staged(MpiBackend):
    """``mpi`` as it is on a library that knows no GPUs."""

    name = "mpi-staged"

    @classmethod
    def connect(cls, world: World, timeout: float) -> Any:
        os.environ.update(environment(delay_us=0))
        return super().connect(world, timeout)


class SaysSo(MpiBackend):
    """``mpi`` on a library that says, once it is started, that it takes the memory of GPUs."""

    name = "mpi-says-so"

    @classmethod
    def connect(cls, world: World, timeout: float) -> Any:
        library._cuda_aware = lambda path: True
        return MpiBackend.connect(world, timeout)

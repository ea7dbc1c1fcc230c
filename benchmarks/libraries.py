"""Each library's own calls, as its users write them, behind one small interface.

Runs inside the ranks, in the environment that holds the library: nothing here but NumPy
is imported before it is needed. Every array holds float32, every reduction is a sum.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Gloo", "Library", "Memcpy", "Mpi", "Ours", "Unsupported", "open_library"]

# A reference to code, whatever it returns.
Call = Callable[[], object]


class Unsupported(Exception):
    """Raised for an operation that a library does not have."""


class Library(ABC):
    """One library as one rank sees it; ranks are connected when it has been made.

    Attributes:
        rank, size: which of how many this is.
        version: name and version, as the library tells them.
    """

    rank: int
    size: int
    version: str

    def new(self, count: int, memory: str) -> Any:
        """Return the library's own array of ``count`` float32, uninitialised.

        Args:
            count: elements.
            memory: ``"ordinary"``, or ``"symmetric"`` where the library has that.
        """
        return np.empty(count, np.float32)

    def numpy(self, x: Any) -> np.ndarray[Any, Any]:
        """Return NumPy over the memory of an array that :meth:`new` made."""
        array: np.ndarray[Any, Any] = x
        return array

    @abstractmethod
    def calls(self, x: Any, y: Any) -> dict[str, Call]:
        """Return each operation on input ``x`` and output ``y``.

        ``all_reduce`` and ``broadcast`` work in place, on ``x``. ``send_recv`` sends
        ``x`` to the neighbour and waits until as much has come back into ``y``.
        """

    def call(self, operation: str, x: Any, y: Any) -> Call:
        """Return one operation.

        Raises:
            Unsupported: the library does not have it.
        """
        found = self.calls(x, y).get(operation)
        if found is None:
            raise Unsupported(f"{self.version} has no {operation}")
        return found

    @abstractmethod
    def close(self) -> None:
        """Leave the other ranks."""

    def _ping_pong(self, send: Callable[[int], object], recv: Callable[[int], object]) -> Call:
        """Return a round trip between ranks 0 and 1, 2 and 3, …; an odd last one rests."""
        peer = self.rank ^ 1

        def ping() -> None:
            send(peer)
            recv(peer)

        def pong() -> None:
            recv(peer)
            send(peer)

        if peer >= self.size:
            return lambda: None
        return pong if self.rank % 2 else ping


class Ours(Library):
    """This project's library, over one of its transports."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size
        import collective

        self.version = f"collective {collective.__version__} ({comm.backend})"

    def new(self, count: int, memory: str) -> Any:
        if memory == "symmetric":
            return self._comm.empty(count)
        return super().new(count, memory)

    def calls(self, x: Any, y: Any) -> dict[str, Call]:
        comm = self._comm
        return {
            "all_reduce": lambda: comm.all_reduce(x, out=x),
            "broadcast": lambda: comm.broadcast(x, out=x),
            "all_gather": lambda: comm.all_gather(x, out=y),
            "reduce_scatter": lambda: comm.reduce_scatter(x, out=y),
            "all_to_all": lambda: comm.all_to_all(x, out=y),
            "send_recv": self._ping_pong(
                lambda peer: comm.send(x, peer), lambda peer: comm.recv(y, peer)
            ),
        }

    def close(self) -> None:
        self._comm.close()


class Mpi(Library):
    """mpi4py: the upper-case calls, which take buffers."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = MPI.COMM_WORLD
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        told = MPI.Get_library_version().splitlines()[0].partition(",")[0]
        self.version = " ".join(told.replace("Version:", "").split())

    def calls(self, x: Any, y: Any) -> dict[str, Call]:
        mpi, comm = self._mpi, self._comm
        return {
            "all_reduce": lambda: comm.Allreduce(mpi.IN_PLACE, x),
            "broadcast": lambda: comm.Bcast(x),
            "all_gather": lambda: comm.Allgather(x, y),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(x, y),
            "all_to_all": lambda: comm.Alltoall(x, y),
            "send_recv": self._ping_pong(
                lambda peer: comm.Send(x, peer), lambda peer: comm.Recv(y, peer)
            ),
        }

    def close(self) -> None:
        self._mpi.Finalize()


class Gloo(Library):
    """torch.distributed over Gloo; ranks meet in a file below ``folder``."""

    def __init__(self, folder: Path) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'gloo'}",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(minutes=2),
        )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.version = f"torch {torch.__version__} (gloo)"

    def new(self, count: int, memory: str) -> Any:
        return self._torch.empty(count, dtype=self._torch.float32)

    def numpy(self, x: Any) -> np.ndarray[Any, Any]:
        array: np.ndarray[Any, Any] = x.numpy()
        return array

    def calls(self, x: Any, y: Any) -> dict[str, Call]:
        dist = self._dist
        return {
            "all_reduce": lambda: dist.all_reduce(x),
            "broadcast": lambda: dist.broadcast(x, 0),
            "all_gather": lambda: dist.all_gather_into_tensor(y, x),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(y, x),
            "all_to_all": lambda: dist.all_to_all_single(y, x),
            "send_recv": self._ping_pong(
                lambda peer: dist.send(x, peer), lambda peer: dist.recv(y, peer)
            ),
        }

    def close(self) -> None:
        self._dist.destroy_process_group()


class Memcpy(Library):
    """No communication at all: each rank copies its own memory, at the same time."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.version = f"NumPy {np.__version__} (copyto)"

    def calls(self, x: Any, y: Any) -> dict[str, Call]:
        return {"copy": lambda: np.copyto(y, x)}

    def close(self) -> None:
        """Do nothing: nobody was joined."""


def open_library(name: str, folder: Path) -> Library:
    """Connect this process with the other ranks of the library's job.

    Args:
        name: ``"shm"``, ``"threads"``, ``"mpi"``, ``"gloo"`` or ``"memcpy"``.
        folder: private to this job.
    """
    if name == "mpi":
        return Mpi()
    if name == "gloo":
        return Gloo(folder)
    if name == "memcpy":
        return Memcpy()
    import collective

    return Ours(collective.init(name))

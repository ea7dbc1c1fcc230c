"""The calls of each library, as its users write them, behind one small interface.

This module runs in the ranks, in the environment of the library. So it imports only NumPy at first,
and everything else when it is needed. Every reduction is a sum.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from collective.inner import ArrayFramework, encoded, framework

# A function without arguments that makes one call; its result may be anything.
Call = Callable[[], Any]


class Unsupported(Exception):
    """Raised for an operation that a library does not have."""


class BenchLibrary(ABC):
    """Library as one rank sees it. The ranks are connected when the object has been made.

    Attributes:
        rank, size: this rank, and number of ranks.
        version: name and version, as the library reports them.
        framework: framework of the arrays that the library gets.
        refusals: exceptions for an operation that the library cannot do; it raises them on all
            ranks and before anything is sent.
    """

    rank: int
    size: int
    version: str
    framework: ArrayFramework = framework("numpy")
    refusals: tuple[type[Exception], ...] = (Exception,)

    def use(self, name: str) -> None:
        """Use the arrays of another framework from now on.

        Raises:
            Unsupported: the framework cannot be used here.
        """
        found = framework(name)
        reason = found.unavailable()
        if reason:
            raise Unsupported(reason)
        self.framework = found

    def new(self, count: int, memory: str, dtype: str = "float32") -> Any:
        """Return an array of ``count`` zeros.

        Args:
            count: number of elements.
            memory: ``"ordinary"``, or ``"symmetric"`` if the library has symmetric memory.
            dtype: name of the dtype.

        Raises:
            Unsupported: the framework has no such dtype.
        """
        if dtype not in self.framework.dtypes():
            raise Unsupported(f"{self.framework.name} has no {dtype}")
        return self.framework.make(encoded(np.zeros(count, np.int64), dtype), dtype, _ALL)

    @abstractmethod
    def calls(self, x: Any, y: Any) -> dict[str, Call]:
        """Return each operation on input ``x`` and output ``y``.

        ``all_reduce`` and ``broadcast`` work in place, on ``x``. ``send_recv`` sends
        ``x`` to the neighbour and waits until the neighbour's answer is in ``y``.
        """

    def call(self, operation: str, x: Any, y: Any) -> Call:
        """Return one operation.

        Raises:
            Unsupported: the library does not have it.
        """
        call = self.calls(x, y).get(operation)
        if call is None:
            raise Unsupported(f"{self.version} has no {operation}")
        return call

    def synchronize(self) -> None:
        """Wait until the work that was enqueued on the GPU is done."""
        name = self.framework.name
        if name.startswith("torch"):
            import torch

            torch.cuda.synchronize()
        else:
            import cupy

            cupy.cuda.Device().synchronize()

    @abstractmethod
    def close(self) -> None:
        """Leave the other ranks."""

    def _ping_pong(self, send: Callable[[int], object], recv: Callable[[int], Any]) -> Call:
        """Return a round trip between ranks 0 and 1, 2 and 3, …; an odd last rank is idle."""
        peer = self.rank ^ 1

        def ping() -> Any:
            send(peer)
            return recv(peer)

        def pong() -> Any:
            received = recv(peer)
            send(peer)
            return received

        if peer >= self.size:
            return lambda: None
        return pong if self.rank % 2 else ping

    @property
    def _ring(self) -> tuple[int, int]:
        """The ranks that this rank sends to and receives from in ``sendrecv``."""
        return (self.rank + 1) % self.size, (self.rank - 1) % self.size


_ALL = (slice(None),)


class Ours(BenchLibrary):
    """The library ``collective``, over one of its transports."""

    def __init__(self, comm: Any) -> None:
        import collective
        from collective import DeviceError, DtypeError, UnsupportedError

        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.version = f"collective {collective.__version__} ({comm.backend})"
        self.refusals = (UnsupportedError, DtypeError, DeviceError)

    def new(self, count: int, memory: str, dtype: str = "float32") -> Any:
        made = super().new(count if memory == "ordinary" else 1, memory, dtype)
        if memory == "ordinary":
            return made
        symmetric = self.comm.empty(count, dtype, like=made)
        self.framework.fill(symmetric, made)
        return symmetric

    def calls(self, x: Any, y: Any) -> dict[str, Call]:
        comm = self.comm
        dst, src = self._ring
        return {
            "all_reduce": lambda: comm.all_reduce(x, out=x),
            "broadcast": lambda: comm.broadcast(x, out=x),
            "reduce": lambda: comm.reduce(x, out=y),
            "scatter": lambda: comm.scatter(x, out=y),
            "gather": lambda: comm.gather(x, out=y),
            "all_gather": lambda: comm.all_gather(x, out=y),
            "reduce_scatter": lambda: comm.reduce_scatter(x, out=y),
            "all_to_all": lambda: comm.all_to_all(x, out=y),
            "scan": lambda: comm.scan(x, out=y),
            "sendrecv": lambda: comm.sendrecv(x, dst, src, out=y),
            "send_recv": self._ping_pong(
                lambda peer: comm.send(x, peer), lambda peer: comm.recv(y, peer)
            ),
            "barrier": lambda: comm.barrier(),
        }

    def close(self) -> None:
        self.comm.close()


class Memcpy(BenchLibrary):
    """Copy of memory without communication: each rank copies its own, all at the same time."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.version = f"NumPy {np.__version__} (copyto)"

    def calls(self, x: Any, y: Any) -> dict[str, Call]:
        return {"copy": lambda: np.copyto(y, x)}

    def close(self) -> None:
        """Do nothing: there is no connection to other ranks."""


# -- the libraries that are compared with ours, each with its own calls and defaults ---------------


class Mpi(BenchLibrary):
    """mpi4py, by its upper-case methods, which take buffers."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = MPI.COMM_WORLD
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        version = MPI.Get_library_version().splitlines()[0].partition(",")[0]
        self.version = " ".join(version.replace("Version:", "").split())

    def calls(self, x: Any, y: Any) -> dict[str, Call]:
        mpi, comm = self._mpi, self._comm
        dst, src = self._ring
        return {
            "all_reduce": lambda: comm.Allreduce(mpi.IN_PLACE, x),
            "broadcast": lambda: comm.Bcast(x),
            "reduce": lambda: comm.Reduce(x, y),
            "scatter": lambda: comm.Scatter(x, y),
            "gather": lambda: comm.Gather(x, y),
            "all_gather": lambda: comm.Allgather(x, y),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(x, y),
            "all_to_all": lambda: comm.Alltoall(x, y),
            "scan": lambda: comm.Scan(x, y),
            "sendrecv": lambda: comm.Sendrecv(x, dst, recvbuf=y, source=src),
            "send_recv": self._ping_pong(
                lambda peer: comm.Send(x, peer), lambda peer: comm.Recv(y, peer)
            ),
            "barrier": lambda: comm.Barrier(),
        }

    def close(self) -> None:
        self._mpi.Finalize()


class TorchDistributed(BenchLibrary):
    """torch.distributed over Gloo and, for GPUs, NCCL, or over our plug-in.

    Args:
        folder: folder for the file at which the ranks meet.
        rank, size: this rank, and number of ranks; by default RANK and WORLD_SIZE.
        plugin: whether our plug-in makes the calls.
    """

    def __init__(
        self, folder: Path, rank: int | None = None, size: int | None = None, *,
        plugin: bool = False,
    ) -> None:  # fmt: skip
        import torch
        import torch.distributed as dist

        self._dist = dist
        self.rank = int(os.environ["RANK"]) if rank is None else rank
        self.size = int(os.environ["WORLD_SIZE"]) if size is None else size
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(self.rank % torch.cuda.device_count())
            backend = "cpu:gloo,cuda:nccl"
        if plugin:
            import collective.adapters.torch  # noqa: F401  registers it

            backend = "collective"
        dist.init_process_group(
            backend,
            init_method=f"file://{folder / 'meeting'}",
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(minutes=2),
        )
        if plugin:
            group: Any = dist.group.WORLD
            backend += f" over {group.comm.backend}"
        self.version = f"torch {torch.__version__} ({backend})"
        self.framework = framework("torch")

    def calls(self, x: Any, y: Any) -> dict[str, Call]:
        dist = self._dist
        pieces = [
            None if whole is None else list(whole.chunk(self.size)) for whole in (x, y)
        ]  # views: a call with a root takes a list with a tensor for each rank
        dst, src = self._ring

        def sendrecv() -> None:
            both = [dist.P2POp(dist.isend, x, dst), dist.P2POp(dist.irecv, y, src)]
            for work in dist.batch_isend_irecv(both):
                work.wait()

        def reduce() -> Any:
            dist.reduce(x, 0)  # torch.distributed reduces in place only
            return x

        return {
            "all_reduce": lambda: dist.all_reduce(x),
            "broadcast": lambda: dist.broadcast(x, 0),
            "reduce": reduce,
            "scatter": lambda: dist.scatter(y, pieces[0], 0),
            "gather": lambda: dist.gather(x, pieces[1], 0),
            "all_gather": lambda: dist.all_gather_into_tensor(y, x),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(y, x),
            "all_to_all": lambda: dist.all_to_all_single(y, x),
            "sendrecv": sendrecv,
            "send_recv": self._ping_pong(
                lambda peer: dist.send(x, peer), lambda peer: dist.recv(y, peer)
            ),
            "barrier": lambda: dist.barrier(),
        }

    def close(self) -> None:
        self._dist.destroy_process_group()


def open_library(name: str, folder: Path) -> BenchLibrary:
    """Connect this process with the other ranks of the library's job.

    Args:
        name: ``"mpi4py"``, ``"torch"``, ``"torch-plugin"``, ``"memcpy"`` or one of our
            transports.
        folder: folder that only this job uses.
    """
    rivals: dict[str, Callable[[], BenchLibrary]] = {
        "mpi4py": Mpi, "torch": lambda: TorchDistributed(folder),
        "torch-plugin": lambda: TorchDistributed(folder, plugin=True), "memcpy": Memcpy,
    }  # fmt: skip
    if name in rivals:
        return rivals[name]()
    import collective

    return Ours(collective.init(name))

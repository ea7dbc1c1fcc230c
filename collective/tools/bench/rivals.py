"""The libraries that are compared with ours, each with its own calls and defaults."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from collective.testing.frameworks import framework

from .contestants import ALONE
from .libraries import BenchLibrary, Call, Memcpy, Ours, Unsupported

__all__ = ["ChainerMN", "Gloo", "Mpi", "open_library"]


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


class Gloo(BenchLibrary):
    """torch.distributed over Gloo, or NCCL for GPUs.

    Args:
        folder: folder for the file at which the ranks meet.
        rank, size: this rank, and number of ranks; by default RANK and WORLD_SIZE.
    """

    def __init__(self, folder: Path, rank: int | None = None, size: int | None = None) -> None:
        import torch
        import torch.distributed as dist

        self._dist = dist
        self.rank = int(os.environ["RANK"]) if rank is None else rank
        self.size = int(os.environ["WORLD_SIZE"]) if size is None else size
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(self.rank % torch.cuda.device_count())
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend,
            init_method=f"file://{folder / 'meeting'}",
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(minutes=2),
        )
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

    def result(self, x: Any, y: Any, returned: Any) -> Any:
        return x if returned is x else super().result(x, y, returned)

    def close(self) -> None:
        self._dist.destroy_process_group()


_CHAINERMN = ("int32", "int64", "float16", "float32", "float64")


class ChainerMN(BenchLibrary):
    """ChainerMN over its communicator ``naive``; results are new arrays.

    Its calls exchange shapes as pickles before the arrays. It has no reduce, reduce-scatter or
    scan. Where other libraries cut an array, it takes a tuple.
    """

    def __init__(self) -> None:
        # Without the adapter `import chainer` fails beside a current NumPy.
        import collective.adapters.chainer  # noqa: F401

        import chainer  # isort: skip
        import chainermn  # isort: skip

        self.comm = chainermn.create_communicator("naive")
        self.rank, self.size = self.comm.rank, self.comm.size
        self.version = f"ChainerMN {chainer.__version__} (naive)"

    def new(self, count: int, memory: str, dtype: str = "float32") -> Any:
        # For any other dtype only the sender would raise, and the receiver would wait.
        if dtype not in _CHAINERMN:
            raise Unsupported(f"{self.version} has no {dtype}")
        return super().new(count, memory, dtype)

    def calls(self, x: Any, y: Any) -> dict[str, Call]:
        comm = self.comm
        pieces = () if x is None else tuple(np.array_split(x, self.size))
        rows = None if x is None else x.reshape(self.size, -1) if not x.size % self.size else x
        dst, src = self._ring

        def sendrecv() -> Any:
            # ChainerMN has no such call. Odd ranks receive first, so that no cycle of ranks waits,
            # also if the number of ranks is odd.
            if self.rank % 2:
                received = comm.recv(src, 0)
                comm.send(x, dst, 0)
                return received
            comm.send(x, dst, 0)
            return comm.recv(src, 0)

        return {
            "all_reduce": lambda: comm.allreduce(x),
            "broadcast": lambda: comm.bcast(x if self.rank == 0 else None),
            "scatter": lambda: comm.scatter(rows),
            "gather": lambda: comm.gather(x),
            "all_gather": lambda: comm.allgather(x),
            "all_to_all": lambda: comm.alltoall(pieces),
            "sendrecv": sendrecv,
            "send_recv": self._ping_pong(
                lambda peer: comm.send(x, peer, 0), lambda peer: comm.recv(peer, 0)
            ),
        }

    def result(self, x: Any, y: Any, returned: Any) -> Any:
        return np.concatenate(returned) if isinstance(returned, tuple) else returned

    def close(self) -> None:
        self.comm.finalize()


def open_library(name: str, folder: Path) -> BenchLibrary:
    """Connect this process with the other ranks of the library's job.

    Args:
        name: ``"mpi4py"``, ``"torch"``, ``"chainermn"``, ``"memcpy"`` or one of our transports.
        folder: folder that only this job uses.
    """
    rivals: dict[str, Callable[[], BenchLibrary]] = {
        "mpi4py": Mpi, "torch": lambda: Gloo(folder), "chainermn": ChainerMN, "memcpy": Memcpy,
        ALONE: Memcpy,
    }  # fmt: skip
    if name in rivals:
        return rivals[name]()
    import collective

    return Ours(collective.init(name))

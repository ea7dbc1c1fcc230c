"""Wrong calls: a type checker must report each line marked ``# error``, and no other line."""

import numpy as np
import numpy.typing as npt

import collective
from collective import Communicator
from collective.testing import RankPool, run_ranks

Floats = npt.NDArray[np.float32]


def operators(comm: Communicator, x: Floats) -> None:
    comm.all_reduce(x, op="mean")  # error
    comm.reduce(x, op="SUM")  # error
    comm.scan(x, op="maxloc")  # error
    comm.all_reduce(x, op=np.add)  # error
    comm.reduce_scatter(x, op=1)  # error
    comm.all_reduce(x, op=collective.ReduceOp.SUM)  # error
    collective.all_reduce(x, op=None)  # error
    comm.all_reduce(x, order="size")  # error


def arguments(comm: Communicator, x: Floats) -> None:
    comm.all_reduce("text")  # error
    comm.all_reduce(None)  # error
    comm.all_reduce({1, 2})  # error
    comm.all_reduce(3.5, out=3.5)  # error
    comm.scatter(3)  # error
    comm.all_to_all(3)  # error
    comm.send(3, 1)  # error
    comm.broadcast(x, root="0")  # error
    comm.broadcast(None, like="tensorflow")  # error
    comm.split("red")  # error
    comm.grid("2x2")  # error


def names(comm: Communicator, x: Floats) -> None:
    comm.allreduce(x)  # error
    comm.bcast(x)  # error
    comm.send(x, dest=1)  # error
    comm.all_reduce(x, 0)  # error
    collective.Allreduce(x)  # error


def results(comm: Communicator, x: Floats, y: npt.NDArray[np.int64]) -> None:
    comm.all_reduce(x, async_op=True).sum()  # error
    comm.reduce(x).sum()  # error
    comm.split(1 if comm.rank else None).barrier()  # error
    total: npt.NDArray[np.int64] = comm.all_reduce(x)  # error
    count: int = comm.all_reduce(0.5)  # error
    print(total, count, comm.all_reduce(y, out=x).astype(np.int64))


def total(comm: Communicator, count: int) -> int:
    return comm.all_reduce(count)


def arguments_of_ranks(pool: RankPool) -> None:
    run_ranks(2, total)  # error
    run_ranks(2, total, "3")  # error
    run_ranks(2, total, 3, 4)  # error
    run_ranks(2, total, "3", backend="shm")  # error
    run_ranks("2", total, 3)  # error
    run_ranks(2, total(None, 3))  # error
    pool.run(total, "3")  # error
    pool.run(total, "3", timeout=5.0)  # error

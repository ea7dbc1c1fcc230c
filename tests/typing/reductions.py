"""Types of arguments and results of reductions, as type checkers must see them."""

from typing import assert_type

import numpy as np
import numpy.typing as npt

import collective
from collective import Communicator, Work
from collective.ops import Op

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


class Tensor:
    """An array of another framework, with a shape and a dtype."""

    shape: tuple[int, ...]
    dtype: str


def arrays(comm: Communicator, x: Floats, y: Integers, z: Tensor) -> None:
    assert_type(comm.all_reduce(x), Floats)
    assert_type(comm.all_reduce(y, op="max", order="rank"), Integers)
    assert_type(comm.all_reduce(z, op=collective.premul_sum(0.5), timeout=1.0), Tensor)
    assert_type(comm.all_reduce(np.float32(1)), np.float32)
    assert_type(comm.scan(x), Floats)
    assert_type(comm.reduce_scatter(x, counts=[1, 2]), Floats)
    assert_type(collective.all_reduce(x), Floats)


def results_go_to_out(comm: Communicator, x: Floats, z: Tensor) -> None:
    assert_type(comm.all_reduce(x, out=x), Floats)
    assert_type(comm.all_reduce(x, out=z), Tensor)
    assert_type(comm.all_reduce(x, out=z, async_op=True), Work[Tensor])


def only_the_root_has_it(comm: Communicator, x: Floats) -> Floats:
    total = comm.reduce(x, root=1)
    assert_type(total, Floats | None)
    return x if total is None else total


def in_the_background(comm: Communicator, x: Floats, later: bool) -> Floats:
    work = comm.all_reduce(x, async_op=True)
    assert_type(work, Work[Floats])
    assert_type(comm.reduce(x, async_op=True), Work[Floats | None])
    assert_type(comm.barrier(async_op=True), Work[None])
    assert_type(comm.scan(x, async_op=later), Floats | Work[Floats])
    return work.wait()


def scalars_of_numpy(comm: Communicator, loss: np.float32, total: np.float64) -> None:
    assert_type(comm.all_reduce(loss), np.float32)
    assert_type(comm.broadcast(loss), np.float32)
    assert_type(comm.all_gather(loss), np.ndarray[tuple[int], np.dtype[np.float32]])
    assert_type(comm.all_gather(total), np.ndarray[tuple[int], np.dtype[np.float64]])
    work = comm.all_gather(loss, async_op=True)
    assert_type(work, Work[np.ndarray[tuple[int], np.dtype[np.float32]]])
    assert_type(comm.gather(loss), np.ndarray[tuple[int], np.dtype[np.float32]] | None)


def configured_operators(comm: Communicator, x: Floats, name: Op) -> None:
    assert_type(comm.all_reduce(x, op=name), Floats)
    assert_type(comm.reduce_scatter(x, op=name), Floats)


def numbers(comm: Communicator, loss: float, count: int, found: bool) -> None:
    assert_type(comm.all_reduce(loss), float)
    assert_type(comm.all_reduce(count), int)
    assert_type(comm.all_reduce(found, op="land"), bool)
    assert_type(comm.reduce(loss), float | None)
    assert_type(comm.all_gather(count), list[int])
    assert_type(comm.gather(loss), list[float] | None)


def structures(comm: Communicator, x: Floats, loss: float) -> None:
    assert_type(comm.all_reduce([x, x]), list[Floats])
    assert_type(comm.all_reduce({"w": x}), dict[str, Floats])
    assert_type(comm.all_reduce((x, loss)), tuple[Floats, float])
    assert_type(comm.all_reduce([loss, 1.0]), list[float])

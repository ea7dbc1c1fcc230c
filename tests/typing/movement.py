"""Types of calls that move arrays and objects, and of groups, as type checkers must see them."""

from typing import assert_type

import numpy as np
import numpy.typing as npt

import collective
from collective import NULL, Communicator, Grid, Work

Floats = npt.NDArray[np.float32]


def one_and_all(comm: Communicator, x: Floats) -> None:
    mine = x if comm.rank == 0 else None
    assert_type(comm.broadcast(x), Floats)
    assert_type(comm.broadcast(mine), Floats)
    assert_type(comm.broadcast(None, out=x), Floats)
    assert_type(comm.scatter(mine, axis=1), Floats)
    assert_type(comm.scatter(mine, async_op=True), Work[Floats])
    assert_type(comm.gather(x, root=1), Floats | None)
    assert_type(comm.all_gather(x), Floats)
    assert_type(comm.all_gather([x], counts=[1, 2]), list[Floats])
    assert_type(comm.all_to_all(x, async_op=True), Work[Floats])


def messages(comm: Communicator, x: Floats) -> None:
    comm.send(x, 1, tag=3)
    comm.send({"x": [x]}, NULL)
    assert_type(comm.send(x, 1, async_op=True), Work[None])
    assert_type(comm.recv(x, collective.ANY_SOURCE), Floats)
    assert_type(comm.recv(x, 1, async_op=True), Work[Floats])
    before, after = comm.grid((None, 2)).neighbours(0)
    assert_type(comm.sendrecv(x, after, before), Floats)
    assert_type(comm.sendrecv(x, after, before, out=x, async_op=True), Work[Floats])
    assert_type(collective.sendrecv([x], 1, 0), list[Floats])


def objects(comm: Communicator, name: str) -> None:
    assert_type(comm.all_gather_object(name), list[str])
    assert_type(comm.gather_object(name), list[str] | None)
    assert_type(comm.broadcast_object(name if comm.rank == 0 else None), str)
    assert_type(comm.scatter_object([name, name]), str)


def groups(comm: Communicator, color: int | None) -> None:
    assert_type(comm.split(1), Communicator)
    assert_type(comm.split(None), None)
    assert_type(comm.split(color), Communicator | None)
    assert_type(collective.split(1), Communicator)
    assert_type(comm.group([0, 1]), Communicator)
    assert_type(comm.grid(4), Grid[Communicator])
    assert_type(comm.grid((2, None), periodic=(True, False)).along(0), Communicator)


def memory(comm: Communicator, x: Floats) -> None:
    assert_type(comm.empty((2, 3), like=x), Floats)
    comm.empty(3, np.float32).fill(0)
    with collective.init("shm", timeout=3.0, check="always") as world:
        assert_type(world, Communicator)

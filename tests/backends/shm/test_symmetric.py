"""Calls on symmetric memory of shm, which work in place from 24 KiB up."""

from __future__ import annotations

import numpy as np
import pytest

import collective
from collective.contract.world import World
from collective.errors import MismatchError
from collective.memory.arrays import adapter_of
from collective.start.stores import FileStore
from tests.support.on_ranks import on_ranks, ranks_of

some = ranks_of(("shm", 2), ("shm", 3), timeout=20.0)

# Above the size from which symmetric memory is read in place; not a multiple of the numbers of
# ranks.
N = 20_011


@on_ranks("some")
def test_all_gather_from_own_part_of_output_succeeds(comm) -> None:
    full = comm.empty(comm.size * N)
    mine = full[comm.rank * N : (comm.rank + 1) * N]
    for step in range(4):
        full[:] = -1
        mine[:] = comm.rank + step
        comm.barrier()
        comm.all_gather(mine, out=full)
        expected = np.repeat(np.arange(comm.size) + step, N)
        np.testing.assert_array_equal(full, expected)
        comm.barrier()


@on_ranks("some")
def test_uneven_lengths_after_even_lengths_are_noticed(comm) -> None:
    x, out = comm.empty(N)[:], comm.empty(comm.size * N)[:]
    x[:] = comm.rank
    for _ in range(2):
        comm.all_gather(x, out=out)
    short = np.full(N - 1, comm.rank, np.float32)
    if comm.rank == 0:  # the same arrays as before, while the arrays of the other ranks are shorter
        with pytest.raises(collective.ShapeError):
            comm.all_gather(x, out=out)
    else:
        gathered = comm.all_gather(short)
        assert gathered.shape == (comm.size * N - comm.size + 1,)
    comm.all_gather(x, out=out)
    np.testing.assert_array_equal(out, np.repeat(np.arange(comm.size), N))


@on_ranks("some")
def test_calls_succeed_after_mismatch(comm) -> None:
    x = comm.empty(N)[:]
    for step in range(6):
        x[:] = comm.rank + 1
        if step % 2:
            with pytest.raises(MismatchError, match="all_reduce"):
                comm.all_reduce(x, op="max" if comm.rank else "sum", out=x)
            assert (x == comm.rank + 1).all(), "a refused call wrote to its output"
        comm.all_reduce(x, out=x)
        assert (x == sum(r + 1 for r in range(comm.size))).all(), step


@on_ranks("some")
def test_averages_and_factors_are_applied(comm) -> None:
    x = comm.empty(N, "float16")[:]
    for step in range(3):
        x[:] = comm.rank + step
        comm.all_reduce(x, op="avg", out=x)
        mean = np.mean([r + step for r in range(comm.size)])
        np.testing.assert_allclose(x, mean, rtol=2e-3)
        x[:] = comm.rank + 1
        comm.all_reduce(x, op=collective.premul_sum(comm.rank + step), out=x)
        np.testing.assert_allclose(x, sum((r + 1) * (r + step) for r in range(comm.size)))


def test_tensors_in_symmetric_memory_are_located(tmp_path):
    torch = pytest.importorskip("torch")
    world = World(0, 1, 0, 1, "here", "none", "job", FileStore(tmp_path / "store"))
    with collective.connect(world, "shm") as comm:
        for number, dtype in enumerate(("float32", "bfloat16"), 1):
            tensor = comm.empty(N, dtype, like="torch")
            assert comm.inner.transport._heap.locate(_flat(tensor))[:2] == (number, 0), dtype
            assert comm.inner.transport._heap.locate(_flat(tensor[16:]))[1] > 0, dtype
            assert comm.inner.transport._heap.locate(_flat(torch.ones(N)))[0] == 0


def _flat(tensor):
    return adapter_of(tensor).view(tensor)[0].ravel()

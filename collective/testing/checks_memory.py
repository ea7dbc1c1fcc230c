"""Checks of comm.empty(): memory that a transport may reduce in place."""

from __future__ import annotations

import numpy as np

from collective import AllocationError, Communicator

from .checks import Case, RankFactory, check, on_each_rank
from .samples import LARGE, assert_same, dtypes_of, expected, has, regions, values

_COUNTS: list[Case] = [{"count": count} for count in (60, 24_000, LARGE)]


@on_each_rank(_COUNTS)
def check_empty(comm: Communicator, count: int) -> None:
    """Check collectives on arrays of empty(): in place, from one into another, from views."""
    count -= count % comm.size
    inputs = [values("float32", count, rank, 110) for rank in range(comm.size)]
    mine, total = inputs[comm.rank], expected("sum", inputs)
    x, y = comm.empty(count), comm.empty((count,), "float32")
    assert (x.dtype.name, x.shape) == ("float32", (count,)), f"empty: {x.dtype}{x.shape}"
    what = f"on {count} elements of empty()"
    for turn in range(3):
        x[:] = mine
        comm.all_reduce(x, out=x)
        assert_same(x, total, f"all_reduce in place {what}, turn {turn}")
    x[:] = mine
    assert_same(comm.all_reduce(x), total, f"all_reduce to a new array {what}")
    comm.all_reduce(x, out=y)
    assert_same(y, total, f"all_reduce from one to another {what}")
    assert_same(x, mine, f"the input of an all_reduce {what}")
    comm.all_reduce(mine.copy(), out=y)
    assert_same(y, total, f"all_reduce from an ordinary array {what}")
    root = comm.size - 1
    x[:] = mine
    comm.broadcast(x, root=root, out=x)
    assert_same(x, inputs[root], f"broadcast in place {what}")
    x[:] = mine
    part = list(regions(count, comm.size))[comm.rank]
    assert_same(comm.reduce_scatter(x), total[part], f"reduce_scatter {what}")
    assert_same(comm.all_gather(x), np.concatenate(inputs), f"all_gather {what}")
    pieces = np.concatenate([other[part] for other in inputs])
    assert_same(comm.all_to_all(x), pieces, f"all_to_all {what}")
    reduced = comm.reduce(x, root=root, out=y)
    if comm.rank == root:
        assert_same(reduced, total, f"reduce {what}")
    gathered = comm.gather(x, root=0)
    if comm.rank == 0:
        assert_same(gathered, np.concatenate(inputs), f"gather {what}")
    assert_same(comm.scan(x), expected("sum", inputs[: comm.rank + 1]), f"scan {what}")
    assert_same(x, mine, f"the input of the calls {what}")
    found = comm.all_reduce(x, op="avg")
    # NCCL divides before it adds, so a sum of 0 may come out as a small number.
    close = np.allclose(found, total / comm.size, atol=1e-6)
    assert close, f"all_reduce(avg) {what}"


@on_each_rank()
def check_empty_views(comm: Communicator) -> None:
    """Check that views of empty() at any offset reduce correctly, and leave the rest untouched."""
    whole = comm.empty(90_001, "int32")
    for start, stop in ((0, 90_001), (1, 2), (17, 50_000), (40_000, 90_001), (5, 5)):
        count = stop - start
        inputs = [values("int32", count, rank, 111) for rank in range(comm.size)]
        # No rank may write to the whole array while a peer still reads it.
        comm.barrier()
        whole[:] = -5
        whole[start:stop] = inputs[comm.rank]
        comm.barrier()
        view = whole[start:stop]
        comm.all_reduce(view, out=view)
        total = expected("sum", inputs)
        assert_same(whole[start:stop], total, f"all_reduce of elements {start} to {stop}")
        around = np.delete(whole, slice(start, stop))
        assert_same(around, np.full_like(around, -5), f"the memory beside {start} to {stop}")
    grid = whole[:90_000].reshape(300, 300)
    comm.barrier()
    inputs = [values("int32", (300, 300), rank, 112) for rank in range(comm.size)]
    grid[:] = inputs[comm.rank]
    found = comm.all_reduce(grid[:, 10:20])
    assert_same(found, expected("sum", inputs)[:, 10:20], "all_reduce of columns")
    # Each rank passes another view: the memory has to be symmetric, the arguments need not be.
    comm.barrier()
    at = 1000 * comm.rank
    whole[:] = np.arange(90_001)
    found = comm.all_reduce(whole[at : at + 30_000])
    wanted = comm.size * np.arange(30_000, dtype=np.int32) + 1000 * sum(range(comm.size))
    assert_same(found, wanted.astype(np.int32), "all_reduce of views at different offsets")


@on_each_rank(at_least=2)
def check_empty_mixed(comm: Communicator) -> None:
    """Check that ranks with memory of empty() and ranks without can share a call."""
    for count in (50, 24_000, LARGE):
        special = comm.empty(count)
        other = comm.empty(count + 5)[5:]
        for choice in range(3):
            kind = (comm.rank + choice) % 3
            x = special if kind == 0 else other if kind == 1 else np.empty(count, np.float32)
            inputs = [values("float32", count, rank, 113 + choice) for rank in range(comm.size)]
            x[:] = inputs[comm.rank]
            comm.all_reduce(x, out=x)
            assert_same(x, expected("sum", inputs), f"all_reduce of mixed memory, {count}")
            x[:] = inputs[comm.rank]
            root = choice % comm.size
            comm.broadcast(x, root=root, out=x)
            assert_same(x, inputs[root], f"broadcast of mixed memory, {count}")
            found = comm.all_gather(x[: count // 2])
            wanted = np.tile(inputs[root][: count // 2], comm.size)
            assert_same(found, wanted, f"all_gather of mixed memory, {count}")


@on_each_rank()
def check_empty_kinds(comm: Communicator) -> None:
    """Check that empty() gives every dtype and shape, again and again."""
    for dtype in dtypes_of(comm.capabilities.dtypes, "iuf"):
        if dtype == "bfloat16" and not has("ml_dtypes"):
            continue
        x = comm.empty((3, 5), dtype)
        assert (x.shape, str(x.dtype)) == ((3, 5), dtype), f"empty: {x.dtype}{x.shape}"
        x[...] = comm.rank + 1
        comm.all_reduce(x, out=x)
        total = comm.size * (comm.size + 1) // 2
        assert (np.asarray(x, np.float64) == total).all(), f"all_reduce of empty() of {dtype}"
    for shape in (0, (), (0, 4), (2, 1, 3)):
        wanted = (shape,) if isinstance(shape, int) else shape
        assert comm.empty(shape).shape == wanted, f"empty({shape!r})"
    for turn in range(30):
        x = comm.empty(20_000 + turn, np.float64)
        x[:] = turn
        comm.all_reduce(x, out=x)
        assert x[0] == x[-1] == turn * comm.size, f"memory {turn} of a row of empty()"
        del x


@on_each_rank()
def check_empty_refused(comm: Communicator) -> None:
    """Check that an empty() too large raises AllocationError on every rank and breaks nothing."""
    # More than memory has, and more than an address can express.
    for count in (1 << 59, (1 << 61) - 1):
        text = _refusal(comm, count)
        assert "rank" in text, f"the error does not name the rank that it is about: {text}"
    x = comm.empty(5)
    x[:] = 1
    assert_same(comm.all_reduce(x), np.full(5, comm.size, np.float32), "after empty() was refused")


def _refusal(comm: Communicator, count: int) -> str:
    try:
        comm.empty(count, "float32")
    except AllocationError as error:
        return str(error)
    raise AssertionError(f"empty({count}) of float32 returned")


@check()
def check_empty_outlives(factory: RankFactory, size: int) -> None:
    """Check that an array of empty() stays valid when its communicator is closed."""
    for rank, (first, last) in enumerate(factory.run(size, _empty_outlives, fresh=True)):
        assert (first, last) == (rank, rank), f"after close() rank {rank} reads {first}, {last}"


def _empty_outlives(comm: Communicator) -> tuple[float, float]:
    x = comm.empty(100_000)
    x[:] = comm.rank
    comm.barrier()
    comm.close()
    return float(x[0]), float(x[-1])

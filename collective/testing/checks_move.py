"""Checks of the calls that move data: every root, dtype, size and layout, even and uneven."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from collective import Communicator

from .checks import Case, RankFactory, check, on_each_rank, roots
from .samples import (
    LARGE,
    LAYOUTS,
    SHAPES,
    Array,
    assert_same,
    dtypes_at,
    dtypes_of,
    joined,
    laid_out,
    pieces,
    plain,
    regions,
    values,
)

_ROWS: tuple[tuple[int, ...], ...] = ((0,), (1,), (7,), (12, 2), (13, 3), (1001,))
_BY_LAYOUT: list[Case] = [{"layout": layout} for layout in LAYOUTS]


def _sizes(size: int) -> list[int]:
    """Return a different length for each rank; one of the lengths is 0."""
    return [3 * ((rank + 1) % size) for rank in range(size)]


@on_each_rank(roots)
def check_broadcast(comm: Communicator, root: int) -> None:
    """Check that a broadcast gives all ranks the root's array: as a new one, in out, for None."""
    for dtype in dtypes_at(root, comm, dtypes_of(comm.capabilities.dtypes)):
        for shape in SHAPES:
            wanted = values(dtype, shape, root, 30)
            what = f"broadcast(root={root}) of {dtype}{list(shape)}"
            mine = wanted if comm.rank == root else values(dtype, shape, comm.rank, 31)
            assert_same(comm.broadcast(mine, root=root), wanted, what)
            found = comm.broadcast(wanted if comm.rank == root else None, root=root, like=wanted)
            assert_same(found, wanted, f"{what}, None elsewhere")
    for count in (5, LARGE):
        wanted = values("float32", count, root, 32)
        mine = values("float32", count, comm.rank, 32)
        assert comm.broadcast(mine, root=root, out=mine) is mine
        assert_same(mine, wanted, f"broadcast(root={root}) of {count} elements in place")


@on_each_rank(roots)
def check_scatter(comm: Communicator, root: int) -> None:
    """Check that a scatter gives rank r piece r of the root's array, cut as by array_split."""
    for dtype in dtypes_at(root, comm, dtypes_of(comm.capabilities.dtypes)):
        for shape in _ROWS:
            whole = values(dtype, shape, root, 33)
            part = list(regions(shape[0], comm.size))[comm.rank]
            found = comm.scatter(whole if comm.rank == root else None, root=root, like=whole)
            what = f"scatter(root={root}) of {dtype}{list(shape)}"
            assert_same(plain(found), plain(whole)[part], what)
    whole = values("int16", (sum(_sizes(comm.size)), 3), root, 34)
    mine = pieces(_sizes(comm.size))[comm.rank]
    if comm.rank == root:
        by_counts = comm.scatter(whole, root=root, counts=_sizes(comm.size))
        by_axis = comm.scatter(whole.T, root=root, counts=_sizes(comm.size), axis=1)
        zero = comm.scatter(np.array(5.0), root=root)
    else:
        by_counts, by_axis, zero = (comm.scatter(None, root=root) for _ in range(3))
    assert_same(by_counts, whole[mine], f"scatter(root={root}) by counts")
    assert_same(by_axis, whole.T[:, mine], f"scatter(root={root}) by counts along axis 1")
    wanted = np.array([5.0] if comm.rank == 0 else [])
    assert_same(zero, wanted, f"scatter(root={root}) of a 0-d array")
    # The second length is cut evenly, so the other ranks know the root's length from their ``out``.
    for length in (LARGE, LARGE - LARGE % comm.size):
        large = values("float32", length, root, 35)
        part = list(regions(length, comm.size))[comm.rank]
        out = np.zeros(len(large[part]), np.float32)
        assert comm.scatter(large if comm.rank == root else None, root=root, out=out) is out
        assert_same(out, large[part], f"a large scatter(root={root})")


@on_each_rank(roots)
def check_gather(comm: Communicator, root: int) -> None:
    """Check that a gather joins the arrays in rank order at the root; other ranks get None."""
    dtypes = dtypes_at(root, comm, dtypes_of(comm.capabilities.dtypes))
    _hold_joined(comm, partial(comm.gather, root=root), f"gather(root={root})", dtypes, root)


def _hold_joined(
    comm: Communicator, gather: Callable[..., Any], call: str, dtypes: Sequence[str], root: int
) -> None:
    """Check that ``root`` gets the ranks' arrays, joined, and that other ranks get None."""
    ranks = range(comm.size)

    def hold(inputs: list[Array], what: str, axis: int = 0, **options: Any) -> None:
        found = gather(inputs[comm.rank], axis=axis, **options)
        if comm.rank == root:
            wanted = joined([plain(x) for x in inputs], axis)
            assert_same(plain(found), wanted, f"{call} {what}")
        else:
            assert found is None, f"{call} {what}: rank {comm.rank} got {found!r}"

    for dtype in dtypes:
        for shape in SHAPES:
            hold([values(dtype, shape, r, 36) for r in ranks], f"of {dtype}{list(shape)}")
    sizes = _sizes(comm.size)
    uneven = [values("int64", (sizes[r], 3), r, 37) for r in ranks]
    hold(uneven, f"of lengths {sizes}")
    hold(uneven, f"of lengths {sizes}, given as counts", counts=sizes)
    for axis in (1, -1):
        hold([x.T for x in uneven], f"of lengths {sizes} along axis {axis}", axis=axis)
    hold([values("float32", LARGE, r, 41) for r in ranks], "of large arrays")
    hold([values("float32", LARGE + r, r, 38) for r in ranks], "of large uneven arrays")


@on_each_rank()
def check_all_gather(comm: Communicator) -> None:
    """Check that all_gather joins the arrays at every rank, even and uneven, along any axis."""
    dtypes = dtypes_of(comm.capabilities.dtypes)
    _hold_joined(comm, comm.all_gather, "all_gather", dtypes, comm.rank)
    whole = np.zeros(comm.size * 9, np.float32)
    own = whole[9 * comm.rank : 9 * comm.rank + 9]
    own[:] = values("float32", 9, comm.rank, 43)
    comm.all_gather(own, out=whole)
    wanted = joined([values("float32", 9, r, 43) for r in range(comm.size)])
    assert_same(whole, wanted, "all_gather in place: the input is its part of the output")


@on_each_rank()
def check_all_to_all(comm: Communicator) -> None:
    """Check that all_to_all sends piece j to rank j: cut evenly or by counts, along any axis."""
    ranks = range(comm.size)

    def hold(inputs: list[Array], cuts: list[list[slice]], what: str, **options: Any) -> None:
        wanted = [plain(inputs[r])[cuts[r][comm.rank]] for r in ranks]
        found = comm.all_to_all(inputs[comm.rank], **options)
        assert_same(plain(found), np.concatenate(wanted), f"all_to_all {what}")

    def even(length: int) -> list[list[slice]]:
        return [regions(length, comm.size) for _ in ranks]

    for dtype in dtypes_of(comm.capabilities.dtypes):
        for shape in _ROWS:
            inputs = [values(dtype, shape, r, 44) for r in ranks]
            hold(inputs, even(shape[0]), f"of {dtype}{list(shape)}")
    hold([values("float32", LARGE, r, 45) for r in ranks], even(LARGE), "of large arrays")
    counts = [[(r + 2 * to) % 4 for to in ranks] for r in ranks]
    cuts = [pieces(row) for row in counts]
    inputs = [values("int32", (sum(counts[r]), 2), r, 46) for r in ranks]
    hold(inputs, cuts, "by counts that differ", counts=counts[comm.rank])
    turned = comm.all_to_all(inputs[comm.rank].T, counts=counts[comm.rank], axis=1)
    wanted = [inputs[r][cuts[r][comm.rank]].T for r in ranks]
    assert_same(turned, np.concatenate(wanted, 1), "all_to_all by counts along axis 1")


@on_each_rank(_BY_LAYOUT)
def check_moves_of_layouts(comm: Communicator, layout: str) -> None:
    """Check that moving calls take arrays that are not contiguous, and write to such arrays."""
    shape = (2 * comm.size, 3)
    inputs = [values("complex64", shape, rank, 47) for rank in range(comm.size)]
    mine = laid_out(layout, inputs[comm.rank])
    root = comm.size - 1
    every = joined(inputs)
    part = list(regions(shape[0], comm.size))[comm.rank]
    what = f"of a {layout} array to one"

    def out(shape: tuple[int, ...]) -> Array:
        return laid_out(layout, np.zeros(shape, np.complex64))

    target = out(shape)
    comm.broadcast(mine, root=root, out=target)
    assert_same(target, inputs[root], f"broadcast {what}")
    target = out((2, 3))
    comm.scatter(mine, root=root, out=target)
    assert_same(target, inputs[root][part], f"scatter {what}")
    target = out(every.shape)
    comm.gather(mine, root=root, out=target)
    if comm.rank == root:
        assert_same(target, every, f"gather {what}")
    target = out(every.shape)
    comm.all_gather(mine, out=target)
    assert_same(target, every, f"all_gather {what}")
    target = out(shape)
    comm.all_to_all(mine, out=target)
    assert_same(target, joined([x[part] for x in inputs]), f"all_to_all {what}")
    assert_same(mine, inputs[comm.rank], f"the input, {layout}")


@check(roots, at_least=2)
def check_barrier(factory: RankFactory, size: int, *, root: int) -> None:
    """Check that no rank leaves a barrier before the last, here rank ``root``, has come."""
    times = factory.run(size, _barrier, root)
    for turn in range(len(times[0])):
        latest = max(rank[turn][0] for rank in times)
        early = [r for r, rank in enumerate(times) if rank[turn][1] < latest]
        if early:
            raise AssertionError(f"barrier: ranks {early} left before the late rank {root} came")


def _barrier(comm: Communicator, late: int) -> list[tuple[float, float]]:
    times = []
    for pause in (0.03, 0.01, 0.0):
        if comm.rank == late:
            time.sleep(pause)
        arrived = time.monotonic()
        comm.barrier()
        times.append((arrived, time.monotonic()))
    return times

"""Every call of a communicator over ``nccl`` on the ABI fake, with arrays of several libraries."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fakes")

from fakes import Fake
from gpu_programs import (
    Both,
    Framework,
    Gpus,
    calls_of_nccl,
    framework,
    new_stream,
    of_device,
    of_fake,
    ordinal_of,
    read,
    settled,
    warm,
)
from nccl_places import Run, needs_compiler, pools

import collective
from collective.memory.device_array import DeviceArray

pytestmark = needs_compiler

HAS_TORCH = importlib.util.find_spec("torch") is not None
KINDS = ["fake", "device"] + ["torch"] * HAS_TORCH
OTHERS = [("fake", "device"), ("device", "fake")]
OTHERS += [("torch", "device"), ("device", "torch")] * HAS_TORCH


@pytest.fixture(scope="module")
def nccl() -> Iterator[Run]:
    yield from pools(Gpus)


@pytest.fixture(scope="module")
def both() -> Iterator[Run]:
    yield from pools(Both)


def numbers(rank: int, *shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """Return what a rank contributes: small whole numbers, which every type holds exactly."""
    count = int(np.prod(shape, dtype=int))
    return ((np.arange(count) * 7 + rank * 3) % 4 + 1).reshape(shape).astype(dtype)


def everyone(comm: Any, *shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.stack([numbers(rank, *shape, dtype=dtype) for rank in range(comm.size)])


# -- reductions -----------------------------------------------------------------------------------


def reduces(comm: Any, kind: str) -> None:
    warm(comm)
    rank, size = comm.rank, comm.size
    every = everyone(comm, 5, 2)
    folds = {"sum": np.sum, "prod": np.prod, "min": np.min, "max": np.max, "avg": np.mean}
    with framework(comm, kind) as fw:
        for op, fold in folds.items():
            x = fw.of(every[rank])
            Fake().clear_log()
            # NCCL multiplies by 1 / n before it sums.
            rtol = 1e-6 if op == "avg" else 0.0
            fw.check(comm.all_reduce(x, op=op), fold(every, axis=0).astype(np.float32), rtol)
            assert len(calls_of_nccl()) == 1, calls_of_nccl()
            fw.check_same(x, every[rank])
        x = fw.of(every[rank])
        assert comm.all_reduce(x, out=x) is x
        np.testing.assert_array_equal(fw.read(x), every.sum(0))
        scaled = sum((r + 1) * 0.5 * every[r] for r in range(size))
        op = collective.premul_sum(0.5 * (rank + 1))
        fw.check(comm.all_reduce(fw.of(every[rank]), op=op), scaled)
        for root in range(size):
            got = comm.reduce(fw.of(every[rank]), root=root)
            if rank == root:
                fw.check(got, every.sum(0))
            else:
                assert got is None
        # In parts: as array_split cuts, by counts, along an axis, strided.
        parts = np.array_split(every.sum(0), size)
        fw.check(comm.reduce_scatter(fw.of(every[rank])), parts[rank])
        counts = [5] + [0] * (size - 1)
        got = comm.reduce_scatter(fw.of(every[rank]), counts=counts)
        fw.check(got, every.sum(0)[: 5 if rank == 0 else 0])
        turned = fw.of(every[rank].T)
        fw.check(comm.reduce_scatter(turned, axis=1), parts[rank].T)
        fw.check(comm.all_reduce(turned), every.sum(0).T)
        wide = everyone(comm, 4, 6)
        fw.check(comm.all_reduce(fw.of(wide[rank][::2, ::3])), wide.sum(0)[::2, ::3])
    settled(comm)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_reductions(nccl: Run, size: int, kind: str) -> None:
    nccl(size, reduces, kind, shared=True)


def staged(comm: Any, kind: str) -> None:
    """What NCCL lacks goes through host memory, and comes back to the GPU."""
    warm(comm)
    rank, size = comm.rank, comm.size
    ints = everyone(comm, 6, dtype=np.int32)
    floats = everyone(comm, 6)
    first = collective.user_op(lambda a, b: a * 2 + b, commutative=False)
    Fake().clear_log()
    with framework(comm, kind) as fw:
        fw.check(comm.all_reduce(fw.of(ints[rank]), op="bxor"), np.bitwise_xor.reduce(ints))
        fw.check(comm.all_reduce(fw.of(floats[rank]), order="rank"), floats.sum(0))
        fw.check(comm.scan(fw.of(floats[rank])), floats[: rank + 1].sum(0))
        shorts = ints.astype(np.int16)
        fw.check(comm.all_reduce(fw.of(shorts[rank]), op="max"), shorts.max(0))
        flags = ints % 2 == 0
        fw.check(comm.all_reduce(fw.of(flags[rank]), op="land"), flags.all(0))
        complexes = floats + 1j * floats
        fw.check(comm.all_reduce(fw.of(complexes[rank])), complexes.sum(0))
        got = comm.all_reduce(fw.of(floats[rank]), op=first, order="rank")
        expected = floats[0]
        for other in floats[1:]:
            expected = expected * 2 + other
        fw.check(got, expected)
        x = fw.of(floats[rank])
        assert comm.all_reduce(x, out=x, order="rank") is x
        np.testing.assert_array_equal(fw.read(x), floats.sum(0))
        strided = fw.of(np.repeat(floats[rank], 2)[::2])
        assert comm.scan(strided, out=strided) is strided
        np.testing.assert_array_equal(fw.read(strided), floats[: rank + 1].sum(0))
        got = comm.reduce(fw.of(ints[rank]), op="bor", root=1)
        if rank == 1:
            fw.check(got, np.bitwise_or.reduce(ints))
        parts = np.array_split(np.bitwise_and.reduce(ints), size)
        fw.check(comm.reduce_scatter(fw.of(ints[rank]), op="band"), parts[rank])
        work = comm.all_reduce(fw.of(ints[rank]), op="bor", async_op=True)
        fw.check(work.wait(), np.bitwise_or.reduce(ints))
        work = comm.scan(x, out=x, async_op=True)
        assert work.synchronize() is x
        every = [floats.sum(0)] * (rank + 1)
        np.testing.assert_array_equal(fw.read(x), np.sum(every, 0))
        assert not calls_of_nccl(), calls_of_nccl()
        # Of a structure NCCL gets what it can.
        x = {"bits": fw.of(shorts[rank]), "f": fw.of(floats[rank])}
        tree = comm.all_reduce(x, op="max")
        fw.check(tree["bits"], shorts.max(0))
        fw.check(tree["f"], floats.max(0))
        assert len(calls_of_nccl()) == 1, calls_of_nccl()
    settled(comm)


@pytest.mark.parametrize("kind", KINDS)
def test_reductions_that_nccl_lacks(nccl: Run, kind: str) -> None:
    nccl(3, staged, kind, shared=True)


def small_floats(comm: Any, kind: str, dtype: str) -> None:
    import ml_dtypes

    warm(comm)
    every = everyone(comm, 8, dtype=getattr(ml_dtypes, dtype))
    with framework(comm, kind) as fw:
        x = fw.of(every[comm.rank])
        Fake().clear_log()
        got = comm.all_reduce(x)
        codes = {"bfloat16": 9, "float8_e4m3fn": 10, "float8_e5m2": 11}
        (call,) = calls_of_nccl()
        assert f"datatype={codes[dtype]}," in call, call
        fw.check(got, every.astype(np.float32).sum(0))
        assert np.dtype(fw.read(got).dtype) == every.dtype
        fw.check(comm.all_gather(x), every.ravel().astype(np.float32))
        assert comm.all_reduce(x, op="max", out=x) is x
        expected = every.astype(np.float32).max(0)
        np.testing.assert_array_equal(fw.read(x).astype(np.float32), expected)
    settled(comm)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("kind", KINDS)
def test_types_that_numpy_lacks(nccl: Run, kind: str, dtype: str) -> None:
    nccl(2, small_floats, kind, dtype, shared=True)


# -- moves ----------------------------------------------------------------------------------------


def moves(comm: Any, kind: str) -> None:
    warm(comm)
    rank, size = comm.rank, comm.size
    every = everyone(comm, 4, 3)
    uneven = [numbers(r, r + 1, 2) for r in range(size)]
    lengths = [r + 1 for r in range(size)]
    with framework(comm, kind) as fw:
        x = fw.of(every[rank])
        for root in range(size):
            got = comm.broadcast(x, root=root)
            assert (got is x) == (rank == root)
            if rank != root:
                fw.check(got, every[root])
            got = comm.broadcast(x if rank == root else None, root=root, like=x)
            if rank != root:
                fw.check(got, every[root])
            got = comm.gather(x, root=root)
            if rank == root:
                fw.check(got, every.reshape(-1, 3))
            else:
                assert got is None
            got = comm.gather(fw.of(uneven[rank]), root=root, counts=lengths)
            if rank == root:
                fw.check(got, np.concatenate(uneven))
        fw.check_same(x, every[rank])
        fw.check(comm.all_gather(x), every.reshape(-1, 3))
        fw.check(comm.all_gather(x, counts=[4] * size), every.reshape(-1, 3))
        fw.check(comm.all_gather(x, axis=1), np.concatenate(list(every), axis=1))
        fw.check(comm.all_gather(fw.of(uneven[rank])), np.concatenate(uneven))
        fw.check(comm.all_gather(fw.of(uneven[rank]), counts=lengths), np.concatenate(uneven))
        turned = fw.of(every[rank].T)
        fw.check(comm.all_gather(turned), np.concatenate([each.T for each in every]))
        got = comm.gather(turned, axis=1, root=0)
        if rank == 0:
            fw.check(got, np.concatenate([each.T for each in every], axis=1))
        exchanged = np.concatenate([np.array_split(e, size)[rank] for e in every])
        fw.check(comm.all_to_all(x), exchanged)
        to = [[(r + j) % 2 + 1 for j in range(size)] for r in range(size)]
        rows = [numbers(r, sum(to[r]), 2) for r in range(size)]
        cuts = [np.split(rows[r], np.cumsum(to[r])[:-1]) for r in range(size)]
        got = comm.all_to_all(fw.of(rows[rank]), counts=to[rank])
        fw.check(got, np.concatenate([cuts[r][rank] for r in range(size)]))
        right, left = (rank + 1) % size, (rank - 1) % size
        fw.check(comm.sendrecv(x, right, left, like=x), every[left])
        out = fw.of(np.zeros((4, 3), np.float32))
        assert comm.sendrecv(x, right, left, out=out, tag=5) is out
        np.testing.assert_array_equal(fw.read(out), every[left])
        fw.check(comm.sendrecv(x, rank, rank, like=x), every[rank])
        if rank == 0:
            comm.send(turned, 1)
        elif rank == 1:
            fw.check(comm.recv(None, 0, like=x), every[0].T)
    settled(comm)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_moves(nccl: Run, size: int, kind: str) -> None:
    nccl(size, moves, kind, shared=True)


def scatters(comm: Any, kind: str) -> None:
    """Who does not know what comes makes room for it on a stream of his own."""
    warm(comm)
    rank, size = comm.rank, comm.size
    every = everyone(comm, 4, 3)
    with framework(comm, kind) as fw:
        x = fw.of(every[rank])
        for root in range(size):
            cut = np.array_split(every[root], size)
            got = comm.scatter(x if rank == root else None, root=root, like=x)
            fw.check(got, cut[rank])
            by = [4] + [0] * (size - 1)
            got = comm.scatter(x, root=root, counts=by if rank == root else None)
            fw.check(got, every[root][: 4 if rank == 0 else 0])
            got = comm.scatter(x if rank == root else None, root=root, axis=1, like=x)
            fw.check(got, np.array_split(every[root], size, axis=1)[rank])
        got = comm.scatter([x, fw.of(numbers(rank, 2))] if rank == 0 else None, like=x)
        fw.check(got[0], np.array_split(every[0], size)[rank])
        fw.check(got[1], np.array_split(numbers(0, 2), size)[rank])
        part = np.array_split(every[0], size)[rank]
        out = fw.of(np.zeros(part.shape, np.float32))
        assert comm.scatter(x, root=0, out=out) is out
        np.testing.assert_array_equal(fw.read(out), part)
    settled(comm)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_scatter(nccl: Run, size: int, kind: str) -> None:
    nccl(size, scatters, kind, shared=True)


def empties(comm: Any, kind: str) -> None:
    """Arrays without elements and without dimensions."""
    warm(comm)
    rank, size = comm.rank, comm.size
    with framework(comm, kind) as fw:
        none = fw.of(np.zeros((0, 3), np.float32))
        for call in (
            lambda: comm.all_reduce(none), lambda: comm.broadcast(none, root=0),
            lambda: comm.all_gather(none), lambda: comm.reduce_scatter(none),
            lambda: comm.all_to_all(none), lambda: comm.scan(none), lambda: comm.scatter(none),
            lambda: comm.sendrecv(none, (rank + 1) % size, (rank - 1) % size, like=none),
            lambda: comm.all_reduce(none, async_op=True).wait(),
            lambda: comm.all_gather(none, async_op=True).wait(),
            lambda: comm.all_reduce([none, fw.of(np.ones(2, np.float32))])[0],
            lambda: comm.all_reduce([fw.of(np.ones(2, np.float32)), none], async_op=True).wait()[1],
        ):  # fmt: skip
            fw.check_shape(call(), (0, 3))
        out = fw.of(np.zeros((0, 3), np.float32))
        assert comm.all_reduce(none, out=out) is out
        assert comm.all_reduce(none, out=out, order="rank") is out
        got = comm.gather(none, root=0)
        assert (got is None) == (rank != 0)
        # Some have something and some have not.
        some = numbers(rank, 3 if rank == 1 else 0)
        fw.check(comm.all_gather(fw.of(some)), numbers(1, 3))
        scalar = fw.of(np.float32(rank + 1).reshape(()))
        fw.check(comm.all_reduce(scalar), np.float32(sum(range(size + 1))))
        assert tuple(comm.all_reduce(scalar).shape) == ()
        fw.check(comm.all_gather(scalar), np.arange(1, size + 1, dtype=np.float32))
        fw.check_shape(comm.broadcast(scalar, root=0), ())
        got = comm.sendrecv(scalar, (rank + 1) % size, (rank - 1) % size, like=scalar)
        fw.check(got, np.float32((rank - 1) % size + 1))
    settled(comm)


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_without_elements_or_dimensions(nccl: Run, kind: str) -> None:
    nccl(2, empties, kind, shared=True)


def structures(comm: Any, kind: str) -> None:
    warm(comm)
    rank, size = comm.rank, comm.size
    shapes = [(3,), (2, 2), (), (5,)]
    every = [[numbers(r, *shape, dtype=np.float32) for shape in shapes] for r in range(size)]
    with framework(comm, kind) as fw:

        def tree(values: list[Any]) -> Any:
            a, b, c, d = (fw.of(value) for value in values)
            return {"a": [a, b], "b": (c,), "c": {"d": d}}

        def leaves(got: Any) -> list[Any]:
            return [*got["a"], *got["b"], got["c"]["d"]]

        Fake().clear_log()
        x = tree(every[rank])
        got = comm.all_reduce(x)
        text = Fake().log("nccl")
        names = [line.partition("(")[0] for line in text]
        assert names.count("ncclGroupStart") == names.count("ncclGroupEnd") == 1, text
        start, end = names.index("ncclGroupStart"), names.index("ncclGroupEnd")
        assert names[start + 1 : end] == ["ncclAllReduce"] * 4, text
        for k, each in enumerate(leaves(got)):
            fw.check(each, sum(every[r][k] for r in range(size)))
        assert comm.all_reduce(x, out=x) is not None
        for k, each in enumerate(leaves(x)):
            np.testing.assert_array_equal(fw.read(each), sum(every[r][k] for r in range(size)))
        mixed = [fw.of(numbers(rank, 3)), fw.of(numbers(rank, 2, dtype=np.int64))]
        work = comm.all_reduce(mixed, async_op=True)
        got = work.wait()
        fw.check(got[0], everyone(comm, 3).sum(0))
        fw.check(got[1], everyone(comm, 2, dtype=np.int64).sum(0))
        got = comm.broadcast(tree(every[rank]), root=1)
        for k, each in enumerate(leaves(got)):
            if rank == 1:
                fw.check_same(each, every[1][k])
            else:
                fw.check(each, every[1][k])
        got = comm.all_gather(tree(every[rank]))
        for k, each in enumerate(leaves(got)):
            fw.check(each, np.concatenate([np.atleast_1d(every[r][k]) for r in range(size)]))
        lists = [fw.of(numbers(rank, 4)), fw.of(numbers(rank, 2, 3))]
        every_lists = [[numbers(r, 4), numbers(r, 2, 3)] for r in range(size)]
        got = comm.reduce_scatter(lists)
        for k in range(2):
            summed = sum(every_lists[r][k] for r in range(size))
            fw.check(got[k], np.array_split(summed, size)[rank])
        got = comm.all_to_all(lists)
        for k in range(2):
            cuts = [np.array_split(every_lists[r][k], size)[rank] for r in range(size)]
            fw.check(got[k], np.concatenate(cuts))
        got = comm.reduce(lists, root=0, op="max")
        if rank == 0:
            for k in range(2):
                fw.check(got[k], np.max([every_lists[r][k] for r in range(size)], 0))
        got = comm.gather(lists, root=0)
        if rank == 0:
            for k in range(2):
                fw.check(got[k], np.concatenate([every_lists[r][k] for r in range(size)]))
    settled(comm)


@pytest.mark.parametrize("kind", KINDS)
def test_structures(nccl: Run, kind: str) -> None:
    nccl(2, structures, kind, shared=True)


def other_frameworks(comm: Any, given: str, wanted: str) -> None:
    """``out=`` and ``like=`` of another library, on the same GPU."""
    warm(comm)
    rank, size = comm.rank, comm.size
    every = everyone(comm, 4, 2)
    with framework(comm, "torch" if "torch" in (given, wanted) else given):
        fw, other = Framework(comm, given), Framework(comm, wanted)
        x = fw.of(every[rank])

        def goes_to(shape: tuple[int, ...], call: Any, expected: Any) -> None:
            out = other.of(np.zeros(shape, np.float32))
            assert call(out) is out
            np.testing.assert_array_equal(other.read(out), expected)

        total = every.sum(0)
        goes_to((4, 2), lambda out: comm.all_reduce(x, out=out), total)
        goes_to((4, 2), lambda out: comm.all_reduce(x, out=out, order="rank"), total)
        goes_to((4, 2), lambda out: comm.broadcast(x, root=0, out=out), every[0])
        goes_to((4 * size, 2), lambda out: comm.all_gather(x, out=out), every.reshape(-1, 2))
        cut = np.array_split(total, size)[rank]
        goes_to(cut.shape, lambda out: comm.reduce_scatter(x, out=out), cut)
        peer, left = (rank + 1) % size, (rank - 1) % size
        goes_to((4, 2), lambda out: comm.sendrecv(x, peer, left, out=out), every[left])
        swapped = np.concatenate([np.array_split(e, size)[rank] for e in every])
        goes_to(swapped.shape, lambda out: comm.all_to_all(x, out=out), swapped)
        like = wanted if wanted == "torch" else other.of(np.zeros(1, np.float32))
        got = comm.broadcast(x if rank == 0 else None, like=like)
        if rank:
            other.check(got, every[0])
        other.check(comm.sendrecv(x, peer, left, like=like), every[left])
        got = comm.broadcast(x if rank == 0 else None)  # nobody says what it is to be
        if rank:
            assert type(got) is DeviceArray
            np.testing.assert_array_equal(read(got), every[0])
    settled(comm)


@pytest.mark.parametrize(("given", "wanted"), OTHERS)
def test_results_in_arrays_of_another_library(nccl: Run, given: str, wanted: str) -> None:
    nccl(2, other_frameworks, given, wanted, shared=True)


def many_outs(comm: Any, kind: str) -> None:
    """Outputs with strides, and calls that are repeated on the same arrays."""
    warm(comm)
    rank, size = comm.rank, comm.size
    every = everyone(comm, 4, 3)
    with framework(comm, kind) as fw:
        # On streams of their own; on one; and on one where what was prepared before is used.
        shared = new_stream(comm)
        for step, fw.stream in enumerate((None, shared, shared)):
            x, out = (fw.of(np.ascontiguousarray(every[rank])) for _ in "12")
            for again in range(3):
                assert comm.all_reduce(x, out=out) is out
                np.testing.assert_array_equal(fw.read(out), every.sum(0), err_msg=f"{step} {again}")
                assert comm.all_reduce(out, out=out) is out
                np.testing.assert_array_equal(fw.read(out), size * every.sum(0))
            turned = fw.of(np.zeros((3, 4), np.float32).T)
            assert comm.all_reduce(x, out=turned) is turned
            np.testing.assert_array_equal(fw.read(turned), every.sum(0))
            assert comm.broadcast(turned, root=0, out=turned) is turned
            np.testing.assert_array_equal(fw.read(turned), every.sum(0))
    settled(comm)


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_with_strides_and_repeated_calls(nccl: Run, kind: str) -> None:
    nccl(2, many_outs, kind, shared=True)


# -- memory, groups, objects ----------------------------------------------------------------------


def symmetric(comm: Any) -> None:
    warm(comm)
    size = comm.size
    fake = Fake()
    like = of_fake(comm, np.zeros(1, np.float32))
    for likes in (None, "cuda", like):
        fake.clear_log()
        x = comm.empty((4, 2), like=likes)
        assert type(x) is DeviceArray
        assert x.shape == (4, 2)
        assert fake.log("ncclCommWindowRegister"), "NCCL does not know of it"
        x.fill_from_host(np.ones((4, 2), np.float32))
        comm.all_reduce(x, out=x)
        np.testing.assert_array_equal(read(x), np.full((4, 2), size))
        part = x[1:3]
        comm.all_reduce(part, out=part)
        got = comm.all_gather(x[:1])
        np.testing.assert_array_equal(read(got), np.full((size, 2), size))
        assert read(x).tolist() == [[size] * 2, [size**2] * 2, [size**2] * 2, [size] * 2]
        # Dropped while the GPU still works with it.
        with fake.turned("delay_us", 3000, back=300):
            work = comm.all_reduce(x, out=x, async_op=True)
            del x, part, work
            gc.collect()
            y = comm.empty(8, like=likes)
            comm.all_reduce(y, out=y)
            del y, got
            gc.collect()
        settled(comm)
        comm.barrier()
    nothing = comm.empty((0, 3), "bfloat16")
    assert nothing.shape == (0, 3)
    comm.barrier()
    for _ in range(20):
        comm.empty(1000)
    settled(comm)


def test_symmetric_memory(nccl: Run) -> None:
    nccl(2, symmetric, shared=True)


def groups(comm: Any) -> None:
    warm(comm)
    rank, size = comm.rank, comm.size
    x = of_fake(comm, numbers(rank, 4))
    every = everyone(comm, 4)
    twin = comm.dup()
    np.testing.assert_array_equal(read(twin.all_reduce(x)), every.sum(0))
    half = comm.split(rank % 2, -rank)
    assert half is not None
    members = [r for r in range(size - 1, -1, -1) if r % 2 == rank % 2]
    np.testing.assert_array_equal(read(half.all_gather(x)), every[members].ravel())
    if rank < 2:
        pair = comm.group([1, 0])
        assert pair.rank == 1 - rank
        np.testing.assert_array_equal(read(pair.broadcast(x, root=0)), every[1])
        got = pair.sendrecv(x, 1 - pair.rank, 1 - pair.rank, like=x)
        np.testing.assert_array_equal(read(got), every[1 - rank])
        pair.close()
    # Calls on both at once, in the background, with the same GPU.
    works = [c.all_reduce(x, async_op=True) for c in (comm, twin, comm, twin)]
    for work in works:
        np.testing.assert_array_equal(read(work.wait()), every.sum(0))
    assert comm.split(None if rank == 0 else 1) is None or rank > 0
    assert comm.split_by_host().size == size
    half.close()
    twin.close()
    np.testing.assert_array_equal(read(comm.all_reduce(x)), every.sum(0))
    settled(comm)


def test_groups(nccl: Run) -> None:
    nccl(3, groups, shared=True)


def objects(comm: Any) -> None:
    """What is not in a GPU's memory works on a communicator that takes arrays of GPUs alone."""
    rank, size = comm.rank, comm.size
    Fake().clear_log()
    comm.barrier()
    assert comm.broadcast_object({"from": rank}, root=1) == {"from": 1}
    assert comm.all_gather_object(rank) == list(range(size))
    assert comm.gather_object((rank,), root=0) == (
        [(r,) for r in range(size)] if not rank else None
    )
    things = [f"for {r}" for r in range(size)] if rank == 0 else None
    assert comm.scatter_object(things) == f"for {rank}"
    if rank == 0:
        comm.send_object([1, 2], 1, tag=3)
    elif rank == 1:
        assert comm.recv_object(0, tag=3) == [1, 2]
    assert not Fake().log("nccl"), "nothing of this needs NCCL"
    x = of_device(comm, numbers(rank, 3))
    np.testing.assert_array_equal(read(comm.all_reduce(x)), everyone(comm, 3).sum(0))


def test_objects_and_barriers(nccl: Run) -> None:
    nccl(3, objects)


def on_both(comm: Any) -> None:
    """``"cpu:shm,cuda:nccl"`` takes arrays of both kinds, one kind a call."""
    rank, size = comm.rank, comm.size
    every = everyone(comm, 4)
    for _ in range(2):
        got = comm.all_reduce(every[rank])
        assert type(got) is np.ndarray
        np.testing.assert_array_equal(got, every.sum(0))
        np.testing.assert_array_equal(read(comm.all_reduce(of_fake(comm, every[rank]))), got)
        joined = np.concatenate([every[r][: r + 1] for r in range(size)])
        np.testing.assert_array_equal(comm.all_gather(every[rank][: rank + 1]), joined)
    # Who passes None takes what the root has, wherever that is.
    for there, x in ((np.ndarray, every[rank]), (DeviceArray, of_fake(comm, every[rank]))):
        got = comm.broadcast(x if rank == 0 else None)
        assert rank == 0 or type(got) is there
        np.testing.assert_array_equal(read(got) if rank else every[0], every[0])
        if rank == 0:
            comm.send(x, 1)
        elif rank == 1:
            got = comm.recv(None, 0)
            assert type(got) is there
            np.testing.assert_array_equal(read(got), every[0])
    # Messages from one kind of memory to the other.
    if rank == 0:
        comm.send(of_fake(comm, every[0]), 1)
        comm.send(every[0], 1)
    elif rank == 1:
        host, device = np.zeros(4, np.float32), of_fake(comm, np.zeros(4, np.float32))
        assert comm.recv(host, 0) is host
        assert comm.recv(device, 0) is device
        np.testing.assert_array_equal(host, every[0])
        np.testing.assert_array_equal(read(device), every[0])
    work = comm.all_reduce(every[rank], async_op=True)
    later = comm.all_reduce(of_fake(comm, every[rank]), async_op=True)
    np.testing.assert_array_equal(work.wait(), every.sum(0))
    np.testing.assert_array_equal(read(later.wait()), every.sum(0))
    x = comm.empty(4)
    assert type(x) is np.ndarray
    assert type(comm.empty(4, like="cuda")) is DeviceArray
    settled(comm)


def test_arrays_of_the_cpu_and_of_gpus_on_one_communicator(both: Run) -> None:
    both(2, on_both)


def streams_of_frameworks(comm: Any) -> None:
    """What torch makes current is where calls go."""
    import torch

    warm(comm)
    every = everyone(comm, 4)
    a = new_stream(comm)
    with (
        framework(comm, "torch") as fw,
        torch.cuda.stream(torch.cuda.ExternalStream(a, device=ordinal_of(comm))),
    ):
        x = fw.of(every[comm.rank])
        Fake().clear_log()
        got = comm.all_reduce(x)
        assert f"stream={a:#x}" in calls_of_nccl()[0]
        fw.check(got, every.sum(0))
        for _ in range(2):
            Fake().clear_log()
            comm.all_reduce(x, out=got)
            assert f"stream={a:#x}" in calls_of_nccl()[0]
        work = comm.all_gather(x, async_op=True)
        gathered = work.wait()
        fw.check(gathered, every.ravel())
        assert gathered.used_on == [a], "torch gives its memory to others while the program reads"
        assert got.used_on == comm.all_gather(x).used_on == []
        b = new_stream(comm)
        with torch.cuda.stream(torch.cuda.ExternalStream(b, device=ordinal_of(comm))):
            Fake().clear_log()
            comm.all_reduce(x, out=got)
            assert f"stream={b:#x}" in calls_of_nccl()[0], "a repeated call, on the stream of then"
            work = comm.all_reduce(x, out=got, async_op=True)
        work.wait()
        np.testing.assert_array_equal(fw.read(got), every.sum(0))
    settled(comm)


@pytest.mark.skipif(not HAS_TORCH, reason="needs PyTorch")
def test_the_current_stream_of_torch(nccl: Run) -> None:
    nccl(2, streams_of_frameworks, shared=True)

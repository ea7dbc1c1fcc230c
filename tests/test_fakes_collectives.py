"""The ABI fake's types, operators, groups and streams, with threads and processes as ranks.

What each collective gives is held by the suite that runs over it, test_nccl_conformance.py.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import pytest
from fakes import POISON, compiler
from fakes.raw import (
    AVG,
    DTYPES,
    MAX,
    MIN,
    PROD,
    SUM,
    NcclError,
    dtype_of,
    in_processes,
    in_threads,
)

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")

SIZE, COUNT = 3, 1000
INT64 = DTYPES["int64"]
FLOAT32 = DTYPES["float32"]
FOLDS = {
    SUM: np.add,
    PROD: np.multiply,
    MAX: np.maximum,
    MIN: np.minimum,
}


def values_of(rank, dtype, count=COUNT, seed=7):
    """Return a rank's contribution: small numbers, with fractions where the type has them."""
    draw = np.random.default_rng([seed, rank])
    dtype = dtype_of(dtype)
    if dtype.kind in "iu":
        return draw.integers(0 if dtype.kind == "u" else -20, 21, count).astype(dtype)
    return draw.uniform(-3, 3, count).astype("f4").astype(dtype)


def folded(arrays, op):
    """Fold in the order of the ranks, rounding to the type after each step."""
    dtype = arrays[0].dtype
    if op == AVG and dtype.kind not in "iu":
        factor = np.float32(1 / len(arrays)).astype(dtype) if dtype != "f8" else 1 / len(arrays)
        arrays = [(a * factor).astype(dtype) for a in arrays]
    total = functools.reduce(lambda a, b: FOLDS.get(op, np.add)(a, b).astype(dtype), arrays)
    if op == AVG and dtype.kind in "iu":
        return np.trunc(total / len(arrays)).astype(dtype)
    return total


def same(a, b):
    return a.tobytes() == np.ascontiguousarray(b).tobytes()


def overlapping(rank):
    array = rank.array(values_of(rank.rank, "int64", COUNT * rank.size))
    with pytest.raises(NcclError, match="overlap"):
        rank.call("AllReduce", array.address, array.address + 8, COUNT, INT64, SUM)
    with pytest.raises(NcclError, match="overlap"):
        rank.call("AlltoAll", array, array, COUNT, INT64)


def test_memory_that_overlaps_otherwise_than_in_place_is_refused():
    in_threads(SIZE, overlapping)


def only_the_root(rank):
    send, recv = rank.array(np.full(4, rank.rank + 1)), rank.empty(4, "int64")
    rank.call("Reduce", send, recv, 4, INT64, SUM, 1)
    return recv.get().view(np.uint8).tolist() == [POISON] * 32 or recv.get().tolist()


def test_what_is_not_the_root_is_given_nothing():
    assert in_threads(SIZE, only_the_root) == [True, [6] * 4, True]


# Types and operators


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_type_with_each_operator(dtype):
    def work(rank):
        arrays = [values_of(p, dtype) for p in range(rank.size)]
        send = rank.array(arrays[rank.rank].view(f"V{arrays[0].itemsize}"))
        wrong = []
        for op in (SUM, PROD, MAX, MIN, AVG):
            recv = rank.empty(COUNT, f"V{arrays[0].itemsize}")
            rank.call("AllReduce", send, recv, COUNT, DTYPES[dtype], op)
            got, expected = recv.get().view(arrays[0].dtype), folded(arrays, op)
            if not same(got, expected):
                at = np.flatnonzero(got.astype("f8") != expected.astype("f8"))[:3]
                wrong.append((op, got[at], expected[at], [a[at] for a in arrays]))
        return wrong

    assert in_threads(SIZE, work) == [[]] * SIZE


@pytest.mark.parametrize("dtype", [d for d in DTYPES if "float" in d])
def test_rounding_is_to_nearest_even_over_all_values(dtype):
    torch = pytest.importorskip("torch")
    patterns = np.arange(256 if "float8" in dtype else 65536)

    def work(rank):
        kind = dtype_of(dtype)
        if kind.itemsize <= 2:
            base = patterns.astype(f"u{kind.itemsize}").view(kind)
        else:
            base = np.random.default_rng(0).standard_normal(5000).astype(kind)
        base = np.tile(base, 2048 // len(base) + 1)
        other = np.random.default_rng(1).permutation(base)
        arrays = [base, other]
        send = rank.array(arrays[rank.rank].view(f"V{kind.itemsize}"))
        recv = rank.empty(len(base), f"V{kind.itemsize}")
        rank.call("AllReduce", send, recv, len(base), DTYPES[dtype], SUM)
        got = recv.get().view(kind)
        wide = torch.float64 if dtype == "float64" else torch.float32
        total = sum(torch.from_numpy(a.astype("f8")).to(wide) for a in arrays)
        expected = total.to(getattr(torch, dtype))
        limit = torch.finfo(expected.dtype).max
        if "float8" in dtype:  # CUDA's conversions saturate, torch's do not
            expected = total.clamp(-limit, limit).to(expected.dtype)
        wide_got = torch.from_numpy(got.astype("f8"))
        return bool(torch.equal(wide_got.nan_to_num(1e9), expected.double().nan_to_num(1e9)))

    def quietly(rank):
        with np.errstate(all="ignore"):  # holds for one thread
            return work(rank)

    assert in_threads(2, quietly) == [True, True]


@pytest.mark.parametrize("on_device", [False, True])
def test_premultiplied_sums_take_each_ranks_factor(on_device):
    def work(rank):
        arrays = [values_of(p, "float32") for p in range(rank.size)]
        factors = [np.float32(0.3 * (p + 1)) for p in range(rank.size)]
        send, recv = rank.array(arrays[rank.rank]), rank.empty(COUNT, "f4")
        host = np.array([factors[rank.rank]])
        device = rank.array(host)
        rank.synchronize()
        op = ctypes.c_int()
        scalar = device.address if on_device else host.ctypes.data
        rank.nccl.call("RedOpCreatePreMulSum", op, scalar, FLOAT32, int(not on_device), rank.comm)
        rank.call("AllReduce", send, recv, COUNT, FLOAT32, op.value)
        host[:] = 99  # the host's was read at once
        rank.nccl.call("RedOpDestroy", op, rank.comm)
        with pytest.raises(NcclError, match="unknown to this communicator"):
            rank.call("AllReduce", send, recv, COUNT, FLOAT32, op.value)
        return same(recv.get(), folded([a * f for a, f in zip(arrays, factors)], SUM))

    assert all(in_threads(SIZE, work))


# Groups, messages, order


def exchange(rank):
    """Send to all and receive from all in one group, with two messages a pair."""
    r, n = rank.rank, rank.size
    sends = [rank.array(np.full(COUNT, 100 * r + p)) for p in range(n)]
    recvs = [rank.empty(COUNT, "int64") for _ in range(n)]
    later = [rank.empty(5, "int64") for _ in range(n)]
    with rank.nccl.group():
        for p in range(n):
            rank.call("Recv", recvs[p], COUNT, INT64, p)
            rank.call("Send", sends[p], COUNT, INT64, p)
        for p in range(n):
            rank.call("Send", sends[p], 5, INT64, p)
            rank.call("Recv", later[p], 5, INT64, p)
    got = [int(a.get()[0]) for a in recvs]
    return got == [100 * p + r for p in range(n)] == [int(a.get()[4]) for a in later]


def test_an_exchange_in_a_group_does_not_deadlock():
    assert all(in_threads(4, exchange))


def many_streams(rank):
    """Rings of sends on several streams at once, each with a communicator of its own."""
    results = []
    streams = [rank.nccl.stream(rank.device) for _ in range(3)]
    right, left = (rank.rank + 1) % rank.size, (rank.rank - 1) % rank.size
    for turn in range(15):
        stream = streams[turn % 3]
        send = rank.array(np.full(COUNT, rank.rank + turn))
        recv = rank.empty(COUNT, "int64")
        rank.synchronize()
        with rank.nccl.group():
            rank.call("Send", send, COUNT, INT64, right, stream=stream)
            rank.call("Recv", recv, COUNT, INT64, left, stream=stream)
        total = rank.empty(COUNT, "int64")
        rank.call("AllReduce", recv, total, COUNT, INT64, SUM, stream=stream)
        results.append((stream, total, send, recv))
    for stream in streams:
        rank.nccl.synchronize(stream, rank.device)
    totals = [int(total.peek()[0]) for _, total, _, _ in results]
    return totals == [sum(range(rank.size)) + rank.size * turn for turn in range(15)]


def test_processes_with_several_streams():
    assert all(in_processes(4, many_streams))


def test_nothing_is_on_a_stream_before_the_outermost_end():
    def work(rank):
        send, recv = rank.array(np.arange(4)), rank.array(np.zeros(4, int))
        rank.synchronize()
        rank.nccl.call("GroupStart")
        with rank.nccl.group():
            rank.call("AllReduce", send, recv, 4, INT64, SUM)
        rank.synchronize()
        before = recv.peek().tolist()
        rank.nccl.call("GroupEnd")
        return before, recv.get().tolist()

    assert in_threads(2, work) == [([0] * 4, [0, 2, 4, 6])] * 2


def test_a_groups_streams_meet():
    """What comes behind the group on one stream waits for the work before it on the other."""

    def work(rank):
        nccl, other = rank.nccl, rank.nccl.stream(rank.device)
        sends = [rank.array(np.arange(4)) for _ in range(2)]
        recvs = [rank.empty(4, "int64") for _ in range(2)]
        rank.synchronize()
        with nccl.group():
            rank.call("AllReduce", sends[0], recvs[0], 4, INT64, SUM)
            rank.call("AllReduce", sends[1], recvs[1], 4, INT64, SUM, stream=other)
        nccl.synchronize(other, rank.device)
        return [a.peek().tolist() for a in recvs]

    assert in_threads(2, work) == [[[0, 2, 4, 6]] * 2] * 2


def test_operations_of_a_communicator_keep_their_order_across_streams():
    """A blocked stream of a communicator holds up the communicator's work on its other streams."""

    def work(rank):
        nccl, other = rank.nccl, rank.nccl.stream(rank.device)
        chain = [rank.array(np.full(6, rank.rank + 1)) for _ in range(2)]
        rank.synchronize()
        for turn in range(10):
            at = turn % 2
            stream = (rank.stream, other)[at]
            rank.call("AllReduce", chain[at], chain[1 - at], 6, INT64, SUM, stream=stream)
        nccl.synchronize(rank.stream, rank.device)
        nccl.synchronize(other, rank.device)
        return chain[0].peek().tolist()

    assert in_threads(2, work) == [[3 * 2**9] * 6] * 2


def test_a_read_without_waiting_is_poison():
    def work(rank):
        send, recv = rank.array(np.ones(8)), rank.array(np.zeros(8))
        rank.synchronize()
        rank.call("AllReduce", send, recv, 8, DTYPES["float64"], SUM)  # connects
        rank.synchronize()
        rank.nccl.knob("hold", 1)
        rank.call("AllReduce", send, recv, 8, DTYPES["float64"], SUM)
        early = recv.memory().copy()
        rank.nccl.knob("hold", 0)
        return bool((early == POISON).all()), recv.get().tolist()

    assert in_threads(1, work) == [(True, [1.0] * 8)]

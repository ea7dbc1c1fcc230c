"""The ABI fake's rounding, groups and streams, with threads as ranks.

The conformance suite over the fake, backends/nccl/test_conformance.py, checks all results.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.fakes import POISON, compiler
from tests.fakes.raw import (
    DTYPES,
    SUM,
    NcclError,
    dtype_of,
    in_threads,
)

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")

SIZE, COUNT = 3, 1000
INT64 = DTYPES["int64"]
FLOAT32 = DTYPES["float32"]


def overlapping(rank):
    array = rank.array(np.zeros(COUNT * rank.size, "int64"))
    with pytest.raises(NcclError, match="overlap"):
        rank.call("AllReduce", array.address, array.address + 8, COUNT, INT64, SUM)
    with pytest.raises(NcclError, match="overlap"):
        rank.call("AlltoAll", array, array, COUNT, INT64)


def test_overlapping_buffers_are_refused():
    in_threads(SIZE, overlapping)


def only_the_root(rank):
    send, recv = rank.array(np.full(4, rank.rank + 1)), rank.empty(4, "int64")
    rank.call("Reduce", send, recv, 4, INT64, SUM, 1)
    return recv.get().view(np.uint8).tolist() == [POISON] * 32 or recv.get().tolist()


def test_reduce_writes_only_to_root():
    assert in_threads(SIZE, only_the_root) == [True, [6] * 4, True]


# Types


@pytest.mark.parametrize("dtype", [d for d in DTYPES if "float" in d])
def test_sums_round_to_nearest_even(dtype):
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
        result = recv.get().view(kind)
        wide = torch.float64 if dtype == "float64" else torch.float32
        total = sum(torch.from_numpy(a.astype("f8")).to(wide) for a in arrays)
        expected = total.to(getattr(torch, dtype))
        limit = torch.finfo(expected.dtype).max
        if "float8" in dtype:  # CUDA's conversions saturate, PyTorch's do not
            expected = total.clamp(-limit, limit).to(expected.dtype)
        wide_result = torch.from_numpy(result.astype("f8"))
        return bool(torch.equal(wide_result.nan_to_num(1e9), expected.double().nan_to_num(1e9)))

    def quietly(rank):
        with np.errstate(all="ignore"):  # np.errstate holds for one thread only
            return work(rank)

    assert in_threads(2, quietly) == [True, True]


# Groups, messages, order


def test_nested_group_launches_at_outermost_end():
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


def test_group_synchronises_its_streams():
    """Work after the group on one stream waits for work before the group on the other stream."""

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


def test_communicator_keeps_order_across_streams():
    """A blocked stream of a communicator also blocks its work on other streams."""

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

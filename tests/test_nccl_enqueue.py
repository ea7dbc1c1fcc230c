"""What NCCL's communicators enqueue, over the ABI fake: new versions and old ones alike."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from nccl_ranks import FLOAT32, NEW, OLD, SUM, Ranks, at, destroy, fresh, ranks, within

from collective import cuda
from collective.backends.nccl.engine import NcclComm
from collective.errors import BackendError
from collective.memory.dtypes import BY_NAME

__all__ = ["fresh", "ranks"]  # fixtures

N = 3  # ranks


def moved(ranks: Ranks, call: Callable[..., bool], size: int = N * 4) -> list[list[float]]:
    """Return each rank's output of ``call(comm, src, dst, stream)`` on ``100 rank + index``."""
    comms = ranks.create(N)

    def one(rank: int) -> list[float]:
        src = np.arange(size, dtype=np.float32) + 100 * rank
        dst = np.full(size, -1, np.float32)
        stream = ranks.stream(rank)
        if call(comms[rank], at(src), at(dst), stream):
            comms[rank].settle(within())
        ranks.wait(stream, rank)
        return dst.tolist()

    found = ranks.run(N, one)
    destroy(ranks, comms)
    return found


COUNTS = [2, 0, 3]  # of the ranks


def all_to_all(comm: NcclComm, src: int, dst: int, stream: int) -> bool:
    return comm.all_to_all(src, dst, 4, FLOAT32, stream)


def gather(comm: NcclComm, src: int, dst: int, stream: int) -> bool:
    return comm.gather(src, dst, 4, FLOAT32, 1, stream)


def scatter(comm: NcclComm, src: int, dst: int, stream: int) -> bool:
    return comm.scatter(src, dst, 4, FLOAT32, 1, stream)


def in_place_gather(comm: NcclComm, src: int, dst: int, stream: int) -> bool:
    # The root's own part is there before, and stays.
    own = dst + 16 if comm.rank == 1 else src
    return comm.gather(own, dst, 4, FLOAT32, 1, stream)


def broadcast(comm: NcclComm, src: int, dst: int, stream: int) -> bool:
    return comm.broadcast(src, dst, 4, FLOAT32, 2, stream)


def reduce(comm: NcclComm, src: int, dst: int, stream: int) -> bool:
    return comm.reduce(src, dst, 4, FLOAT32, 2, 0, stream)  # max


def reduce_scatter(comm: NcclComm, src: int, dst: int, stream: int) -> bool:
    return comm.reduce_scatter(src, dst, 4, FLOAT32, SUM, stream)


def all_gather(comm: NcclComm, src: int, dst: int, stream: int) -> bool:
    return comm.all_gather(src, dst, 4, FLOAT32, stream)


def pad(*values: float) -> list[float]:
    return [*values, *[-1.0] * (N * 4 - len(values))]


def span(start: int, count: int = 4) -> list[float]:
    return [float(start + n) for n in range(count)]


EXPECTED = {
    broadcast: [pad(*span(200))] * 3,
    reduce: [pad(*span(200)), pad(), pad()],
    reduce_scatter: [pad(*(300 + 3 * (4 * rank + n) for n in range(4))) for rank in range(3)],
    all_gather: [span(0) + span(100) + span(200)] * 3,
    all_to_all: [span(4 * r) + span(100 + 4 * r) + span(200 + 4 * r) for r in range(3)],
    gather: [pad(), span(0) + span(100) + span(200), pad()],
    scatter: [pad(*span(100 + 4 * rank)) for rank in range(3)],
    in_place_gather: [pad(), span(0) + [-1.0] * 4 + span(200), pad()],
}


@pytest.mark.parametrize("version", [NEW, OLD])
@pytest.mark.parametrize("call", EXPECTED, ids=lambda call: call.__name__)
def test_old_versions_move_the_same_by_messages(
    fresh: Callable[[int], Ranks], version: int, call: Callable[..., bool]
) -> None:
    ranks = fresh(version)
    assert moved(ranks, call) == EXPECTED[call]
    exchange = call in (all_to_all, gather, scatter, in_place_gather)
    assert bool(ranks.fake.log("ncclSend")) == (exchange and version == OLD)


def uneven_all_to_all(comm: NcclComm, src: int, dst: int, stream: int) -> bool:
    # Rank j gets COUNTS[j] elements from each.
    received = [COUNTS[comm.rank]] * N
    return comm.all_to_all_v(src, COUNTS, dst, received, FLOAT32, stream)


def uneven_gather(comm: NcclComm, src: int, dst: int, stream: int) -> bool:
    return comm.gather_v(src, dst, COUNTS, FLOAT32, 1, stream)


def uneven_scatter(comm: NcclComm, src: int, dst: int, stream: int) -> bool:
    return comm.scatter_v(src, dst, COUNTS, FLOAT32, 0, stream)


def uneven_all_gather(comm: NcclComm, src: int, dst: int, stream: int) -> bool:
    return comm.all_gather_v(src, dst, COUNTS, FLOAT32, stream)


def uneven_reduce_scatter(comm: NcclComm, src: int, dst: int, stream: int) -> bool:
    return comm.reduce_scatter_v(src, dst, COUNTS, FLOAT32, SUM, stream)


UNEVEN = {
    uneven_all_to_all: [
        pad(0, 1, 100, 101, 200, 201),
        pad(),
        pad(2, 3, 4, 102, 103, 104, 202, 203, 204),
    ],
    uneven_gather: [pad(), pad(0, 1, 200, 201, 202), pad()],
    uneven_scatter: [pad(0, 1), pad(), pad(2, 3, 4)],
    uneven_all_gather: [pad(0, 1, 200, 201, 202)] * 3,
    uneven_reduce_scatter: [pad(300, 303), pad(), pad(306, 309, 312)],
}


@pytest.mark.parametrize("version", [NEW, OLD])
@pytest.mark.parametrize("call", UNEVEN, ids=lambda call: call.__name__)
def test_counts_a_rank(
    fresh: Callable[[int], Ranks], version: int, call: Callable[..., bool]
) -> None:
    assert moved(fresh(version), call) == UNEVEN[call]


def test_messages(ranks: Ranks) -> None:
    def call(comm: NcclComm, src: int, dst: int, stream: int) -> bool:
        right, left = (comm.rank + 1) % N, (comm.rank - 1) % N
        with comm.group() as calls:
            comm.send(src, 4, FLOAT32, right, stream)
            comm.recv(dst, 4, FLOAT32, left, stream)
        return calls.pending

    assert moved(ranks, call) == [pad(*span(100 * ((rank - 1) % N))) for rank in range(3)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_premultiplied_sum(ranks: Ranks, dtype: str) -> None:
    kind = BY_NAME[dtype]
    code = ranks.library.dtype(kind)
    assert code is not None
    comms = ranks.create(2)
    one = np.array([0x3F80], np.uint16) if dtype == "bfloat16" else np.ones(1, kind.storage)
    out = [one.copy() for _ in comms]

    def reduce(rank: int) -> None:
        op = comms[rank].premul_sum(0.375, kind)
        assert comms[rank].premul_sum(0.375, kind) == op
        stream = ranks.stream(rank)
        if comms[rank].all_reduce(at(out[rank]), at(out[rank]), 1, code, op, stream):
            comms[rank].settle(within())
        ranks.wait(stream, rank)

    ranks.run(2, reduce)
    wanted = np.array([0x3F40], np.uint16) if dtype == "bfloat16" else 0.75
    assert [array.tolist() for array in out] == [np.broadcast_to(wanted, 1).tolist()] * 2
    assert len(ranks.fake.log("ncclRedOpCreatePreMulSum")) == 2
    destroy(ranks, comms)
    assert len(ranks.fake.log("ncclRedOpDestroy")) == 2


def test_factors_that_vary_do_not_pile_up(ranks: Ranks) -> None:
    (comm,) = ranks.create(1)
    for number in range(200):
        comm.premul_sum(number, BY_NAME["float32"])
    assert len(ranks.fake.log("ncclRedOpDestroy")) == 200 - 60
    comm.destroy(within())


def test_a_group_ends_when_its_body_raises(ranks: Ranks) -> None:
    (comm,) = ranks.create(1)
    with pytest.raises(ZeroDivisionError), comm.group():
        raise ZeroDivisionError
    starts, ends = (len(ranks.fake.log(name)) for name in ("ncclGroupStart", "ncclGroupEnd"))
    assert starts == ends == 1
    assert ranks.sums([comm]) == [[1.0] * 3]


def test_what_nccl_refuses_in_a_group_is_raised_once(ranks: Ranks) -> None:
    (comm,) = ranks.create(1)
    refused = pytest.raises(BackendError, match="ncclAllReduce of rank 0: invalid argument")
    with refused, comm.group():
        comm.all_reduce(0, 0, 3, FLOAT32, SUM, 0)
    assert ranks.sums([comm]) == [[1.0] * 3]


def test_memory_of_nccls_own_is_registered(ranks: Ranks) -> None:
    comms = ranks.create(2)

    def one(rank: int) -> None:
        comm = comms[rank]
        address = comm.mem_alloc(8192)
        assert cuda.owner_of(address) == rank
        handle = comm.register(address, 8192)
        comm.deregister(handle)
        window = comm.window(address, 8192, within())
        assert window
        comm.close_window(window)
        comm.destroy(within())
        comm.close_window(window)  # nothing is left to take back
        comm.mem_free(address)

    ranks.run(2, one)
    assert len(ranks.fake.log("ncclMemFree")) == 2

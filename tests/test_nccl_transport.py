"""The ``nccl`` transport over the ABI fake: what no call of test_nccl_conformance.py shows."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("fakes")

from nccl_callers import FAR, Caller, FakeNccl, Run, needs_compiler, pools, read, side_by_side

from collective import ops
from collective.contract.backend import ANY_SOURCE
from collective.errors import UnsupportedError
from collective.memory.buffer import Buffer
from collective.memory.dtypes import from_numpy, named
from collective.request import Request

pytestmark = needs_compiler

SIZES = (1, 2, 3, 4)
CALL = Request("test")


@pytest.fixture(scope="module")
def nccl() -> Iterator[Run]:
    yield from pools(FakeNccl)


def numbers(rank: int, count: int, dtype: str = "float32") -> np.ndarray[Any, Any]:
    """Return what a rank contributes: small whole numbers, which every type holds exactly."""
    return ((np.arange(count) * 7 + rank * 3) % 5 + 1).astype(dtype)


# -- collectives ------------------------------------------------------------------------


def reduces(comm: Any) -> None:
    caller = Caller(comm)
    every = np.stack([numbers(r, 17) for r in range(caller.size)])
    src, dst = caller.buffer(every[caller.rank]), caller.empty(17, "float32")
    caller.call("all_reduce", src, dst, op=ops.as_op("sum"))
    np.testing.assert_array_equal(read(dst), np.sum(every, axis=0))
    for root in range(caller.size):
        dst = caller.empty(17, "float32")
        at_root = caller.rank == root
        caller.call("reduce", src, dst if at_root else None, op=ops.as_op("sum"), root=root)
        if at_root:
            np.testing.assert_array_equal(read(dst), np.sum(every, axis=0))
    np.testing.assert_array_equal(read(src), every[caller.rank])


@pytest.mark.parametrize("size", [1, 4])  # of two and three: test_nccl_conformance.py
def test_reduce_and_all_reduce(nccl: Run, size: int) -> None:
    nccl(size, reduces, shared=True)


def exchanges(comm: Any, table: list[list[int]]) -> None:
    caller = Caller(comm)
    rank, size = caller.rank, caller.size
    sends, receives = table[rank], [table[source][rank] for source in range(size)]

    def pieces(source: int) -> list[np.ndarray[Any, Any]]:
        return np.split(numbers(source, sum(table[source])), np.cumsum(table[source])[:-1])

    src, dst = caller.buffer(numbers(rank, sum(sends))), caller.empty(sum(receives), "float32")
    caller.call("all_to_all", src, dst, elements=sends, incoming=receives)
    np.testing.assert_array_equal(
        read(dst), np.concatenate([pieces(source)[rank] for source in range(size)])
    )


@pytest.mark.parametrize(
    "table",
    # The first looks even to rank 0, and to nobody else.
    [[[2, 2, 2], [2, 0, 5], [2, 1, 0]], [[0] * 3] * 3, [[0, 3, 0], [0] * 3, [0] * 3]],
)
def test_all_to_all(nccl: Run, table: list[list[int]]) -> None:
    nccl(3, exchanges, table, shared=True)


def refuses(comm: Any) -> None:
    caller = Caller(comm)
    backend, kind = caller.backend, named("float32")
    able = [
        (op, dtype)
        for op in (*ops.NAMES,)
        for dtype in ("float32", "bfloat16", "int32", "bool", "uint16", "complex64")
        if backend.supports("all_reduce", ops.as_op(op), named(dtype), False)
    ]
    assert able == [
        (op, dtype)
        for op in ("sum", "prod", "min", "max", "avg")
        for dtype in ("float32", "bfloat16", "int32")
    ]
    assert not backend.supports("all_reduce", ops.as_op("sum"), kind, True)
    assert not backend.supports("scan", ops.as_op("sum"), kind, False)
    assert not backend.supports("reduce", ops.user_op(max), kind, False)
    assert backend.supports("reduce", ops.premul_sum(2.0), kind, False)
    assert not backend.supports("reduce", ops.premul_sum(2.0), named("complex64"), False)
    x = caller.buffer(np.ones(3, np.float32))
    for call in (
        lambda: caller.call("all_reduce", x, x, op=ops.as_op("band")),
        lambda: caller.call("scan", x, x, op=ops.as_op("sum")),
    ):
        with pytest.raises(UnsupportedError, match="host's memory"):
            call()


def test_what_nccl_lacks_is_known(nccl: Run) -> None:
    nccl(2, refuses)


def batches(comm: Any) -> None:
    caller = Caller(comm)
    size, one = caller.size, ops.as_op("sum")
    buffers = [caller.buffer(numbers(caller.rank, n)) for n in (5, 1, 300)]
    with caller.backend.batch():
        for each in buffers:
            caller.call("all_reduce", each, each, op=one)
        with caller.backend.batch():
            caller.call("broadcast", buffers[1], buffers[1], root=size - 1)
    for each, n in zip(buffers[::2], (5, 300)):
        np.testing.assert_array_equal(read(each), sum(numbers(r, n) for r in range(size)))
    with caller.backend.batch():
        pass


def test_batches(nccl: Run) -> None:
    nccl(3, batches, shared=True)


# -- the host plane ---------------------------------------------------------------------


class NoGpu(FakeNccl):
    """Ranks where neither CUDA nor NCCL can be loaded."""

    options: ClassVar[dict[str, str]] = {"devices": "cpu, cuda"}

    @classmethod
    def connect(cls, world: Any, timeout: float) -> Any:
        import os

        made = super().connect(world, timeout)
        os.environ["COLLECTIVE_CUDA_LIBRARY"] = os.environ["COLLECTIVE_NCCL_LIBRARY"] = "/none"
        return made


def on_host(comm: Any) -> None:
    backend, size, rank = comm._backend, comm.size, comm.rank
    x = Buffer(numbers(rank, 9), from_numpy(np.dtype("float32")))
    total = Buffer.empty(9, x.dtype)
    like = {"dtype": x.dtype, "shape": (9,), "op": ops.as_op("sum")}
    backend.plan(Request("all_reduce", ordered=True, **like))(x, total, FAR)
    np.testing.assert_array_equal(total.array, sum(numbers(r, 9) for r in range(size)))
    backend.plan(Request("scan", **like))(x, total, FAR)
    backend.plan(Request("barrier"))(None, None, FAR)
    backend.agree(CALL, FAR)
    backend.sendrecv(x, (rank + 1) % size, total, (rank - 1) % size, 3, FAR)
    np.testing.assert_array_equal(total.array, numbers((rank - 1) % size, 9))
    assert backend.empty(64, CALL, FAR).nbytes == 64
    assert comm.all_reduce(np.ones(3)).tolist() == [size] * 3
    half = comm.split(rank % 2)
    assert half.all_reduce(np.ones(1)).item() == half.size


def test_host_memory_needs_no_gpu() -> None:
    for run in pools(NoGpu):
        run(3, on_host)


# -- groups -----------------------------------------------------------------------------


def shrinks(comm: Any, used: bool) -> None:
    caller = Caller(comm)
    if used:
        x = caller.buffer(np.ones(2))
        caller.call("all_reduce", x, x, op=ops.as_op("sum"))
    if caller.rank == 1:
        return
    less = Caller(caller.backend.shrink([1], FAR))
    assert (less.rank, less.size) == ([0, None, 1][caller.rank], 2)
    assert (less.backend._comm is not None) is used
    x = less.buffer(np.ones(2))
    less.call("all_reduce", x, x, op=ops.as_op("sum"))
    assert read(x).tolist() == [2, 2]
    less.backend.close()


@pytest.mark.parametrize("used", [False, True])
def test_shrink(nccl: Run, used: bool) -> None:
    nccl(3, shrinks, used)


# -- messages ---------------------------------------------------------------------------


def out_of_order(comm: Any) -> None:
    caller = Caller(comm)
    tags = [5, 0, 2**31 - 1, 7, 2**40, -9]
    sent = {tag: numbers(at, 3 + at) for at, tag in enumerate(tags)}

    def send(tag: int) -> None:
        mine = caller.on(caller.device.new_stream())
        mine.backend.send(mine.buffer(sent[tag]), 1, tag, FAR)
        mine.finish()

    if caller.rank == 0:
        side_by_side(*(lambda tag=tag: send(tag) for tag in tags))
    else:
        for tag in reversed(tags):
            got = caller.empty(sent[tag].size, "float32")
            assert caller.backend.recv(got, 0, tag, FAR) == 0
            np.testing.assert_array_equal(read(got), sent[tag])


def test_tags_out_of_order(nccl: Run) -> None:
    nccl(2, out_of_order)


def uneven_sendrecv(comm: Any) -> None:
    """Nothing goes one way, something the other; the peers use plain calls."""
    caller = Caller(comm)
    some, nothing = caller.buffer(np.arange(3)), caller.empty(0, "int64")
    if caller.rank == 0:
        got = caller.empty(0, "int64")
        caller.backend.sendrecv(some, 1, got, 1, 2, FAR)
        caller.backend.sendrecv(nothing, 1, some, 1, 2, FAR)
        assert read(some).tolist() == [7, 8, 9]
    else:
        got = caller.empty(3, "int64")
        caller.backend.recv(got, 0, 2, FAR)
        caller.backend.send(nothing, 0, 2, FAR)
        assert read(got).tolist() == [0, 1, 2]
        caller.backend.recv(nothing, 0, 2, FAR)
        caller.backend.send(caller.buffer(np.arange(7, 10)), 0, 2, FAR)


def test_sendrecv_meets_plain_calls(nccl: Run) -> None:
    nccl(2, uneven_sendrecv)


def many_at_once(comm: Any) -> None:
    """All pairs and several tags at once, in threads that each wait for their message."""
    caller = Caller(comm)
    rank, size, tags = caller.rank, caller.size, range(3)
    others = [peer for peer in range(size) if peer != rank]

    def content(src: int, dst: int, tag: int, turn: int) -> np.ndarray[Any, Any]:
        return np.full(10 + tag, 1000 * src + 100 * dst + 10 * tag + turn)

    def send(dst: int, tag: int) -> None:
        mine = caller.on(caller.device.new_stream())
        for turn in range(3):
            mine.backend.send(mine.buffer(content(rank, dst, tag, turn)), dst, tag, FAR)
        mine.finish()

    def recv(src: int, tag: int) -> None:
        mine = caller.on(caller.device.new_stream())
        for turn in range(3):
            expected = content(src, rank, tag, turn)
            got = mine.empty(expected.size, "int64")
            mine.backend.recv(got, src, tag, FAR)
            np.testing.assert_array_equal(read(got), expected)

    side_by_side(
        *(lambda p=p, t=t: send(p, t) for p in others for t in tags),
        *(lambda p=p, t=t: recv(p, t) for p in others for t in tags),
    )


def test_all_pairs_and_tags_at_once(nccl: Run) -> None:
    nccl(3, many_at_once)


def two_threads_exchange(comm: Any) -> None:
    """Two exchanges of the same two ranks, each holding a turn in both directions."""
    caller = Caller(comm)
    peer = 1 - caller.rank

    def exchange(tag: int) -> None:
        mine = caller.on(caller.device.new_stream())
        for turn in range(20):
            x, got = mine.buffer(np.full(50, caller.rank + 10 * turn)), mine.empty(50, "int64")
            mine.backend.sendrecv(x, peer, got, peer, tag, FAR)
            assert read(got)[0] == peer + 10 * turn

    side_by_side(lambda: exchange(1), lambda: exchange(2))


def test_exchanges_in_two_threads(nccl: Run) -> None:
    nccl(2, two_threads_exchange)


def from_anybody(comm: Any) -> None:
    caller = Caller(comm)
    if caller.rank:
        caller.backend.send(caller.buffer(np.full(2, caller.rank)), 0, 0, FAR)
        caller.finish()
        return
    seen = []
    for _ in range(caller.size - 1):
        got = caller.empty(2, "int64")
        source = caller.backend.recv(got, ANY_SOURCE, 0, FAR)
        assert read(got).tolist() == [source] * 2
        seen.append(source)
    assert sorted(seen) == [1, 2]


def test_any_source(nccl: Run) -> None:
    nccl(3, from_anybody)


def asks_later(comm: Any) -> None:
    """A message behind work that waits for another message of the same direction.

    Rank 1's stream for tag 1 gets to its call only when tag 2 has been received: were tag 1
    issued before it is ready, tag 2 would wait behind it for ever.
    """
    caller = Caller(comm)
    if caller.rank == 0:
        first, second = (caller.on(caller.device.new_stream()) for _ in range(2))
        side_by_side(
            lambda: caller.backend.send(first.buffer(np.full(3, 1)), 1, 1, FAR),
            lambda: caller.backend.send(second.buffer(np.full(3, 2)), 1, 2, FAR),
        )
        return
    got = [caller.empty(3, "int64") for _ in range(2)]
    late = caller.device.new_stream()

    def second() -> None:
        time.sleep(0.05)
        caller.backend.recv(got[1], 0, 2, FAR)
        late.wait(caller.stream.record())

    def first() -> None:
        mine = caller.on(late)
        one = mine.empty(3, "int64")
        caller.backend.recv(one, 0, 1, FAR)
        assert read(one).tolist() == [1] * 3

    side_by_side(second, first)
    assert read(got[1]).tolist() == [2] * 3


def test_receives_in_two_threads(nccl: Run) -> None:
    nccl(2, asks_later)


# -- memory -----------------------------------------------------------------------------


def allocates(comm: Any) -> None:
    caller = Caller(comm)
    backend = caller.backend
    array = backend.empty_device(4096 * 8, CALL, FAR)
    assert (array.nbytes, array.dtype, array.device) == (4096 * 8, np.uint8, caller.device)
    x = Buffer(array.view(np.float64), named("float64"))
    x.array.fill_from_host(np.full(4096, caller.rank + 1.0))
    caller.call("all_reduce", x, x, op=ops.as_op("sum"))
    assert read(x)[-1] == sum(range(1, caller.size + 1))
    assert backend.empty_device(0, CALL, FAR).nbytes == 0
    kept = backend.empty_device(64, CALL, FAR)
    del array, x
    gc.collect()
    end = time.monotonic() + FAR
    while len(backend._blocks._out) > 1 or backend._blocks._dropped:
        assert time.monotonic() < end, "it was not given back"
        time.sleep(0.002)
    backend.close()
    # Arrays stay valid until they are dropped, and go without a communicator.
    kept.fill_from_host(np.arange(64, dtype=np.uint8))
    assert kept.to_host()[-1] == 63
    del kept
    gc.collect()
    assert not backend._blocks._out
    assert not backend._blocks._dropped


def test_memory_for_all_ranks(nccl: Run) -> None:
    nccl(2, allocates)


# -- other host planes ------------------------------------------------------------------


class OverGloo(FakeNccl):
    """With a host plane that has a monitor of its own."""

    options: ClassVar[dict[str, str]] = {"host": "gloo"}


def over_gloo(comm: Any) -> None:
    caller = Caller(comm)
    assert caller.backend.channel is caller.backend._plane.channel
    assert caller.backend.capabilities.across_hosts
    reduces(comm)
    out_of_order(comm)
    many_at_once(comm)
    x = caller.buffer(np.ones(2))
    half = Caller(caller.backend.group([1, 0], FAR))
    half.call("all_reduce", x, x, op=ops.as_op("sum"))
    assert read(x).tolist() == [2, 2]
    half.backend.close()


def test_over_gloo() -> None:
    pytest.importorskip("torch")
    for run in pools(OverGloo):
        run(2, over_gloo)

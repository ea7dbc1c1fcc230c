"""Calls over ``nccl`` on the ABI fake: the streams of their operations, and the order."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from collective.deadline import Deadline

pytest.importorskip("tests.fakes")

from collective.errors import CollectiveTimeoutError
from tests.fakes import Fake, FakeArray
from tests.support.nccl_processes import needs_compiler, pools
from tests.support.nccl_programs import (
    FAR,
    MAKERS,
    Gpus,
    calls_of_nccl,
    copied,
    enqueue_copy,
    error_of,
    held,
    is_poison,
    new_stream,
    of_fake,
    ordinal_of,
    peek,
    read,
    room,
    settled,
    until,
    warm,
)
from tests.support.on_ranks import on_ranks

pytestmark = needs_compiler

nccl = pools(Gpus)


def mine(comm: Any, count: int = 6) -> np.ndarray[Any, Any]:
    """Return the input of a rank."""
    return np.arange(count, dtype=np.float32) + 10 * comm.rank


def total(comm: Any, count: int = 6) -> list[float]:
    return (np.arange(count) * comm.size + 10 * sum(range(comm.size))).tolist()


# -- calls that return once they are enqueued -------------------------------------------------


@pytest.mark.parametrize("kind", MAKERS)
@on_ranks("nccl", shared=True)
def test_call_is_enqueued_on_stream_of_caller(comm: Any, kind: str) -> None:
    make = MAKERS[kind]
    warm(comm)
    a = new_stream(comm)
    x, y = make(comm, mine(comm), a), make(comm, np.zeros(6, np.float32), a)
    settled(comm)
    with held() as fake:
        fake.clear_log()
        assert comm.all_reduce(x, out=y) is y
        assert is_poison(y), peek(y)
        (call,) = calls_of_nccl()
        assert re.search(rf"stream={a:#x}\b", call), call
        after = copied(comm, y, a)
        assert is_poison(after)
    Fake().synchronize(a, ordinal_of(comm))
    assert peek(y).tolist() == peek(after).tolist() == total(comm)
    assert read(x).tolist() == mine(comm).tolist()


@pytest.mark.parametrize("kind", MAKERS)
@on_ranks("nccl", shared=True)
def test_results_are_ready_on_stream_of_caller(comm: Any, kind: str) -> None:
    """Results that the library allocates are also ordered on the caller's stream."""
    make = MAKERS[kind]
    warm(comm)
    a = new_stream(comm)
    x = make(comm, mine(comm), a)
    settled(comm)
    calls = {
        "all_reduce": lambda: comm.all_reduce(x),
        "reduce": lambda: comm.reduce(x, root=1),
        "all_gather": lambda: comm.all_gather(x),
        "gather": lambda: comm.gather(x, root=1),
        "reduce_scatter": lambda: comm.reduce_scatter(x),
        "all_to_all": lambda: comm.all_to_all(x),
        "broadcast": lambda: comm.broadcast(x, root=0),
        "scatter": lambda: comm.scatter(x if comm.rank == 0 else None, like=x),
    }
    everyone = np.stack([np.arange(6) + 10 * rank for rank in range(comm.size)])
    count = 6 // comm.size
    piece = slice(comm.rank * count, (comm.rank + 1) * count)
    expected = {
        "all_reduce": everyone.sum(0),
        "reduce": everyone.sum(0),
        "all_gather": everyone.ravel(),
        "gather": everyone.ravel(),
        "reduce_scatter": everyone.sum(0)[piece],
        "all_to_all": everyone[:, piece].ravel(),
        "broadcast": everyone[0],
        "scatter": everyone[0][piece],
    }
    for name, call in calls.items():
        with held():
            result = call()
            if result is not None and not (name == "broadcast" and comm.rank == 0):
                assert is_poison(result), name
        if result is None:
            assert name in ("reduce", "gather")
            assert comm.rank != 1
            settled(comm)  # the calls of the other ranks end when this rank's calls have ended
        elif name != "scatter" or comm.rank == 0:
            Fake().synchronize(a, ordinal_of(comm))  # wait for the caller's stream only
            assert peek(result).tolist() == expected[name].tolist(), name
        else:
            assert read(result).tolist() == expected[name].tolist(), name
    settled(comm)


@on_ranks("nccl", size=3, shared=True)
def test_call_reads_results_of_earlier_work_on_stream(comm: Any) -> None:
    """A call reads the results of earlier work on its stream, and not of later work."""
    warm(comm)
    a = new_stream(comm)
    x = FakeArray((6,), "float32", device=ordinal_of(comm), stream=a)
    with held():
        x.set(mine(comm))
        y = comm.all_reduce(x)
        x.set(np.full(6, -1, np.float32))
        z = comm.all_reduce(x)
        x.set(np.full(6, -2, np.float32))
    assert read(y).tolist() == total(comm)
    assert read(z).tolist() == [-comm.size] * 6
    assert read(x).tolist() == [-2] * 6


@pytest.mark.parametrize("async_op", [False, True])
@on_ranks("nccl", shared=True)
def test_output_on_another_stream_is_ordered(comm: Any, async_op: bool) -> None:
    """Input and output name different streams in their __cuda_array_interface__."""
    warm(comm)
    a, b = new_stream(comm), new_stream(comm)
    x = FakeArray((6,), "float32", device=ordinal_of(comm), stream=a)
    y = of_fake(comm, np.full(6, 5, np.float32), b)
    settled(comm)
    with held():
        x.set(mine(comm))
        for _ in range(20):  # more work, so that this stream finishes later
            y.set(np.full(6, -1, np.float32))
        work = comm.all_reduce(x, out=y, async_op=async_op)
        if async_op:
            work.wait()
        after = copied(comm, y, b)
    settled(comm)
    assert read(y).tolist() == total(comm), "the call did not wait for the stream of the output"
    assert read(after).tolist() == total(comm), "the stream of the output did not wait for the call"


@pytest.mark.parametrize("async_op", [False, True])
@on_ranks("nccl", shared=True)
def test_structure_on_several_streams_is_reduced(comm: Any, async_op: bool) -> None:
    """Reduce a structure whose arrays are on different streams."""
    warm(comm)
    streams = [new_stream(comm) for _ in range(3)]
    leaves = [FakeArray((4,), "float32", device=ordinal_of(comm), stream=s) for s in streams]
    with held():
        for number, leaf in enumerate(leaves):
            for value in (*range(10 * number), number + 10 * comm.rank):
                leaf.set(np.full(4, value, np.float32))
        result = comm.all_reduce(leaves, out=leaves, async_op=async_op)
        if async_op:
            result = result.wait()
        copies = [copied(comm, leaf, s) for leaf, s in zip(leaves, streams)]
    settled(comm)
    expected = [[sum(n + 10 * r for r in range(comm.size))] * 4 for n in range(3)]
    assert [read(array).tolist() for array in leaves] == expected
    assert [read(array).tolist() for array in copies] == expected


@on_ranks("nccl", shared=True)
def test_calls_on_several_streams_are_ordered(comm: Any) -> None:
    """Calls on two streams of the program are ordered on each stream separately."""
    warm(comm)
    a, b = new_stream(comm), new_stream(comm)
    x, y = of_fake(comm, mine(comm), a), of_fake(comm, 100 + mine(comm), b)
    with held():
        for _ in range(5):
            comm.all_reduce(x, out=x)
            comm.all_reduce(y, out=y)
    assert read(x).tolist() == [(10 + 2 * i) * 2.0**4 for i in range(6)]
    assert read(y).tolist() == [(210 + 2 * i) * 2.0**4 for i in range(6)]


# -- calls in the background --------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAKERS)
@on_ranks("nccl", shared=True)
def test_wait_orders_stream_of_caller_and_not_host(comm: Any, kind: str) -> None:
    make = MAKERS[kind]
    warm(comm)
    a = new_stream(comm)
    x, y = make(comm, np.zeros(6, np.float32), a), make(comm, np.zeros(6, np.float32), a)
    settled(comm)
    with held() as fake:
        fake.clear_log()
        source = of_fake(comm, mine(comm), a)
        enqueue_copy(comm, x, source, a)
        work = comm.all_reduce(x, out=y, async_op=True)
        (call,) = calls_of_nccl()
        assert not re.search(rf"stream={a:#x}\b", call), call
        assert not work.done()
        assert work.exception() is None
        assert work.wait(timeout=0.5) is y
        assert "running" in repr(work)
        after = copied(comm, y, a)
        assert is_poison(y)
        assert is_poison(after)
        assert isinstance(error_of(work.synchronize, timeout=0.05), CollectiveTimeoutError)
    Fake().synchronize(a, ordinal_of(comm))
    assert peek(after).tolist() == total(comm)
    assert work.done()
    assert work.synchronize() is work.wait() is y
    assert work.exception() is None
    settled(comm)


@on_ranks("nccl", shared=True)
def test_synchronize_waits_on_the_host(comm: Any) -> None:
    warm(comm)
    x = of_fake(comm, mine(comm))
    with Fake().turned("delay_us", 50_000, back=300):
        work = comm.all_reduce(x, async_op=True)
        assert peek(work.synchronize()).tolist() == total(comm)
        assert work.done()
    # A wait in another thread orders the stream that is current in that thread.
    with held():
        work = comm.all_reduce(x, out=x, async_op=True)
    thread_got: list[Any] = []
    thread = threading.Thread(target=lambda: thread_got.append(work.synchronize(FAR)))
    thread.start()
    thread.join()
    assert peek(thread_got[0]).tolist() == total(comm)


@on_ranks("nccl", size=3, shared=True)
def test_background_calls_complete_in_order(comm: Any) -> None:
    """Run several calls at once, each of which uses the result of the call before."""
    warm(comm)
    a = new_stream(comm)
    x = of_fake(comm, np.ones(4, np.float32), a)
    strided = of_fake(comm, np.ones((4, 6), np.float32)[:, ::2], a)
    wide = of_fake(comm, np.full((3, 4), comm.rank, np.float32).T, a)
    settled(comm)
    with held():
        works = [comm.all_reduce(x, out=x, async_op=True) for _ in range(6)]
        gathered = comm.all_gather(x, async_op=True)
        turned = comm.all_reduce(strided, out=strided, async_op=True)
        along = comm.all_gather(wide, axis=1, async_op=True)
        assert not any(work.done() for work in (*works, gathered, turned, along))
        along.wait()  # the last call, so all calls are ordered before the copy
        copy = copied(comm, x, a)
    Fake().synchronize(a, ordinal_of(comm))
    assert peek(copy).tolist() == [comm.size**6] * 4
    assert all(work.done() for work in (*works, gathered, turned, along))
    assert peek(gathered.wait()).tolist() == [comm.size**6] * 4 * comm.size
    assert peek(strided).tolist() == [[comm.size] * 3] * 4
    assert peek(along.wait()).tolist() == [[r for r in range(comm.size) for _ in "123"]] * 4
    between = strided.memory().view(np.uint32)[1::2]
    assert set(between.tolist()) == {0xCBCBCBCB}, "the call wrote between the elements"


@on_ranks("nccl", shared=True)
def test_mixed_foreground_and_background_calls_are_correct(comm: Any) -> None:
    """Mix calls in the background, calls in the foreground, and calls on the host."""
    warm(comm)
    a = new_stream(comm)
    x, y = of_fake(comm, mine(comm), a), of_fake(comm, mine(comm), a)
    with held():
        first = comm.all_reduce(x, out=x, async_op=True)
        comm.all_reduce(y, out=y)
        second = comm.all_reduce(x, out=x, async_op=True)
        comm.barrier()
        assert comm.all_gather_object(comm.rank) == list(range(comm.size))
        third = comm.barrier(async_op=True)
        third.wait(FAR)
        assert not first.done()
        second.wait()
        first.wait()
    assert read(y).tolist() == total(comm)
    assert read(x).tolist() == [comm.size * value for value in total(comm)]


@on_ranks("nccl", size=3, shared=True)
def test_first_background_call_returns_without_peers(comm: Any) -> None:
    """The first call of a communicator in the background returns without the peers."""
    child = comm.dup()
    x = of_fake(comm, mine(comm))
    if comm.rank:
        comm.recv_object(0)  # rank 0 has made its call, and the call has returned
    work = child.all_reduce(x, async_op=True)
    again = child.all_reduce(x, out=x, async_op=True)
    if comm.rank == 0:
        assert not work.done()
        for rank in range(1, comm.size):
            comm.send_object(None, rank)
    result = work.wait()
    assert read(again.wait()).tolist() == total(comm)
    settled(comm)
    assert peek(result).tolist() == total(comm)
    child.close()


# -- arrays that are dropped while in use -------------------------------------------------------


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("kind", MAKERS)
@on_ranks("nccl", shared=True)
def test_dropped_arrays_and_works_stay_valid_until_completion(
    comm: Any, kind: str, async_op: bool
) -> None:
    warm(comm)
    rank, size = comm.rank, comm.size
    a = new_stream(comm)

    def x() -> Any:
        return room(comm, kind, (4 * size, 2), a)

    def strided() -> Any:
        array = FakeArray((4 * size, 2), "float32", (16, 8), ordinal_of(comm), a)
        return array

    calls = {
        "all_reduce": lambda: comm.all_reduce(x(), async_op=async_op),
        "in place": lambda: comm.all_reduce(strided(), out=strided(), async_op=async_op),
        "a structure": lambda: comm.all_reduce([x(), x()], async_op=async_op),
        "reduce": lambda: comm.reduce(x(), root=1, async_op=async_op),
        "broadcast": lambda: comm.broadcast(x(), root=1, async_op=async_op),
        "a structure's broadcast": lambda: comm.broadcast([x(), strided()], async_op=async_op),
        "all_gather": lambda: comm.all_gather(x(), async_op=async_op),
        "along an axis": lambda: comm.all_gather(strided(), axis=1, async_op=async_op),
        "a structure's gather": lambda: comm.gather([x(), x()], async_op=async_op),
        "reduce_scatter": lambda: comm.reduce_scatter(x(), async_op=async_op),
        "its axis": lambda: comm.reduce_scatter(strided(), axis=1, async_op=async_op),
        "all_to_all": lambda: comm.all_to_all(x(), async_op=async_op),
        "a structure's all_to_all": lambda: comm.all_to_all([x(), x()], async_op=async_op),
        "scatter": lambda: comm.scatter(x() if rank == 0 else None, async_op=async_op),
    }
    for name, call in calls.items():
        comm.barrier()
        with held():
            call()
            gc.collect()
            # Memory that was freed too early now belongs to these arrays.
            taken = [x() for _ in range(4)]
            del taken
        try:
            settled(comm)
        except (AssertionError, OSError) as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.mark.parametrize("structure", [False, True])
@on_ranks("nccl", shared=True)
def test_dropped_result_stays_valid_while_stream_reads_it(comm: Any, structure: bool) -> None:
    """A result that the caller's stream still reads is not freed when its last reference goes."""
    warm(comm)
    a = new_stream(comm)
    x: Any = of_fake(comm, mine(comm), a)
    everyone = [v + 10 * r for r in range(comm.size) for v in range(6)]
    for name in ("all_gather", "all_reduce"):
        work = getattr(comm, name)([x] if structure else x, async_op=True)
        result = work.wait()[0] if structure else work.wait()
        assert result.stream.handle == a, (
            "the next use of the memory would not wait for the program's stream"
        )
        settled(comm)
        watched = weakref.ref(result)
        with held():
            after = copied(comm, result, a)
            del work, result
            until(lambda: watched() is None)  # noqa: B023  called at once
        settled(comm)
        assert peek(after).tolist() == (everyone if name == "all_gather" else total(comm))


@pytest.mark.parametrize("async_op", [False, True])
@on_ranks("nccl", shared=True)
def test_dropped_arrays_of_host_calls_stay_valid(comm: Any, async_op: bool) -> None:
    """Drop arrays of calls that go through host memory."""
    warm(comm)
    with Fake().turned("delay_us", 2000, back=300):
        comm.scan(of_fake(comm, mine(comm)), async_op=async_op)
        comm.all_reduce(of_fake(comm, mine(comm)), order="rank", async_op=async_op)
        x = of_fake(comm, mine(comm))
        comm.all_reduce(x, out=x, order="rank", async_op=async_op)
        del x
        gc.collect()
    comm.barrier()
    settled(comm)


# -- messages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAKERS)
@on_ranks("nccl", shared=True)
def test_messages_are_ordered_on_stream_of_caller(comm: Any, kind: str) -> None:
    make = MAKERS[kind]
    warm(comm)
    a = new_stream(comm)
    peer = 1 - comm.rank
    source = make(comm, mine(comm), a)
    x, received = make(comm, np.zeros(6, np.float32), a), make(comm, np.zeros(6, np.float32), a)
    zeros = make(comm, np.zeros(6, np.float32), a)
    settled(comm)
    peer_values = (np.arange(6) + 10 * peer).tolist()
    with Fake().turned("delay_us", 5000, back=300):
        for turn in range(3):
            enqueue_copy(comm, x, source, a)
            if turn == 2:
                assert comm.sendrecv(x, peer, peer, out=received) is received
            elif comm.rank == turn:
                comm.send(x, peer)
                comm.recv(received, peer)
            else:
                comm.recv(received, peer)
                comm.send(x, peer)
            after = copied(comm, received, a)
            enqueue_copy(comm, x, zeros, a)  # runs after the send
            enqueue_copy(comm, received, zeros, a)
            Fake().synchronize(a, ordinal_of(comm))
            assert peek(after).tolist() == peer_values
        enqueue_copy(comm, x, source, a)
        new = comm.sendrecv(x, peer, peer, like=x)
        assert read(new).tolist() == peer_values
    settled(comm)


@pytest.mark.parametrize("both", [False, True])
@on_ranks("nccl", shared=True)
def test_receives_posted_before_collective_complete(comm: Any, both: bool) -> None:
    """As MPI_Irecv, MPI_Allreduce, MPI_Irecv; the second message is sent after the collective."""
    warm(comm)
    a = new_stream(comm)
    x = of_fake(comm, mine(comm), a)
    if comm.rank == 0:
        first_message, second_message = (
            of_fake(comm, np.full(5, n, np.float32), a) for n in (1, 2)
        )
        comm.send(first_message, 1, tag=1)
        comm.all_reduce(x, out=x)
        comm.send(second_message, 1, tag=2)
    else:
        outs = [of_fake(comm, np.zeros(5, np.float32), a) for _ in "12"]
        first = comm.recv(outs[0], 0, tag=1, async_op=True)
        second = comm.recv(outs[1], 0, tag=2, async_op=True) if both else None
        comm.all_reduce(x, out=x)
        second = second or comm.recv(outs[1], 0, tag=2, async_op=True)
        second.wait()
        first.wait()
        Fake().synchronize(a, ordinal_of(comm))
        assert [peek(out).tolist() for out in outs] == [[1] * 5, [2] * 5]
    assert read(x).tolist() == total(comm)
    comm.barrier()
    settled(comm)


@on_ranks("nccl", shared=True)
def test_background_messages_are_ordered_on_stream(comm: Any) -> None:
    """A receive waits for earlier work on the stream; its wait orders the stream, not the host."""
    warm(comm)
    a = new_stream(comm)
    peer = 1 - comm.rank
    x = of_fake(comm, mine(comm), a)
    received = FakeArray((6,), "float32", device=ordinal_of(comm), stream=a)
    peer_values = (np.arange(6) + 10 * peer).tolist()
    for _ in range(3):
        with Fake().turned("delay_us", 4000, back=300):
            received.set(np.zeros(6, np.float32))
            work = comm.sendrecv(x, peer, peer, out=received, async_op=True)
            assert work.wait() is received
            after = copied(comm, received, a)
        Fake().synchronize(a, ordinal_of(comm))
        assert peek(after).tolist() == peer_values
    sent = comm.send(x, peer, tag=7, async_op=True)
    new = comm.recv(None, peer, tag=7, like=x, async_op=True)
    assert read(new.wait()).tolist() == peer_values
    sent.wait()
    # Drop messages that are in flight.
    with Fake().turned("delay_us", 4000, back=300):
        comm.send(of_fake(comm, mine(comm), a), peer, tag=8, async_op=True)
        comm.recv(of_fake(comm, mine(comm), a), peer, tag=8, async_op=True)
        del x, received, new
        gc.collect()
        comm.barrier()
    for lane in list(comm._path.lanes.values()):
        assert lane.drain(Deadline(FAR))
    comm.barrier()
    settled(comm)

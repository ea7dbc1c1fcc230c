"""Messages, asynchronous calls, groups, errors and destruction of a group over our transports."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
functional = pytest.importorskip("torch.distributed._functional_collectives")

from collective import native  # noqa: E402
from collective.adapters.torch.backend import way  # noqa: E402
from collective.errors import (  # noqa: E402
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    CommunicatorClosedError,
    DtypeError,
    InvalidArgumentError,
    MismatchError,
    PeerFailedError,
    PeerLostError,
    UnsupportedError,
)
from collective.memory.dtypes import BY_NAME  # noqa: E402
from tests.support.selection import in_whole  # noqa: E402
from tests.support.torch_groups import in_groups  # noqa: E402

WORLDS = [("shm", 3), in_whole(("tcp", 2)), in_whole(("gloo", 2))]


@in_groups(*WORLDS)
def test_p2p_messages_arrive_in_order_for_each_tag(rank: int, size: int) -> None:
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in (1, 100_000):
        x, out = torch.full((count, 2), 1.0 * rank), torch.zeros(2, count).t()
        ops = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, out, before)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert torch.equal(out, torch.full((count, 2), 1.0 * before))
    # Messages of one tag arrive in the order of sending; tags are independent of each other.
    if rank == 0:
        works = [dist.isend(torch.tensor([i]), 1, tag=i % 2) for i in range(6)]
        for work in works:
            work.wait()
    elif rank == 1:
        for i in (1, 0, 3, 2, 5, 4):
            got = torch.zeros(1, dtype=torch.int64)
            assert dist.recv(got, 0, tag=i % 2) == 0
            assert got.item() == i


@in_groups(*WORLDS)
def test_all_to_all_in_place_succeeds(rank: int, size: int) -> None:
    for count in (1, 50_000):
        expected = torch.arange(1.0 * size).repeat_interleave(count)
        single = torch.full((size * count,), 1.0 * rank)
        dist.all_to_all_single(single, single)
        assert torch.equal(single, expected)
        listed = list(torch.full((size * count,), 1.0 * rank).chunk(size))
        dist.all_to_all(listed, listed)
        assert torch.equal(torch.cat(listed), expected)


@in_groups(*WORLDS)
def test_p2p_messages_to_same_rank_arrive(rank: int, size: int) -> None:
    # Programs that treat all ranks alike send messages to their own rank; NCCL supports this.
    out, x = torch.zeros(2, 3).t(), torch.full((3, 2), 1.0 * rank)
    received = dist.irecv(out, rank, tag=3)
    for i in range(2):
        dist.isend(x + i, rank, tag=3).wait()
    x.fill_(-1)
    received.wait()
    assert torch.equal(out, torch.full((3, 2), 1.0 * rank))
    assert received.source_rank() == rank
    dist.irecv(out, rank, tag=3).wait()
    assert torch.equal(out, torch.full((3, 2), rank + 1.0))
    gathered = torch.zeros(size)
    ops = [dist.P2POp(dist.isend, torch.tensor([1.0 * rank]), r) for r in range(size)]
    ops += [dist.P2POp(dist.irecv, gathered[r : r + 1], r) for r in range(size)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert torch.equal(gathered, torch.arange(1.0 * size))
    dist.isend(torch.zeros(3), rank)
    with pytest.raises(InvalidArgumentError):
        dist.irecv(torch.zeros(4), rank).wait()
    dist.group.WORLD.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(CollectiveTimeoutError, match=rf"timed out.*Start isend to rank {rank} "):
        dist.irecv(out, rank).wait()


@pytest.mark.skipif(not hasattr(functional, "batch_p2p_ops_inplace"), reason="not in this torch")
@in_groups(*WORLDS)
def test_functional_batch_p2p_ops_exchange_values(rank: int, size: int) -> None:
    out, after, before = torch.zeros(3), (rank + 1) % size, (rank - 1) % size
    pair = [torch.full((3,), 1.0 * rank), out]
    works = functional.batch_p2p_ops_inplace(
        ["isend", "irecv"], [after, before], [0, 0], pair, dist.group.WORLD
    )
    for work in works:
        functional.wait_tensor(work)
    assert torch.equal(out, torch.full((3,), 1.0 * before))


@in_groups(*WORLDS)
def test_c10d_op_runs_on_backend_or_raises(rank: int, size: int) -> None:
    group, pieces = dist.group.WORLD.boxed(), [torch.full((2,), float(r)) for r in range(size)]
    if way() == "Backend":
        out = torch.zeros(2)
        torch.ops.c10d.scatter_([out], [pieces] * (rank == 1), group, 1, True, -1)
        dist.barrier()
        assert torch.equal(out, pieces[rank])
        return
    # C++ finds a backend below our process group. It must raise, not pretend success.
    with pytest.raises(RuntimeError, match=r"error_on_collective|does not support|No backend"):
        torch.ops.c10d.barrier(torch.empty(1), group, [], timeout=-1)
    dist.barrier()


@in_groups(*WORLDS)
def test_recv_from_any_source_returns_sender(rank: int, size: int) -> None:
    if rank:
        dist.send(torch.tensor([10 * rank]), 0)
        return
    received = {}
    for _ in range(size - 1):
        out = torch.zeros(1, dtype=torch.int64)
        source = dist.recv(out)
        received[source] = out.item()
    assert received == {r: 10 * r for r in range(1, size)}


@in_groups(*WORLDS)
def test_p2p_message_may_overtake_async_collective(rank: int, size: int) -> None:
    # Rank 0 starts the collective before it sends. Rank 1 joins the collective only after it has
    # received that message.
    x, note = torch.ones(3), torch.zeros(1)
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        dist.send(torch.ones(1), 1)
        work.wait()
    else:
        if rank == 1:
            dist.recv(note, 0)
        dist.all_reduce(x)
    assert torch.equal(x, torch.full((3,), 1.0 * size))


@in_groups(*WORLDS)
def test_async_work_reports_completion_and_result(rank: int, size: int) -> None:
    x = torch.ones(5)
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future()
    assert work.wait() is True
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is x
    assert future.wait()[0] is x
    doubled = work.get_future().then(lambda done: done.value()[0] * 2)
    assert torch.equal(doubled.wait(), torch.full((5,), 2.0 * size))
    # Calls in flight run in the order in which they were issued.
    y = torch.zeros(1)
    works = []
    for _ in range(20):
        y += 0
        works.append(dist.all_reduce(x, async_op=True))
    works[-1].wait()
    assert all(work_before.is_completed() for work_before in works)
    assert x[0] == float(size) ** 21
    dist.all_reduce(y.fill_(1))
    assert y.item() == size
    outs = [torch.zeros(2) for _ in range(size)]
    value = dist.all_gather(outs, torch.ones(2), async_op=True).get_future().wait()
    assert value[0][0] is outs[0]
    assert dist.barrier(async_op=True).wait()


@in_groups(*WORLDS)
def test_future_callback_may_issue_collective(rank: int, size: int) -> None:
    # PowerSGD's hook does this: the callback of the first call issues the second call and waits
    # for it, while a third call is already queued.
    def again(done: Any) -> Any:
        return dist.all_reduce(done.value()[0], async_op=True).get_future().wait()[0]

    x, y = torch.ones(3), torch.full((2,), 2.0)
    if rank == 0:
        time.sleep(0.05)  # meanwhile the other ranks queue all their calls
    first = dist.all_reduce(x, async_op=True).get_future().then(again)
    third = dist.all_reduce(y, async_op=True)
    assert torch.equal(first.wait(), torch.full((3,), 1.0 * size * size))
    third.wait()
    assert torch.equal(y, torch.full((2,), 2.0 * size))


@in_groups(*WORLDS)
def test_new_group_communicates_among_its_ranks(rank: int, size: int) -> None:
    pair = dist.new_group([0, 1])
    alone = [dist.new_group([r]) for r in range(size)]
    upside_down = dist.new_group(list(range(size)), timeout=timedelta(seconds=7))
    assert upside_down.comm.timeout == 7
    x = torch.tensor([1.0 * rank])
    if rank < 2:
        dist.all_reduce(x, group=pair)
        assert x.item() == 1
        dist.broadcast(x.fill_(rank), src=1, group=pair)
        assert x.item() == 1
    dist.all_reduce(x.fill_(5), group=alone[rank])
    assert x.item() == 5
    dist.all_reduce(x.fill_(1), group=upside_down)
    assert x.item() == size
    assert dist.get_backend(upside_down) == "collective"
    if rank < 2:
        dist.destroy_process_group(pair)
    if rank in (0, size - 1):
        half = dist.group.WORLD.split_group([0, size - 1])
        half.allreduce([x.fill_(1)]).wait()
        assert x.item() == 2
        half.shutdown()
    dist.group.WORLD.monitored_barrier(timedelta(seconds=10))


@in_groups(*WORLDS)
def test_failed_call_raises_and_group_stays_usable(rank: int, size: int) -> None:
    x, op = torch.ones(3), dist.ReduceOp.BAND
    with pytest.raises(DtypeError):
        dist.all_reduce(x, op)
    work = dist.all_reduce(x, op, async_op=True)
    with pytest.raises(DtypeError) as caught:
        work.wait()
    assert work.exception() is caught.value
    assert work.is_completed()
    assert not work.is_success()
    with pytest.raises(DtypeError):
        work.get_future().wait()
    with pytest.raises(TypeError, match="tensor"):
        dist.all_reduce(3)
    dist.all_reduce(torch.ones(1))  # the group remains usable


@in_groups(("shm", 3))
def test_mismatched_calls_raise_with_source_location(rank: int, size: int) -> None:
    with pytest.raises(MismatchError):
        dist.all_reduce(
            torch.ones(3, dtype=torch.int64), (dist.ReduceOp.AVG, dist.ReduceOp.SUM)[rank % 2]
        )
    with pytest.raises(MismatchError, match=os.path.basename(__file__)):
        dist.all_reduce(torch.ones(100_000 + rank))
    dist.barrier()


@pytest.mark.parametrize(
    ("caller", "seconds", "everyone"), [(0, 0.5, False), (0, 0.0, True), (1, 0.0, True)]
)
@in_groups(*WORLDS)
def test_monitored_barrier_timeout_names_missing_ranks(
    rank: int, size: int, caller: int, seconds: float, everyone: bool
) -> None:
    store = dist.group.WORLD.get_group_store()
    if rank != caller:
        store.wait(["over"])  # if this rank left, the caller would report it as gone
        return
    with pytest.raises(TimeoutError) as caught:
        dist.group.WORLD.monitored_barrier(timedelta(seconds=seconds), wait_all_ranks=everyone)
    store.set("over", "")
    others = tuple(other for other in range(size) if other != caller)
    named = others if everyone else others[:1]
    who = f"Rank{'s' * everyone} {', '.join(map(str, named))} failed to pass monitoredBarrier"
    # The texts are Gloo's, for programs that search for them.
    state = (
        "timed out in monitoredBarrier",
        "successfully reached monitoredBarrier, but received errors while waiting for send/recv "
        "from rank 0",
    )[caller]
    assert f"Rank {caller} {state}: {who}" in str(caught.value)
    assert isinstance(caught.value, CollectiveTimeoutError)
    assert caught.value.ranks == others


@in_groups(*WORLDS)
def test_work_wait_with_timeout_raises_and_call_continues(rank: int, size: int) -> None:
    x = torch.ones(1)
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        with pytest.raises(CollectiveTimeoutError, match="still running"):
            work.wait(timedelta(milliseconds=50))
        assert not work.is_completed()
        dist.send(torch.zeros(1), 1)
        work.wait()
    else:
        if rank == 1:
            dist.recv(torch.zeros(1), 0)
        dist.all_reduce(x)
    assert x.item() == size


@in_groups(*WORLDS)
def test_group_abort_raises_on_other_ranks(rank: int, size: int) -> None:
    # Rank 0 waits for all ranks first: a rank that is still connecting, or in an earlier call,
    # would get a different error text.
    store = dist.group.WORLD.get_group_store()
    if rank == 0:
        store.wait([f"there-{other}" for other in range(1, size)])
        dist.group.WORLD.abort()
        return
    store.set(f"there-{rank}", "")
    with pytest.raises(CommunicatorAbortedError, match="process group was aborted"):
        dist.barrier()


@in_groups(*WORLDS)
def test_process_group_can_be_destroyed_and_created_again(
    rank: int, size: int, tmp_path: Path
) -> None:
    store = str(tmp_path / "store")
    for _ in range(2):
        dist.all_reduce(torch.ones(100_000))
        dist.all_reduce(torch.ones(100_000))  # uses symmetric memory
        dist.all_reduce(torch.ones(3), async_op=True).wait()
        if rank < 2:
            dist.isend(torch.ones(1), 1 - rank)
            dist.recv(torch.ones(1), 1 - rank)
        group = dist.group.WORLD
        dist.barrier()
        dist.destroy_process_group()
        left = [t.name for t in threading.enumerate() if t.name.startswith("collective-torch")]
        assert left == []
        assert group.comm.closed
        store = f"{store}-again"
        dist.init_process_group(
            "collective", store=dist.FileStore(store, size), rank=rank, world_size=size
        )
    dist.barrier()


@in_groups(*WORLDS)
def test_group_with_receives_that_nobody_sends_can_be_destroyed(rank: int, size: int) -> None:
    patient = dist.new_group(timeout=timedelta(hours=1))
    received = dist.irecv(torch.zeros(1), (rank + 1) % size, group=patient)
    dist.destroy_process_group(patient)
    with pytest.raises((CommunicatorClosedError, PeerLostError)):
        received.wait()


@in_groups(("shm", 2), in_whole(("tcp", 2)), in_whole(("gloo", 2)))
def test_tensor_can_be_resized_after_every_call(rank: int, size: int) -> None:
    # As over torch's own Gloo. Some programs free the storage of a parameter in this way.
    def made(kind: Any) -> Any:
        return torch.full((4,), rank + 1.0, dtype=kind)

    calls: dict[str, Any] = {
        "all_reduce": lambda x: dist.all_reduce(x),
        "broadcast": lambda x: dist.broadcast(x, 0),
        "reduce": lambda x: dist.reduce(x, 0),
        "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(x, x[:2].clone()),
        "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(x, torch.cat([x, x])),
        "all_to_all_single": lambda x: dist.all_to_all_single(x, x.clone()),
        "send": lambda x: dist.send(x, 1 - rank) if rank else dist.recv(x, 1 - rank),
        "async": lambda x: dist.all_reduce(x, async_op=True).wait(),
        "isend": lambda x: (dist.isend if rank else dist.irecv)(x, 1 - rank).wait(),
    }
    for name, call in calls.items():
        for kind in (torch.float32, torch.bfloat16):
            for _ in range(3):  # the first call plans, the later ones run in C
                x = made(kind)
                call(x)
                x.untyped_storage().resize_(0)
                assert x.untyped_storage().nbytes() == 0, (name, kind)
                x.untyped_storage().resize_(4 * x.element_size())
                x.resize_(100).fill_(1.0)
                assert x.sum() == 100, (name, kind)


# Types whose elements this library does not know, as torch names them.
UNKNOWN = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and str(value).removeprefix("torch.") not in BY_NAME
    },
    key=str,
)


def of_bytes(dtype: Any, values: list[int]) -> Any:
    """Return a tensor of a dtype with an element for each value."""
    if dtype in (torch.qint8, torch.quint8, torch.qint32):
        return torch.quantize_per_tensor(torch.tensor(values) / 2, 0.5, 0, dtype)
    if dtype in (torch.quint4x2, torch.quint2x4):
        room = torch.ones(len(values)), torch.zeros(len(values))
        return torch.quantize_per_channel(torch.tensor(values) / 2, *room, 0, dtype)
    whole = torch.tensor([[value] * dtype.itemsize for value in values], dtype=torch.uint8)
    return whole.flatten().view(dtype)


def refused_by_torch(dtype: Any) -> bool:
    """Return whether torch's dispatcher knows no call of a backend for tensors of a dtype."""
    return way() == "Backend" and of_bytes(dtype, [0]).is_quantized


@pytest.mark.filterwarnings("ignore:.*quantiz")
@in_groups(("shm", 2))
def test_reductions_refuse_dtypes_that_the_library_does_not_know(rank: int, size: int) -> None:
    comm, together = dist.group.WORLD.comm, dist.group.WORLD.reduce_scatter_single_coalesced
    for dtype in UNKNOWN:
        if dtype.is_complex or refused_by_torch(dtype):  # of complex torch passes the real numbers
            continue
        x, long = of_bytes(dtype, [2, 4]), of_bytes(dtype, [2, 4, 2, 4])
        for call, *args in (
            (dist.all_reduce, x),
            (dist.all_reduce_coalesced, [x]),
            (dist.reduce, x, 0),
            (dist.reduce_scatter, x, [x, x]),
            (dist.reduce_scatter_tensor, x, long),
            (together, [x], [long]),
            (comm.all_reduce, x),
            (comm.scan, x),
        ):
            with pytest.raises(DtypeError, match=rf"{dtype} cannot be"):
                call(*args).wait()
    dist.barrier()


@pytest.mark.filterwarnings("ignore:.*quantiz")
@in_groups(("shm", 2))
def test_moves_keep_the_bytes_of_dtypes_that_the_library_does_not_know(
    rank: int, size: int
) -> None:
    for dtype in UNKNOWN:
        if refused_by_torch(dtype):
            with pytest.raises(NotImplementedError, match="Quantized"):
                dist.broadcast(of_bytes(dtype, [2, 4]), 1)
            continue
        x, other, expected = (of_bytes(dtype, [2, 4 * r]) for r in (rank, 1 - rank, 1))
        if dtype in (torch.quint4x2, torch.quint2x4):
            # torch's own view of their bytes is longer than their memory.
            with pytest.raises(DtypeError, match=rf"{dtype} cannot be sent"):
                dist.broadcast(x, 1)
            continue
        pieces = [of_bytes(dtype, [0, 0]) for _ in range(size)]
        dist.all_gather(pieces, x)
        dist.scatter(other, [pieces[1], pieces[1]] if rank == 0 else None, 0)
        dist.broadcast(x, 1)
        for tensor in (pieces[1], other, x):
            assert bytes(tensor.untyped_storage()) == bytes(expected.untyped_storage())


@in_groups(*WORLDS)
def test_call_of_second_thread_advises_another_group_on_every_rank(rank: int, size: int) -> None:
    group, others = dist.group.WORLD, dist.new_group()
    store = group.get_group_store()

    def wait_for_others() -> None:
        with contextlib.suppress(PeerFailedError):  # or the others still come
            dist.barrier()

    if rank == 0:
        waiting, calls = threading.Thread(target=wait_for_others), group.comm.recorder.started
        waiting.start()
        while group.comm.recorder.started == calls:
            time.sleep(0.001)
        dist.barrier(others)
        places = r"test_plugin_calls\.py.*is in barrier.* in wait_for_others .*dist\.new_group\(\)"
        with pytest.raises(UnsupportedError, match=places):
            dist.all_reduce(torch.ones(3))
        store.set("refused", "yes")
        waiting.join()
    else:
        dist.barrier(others)
        store.wait(["refused"])
        with contextlib.suppress(PeerFailedError):  # or the thread has done its part
            dist.barrier()
        with pytest.raises(PeerFailedError, match=r"dist\.new_group\(\)"):
            dist.barrier()


@pytest.mark.skipif(native.chosen.extension is None, reason="the native core is not in use")
@in_groups(("shm", 2))
def test_synchronous_calls_are_made_in_c(rank: int, size: int) -> None:
    x, whole = torch.ones(256), torch.ones(256 * size)
    root = rank == 0
    calls = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_reduce of maxima": lambda: dist.all_reduce(x, dist.ReduceOp.MAX),
        "reduce": lambda: dist.reduce(x, 0),
        "broadcast": lambda: dist.broadcast(x, 0),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, x),
        "all_gather": lambda: dist.all_gather([*whole.chunk(size)], x),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(x, whole),
        "all_to_all_single": lambda: dist.all_to_all_single(whole, whole.clone()),
        "gather": lambda: dist.gather(x, [*whole.chunk(size)] if root else None, 0),
        "scatter": lambda: dist.scatter(x, [*whole.chunk(size)] if root else None, 0),
        "barrier": dist.barrier,
    }
    for call in calls.values():  # Python makes each plan once
        call()
    for name, call in calls.items():
        error = AssertionError(f"Python makes {name}")
        with mock.patch.object(dist.group.WORLD.comm._path, "make", side_effect=error):
            call()


@in_groups(("shm", 2))
def test_async_calls_on_inference_tensors_write_results(rank: int, size: int) -> None:
    with torch.inference_mode():
        x, pieces = torch.full((3,), 1.0 * rank), [torch.empty(3) for _ in range(size)]
        dist.all_gather(pieces, x, async_op=True).wait()
    assert torch.equal(torch.stack(pieces), torch.arange(1.0 * size).repeat(3, 1).t())

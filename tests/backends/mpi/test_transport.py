"""Parts specific to ``mpi``: dtypes, operators, tags, lengths, and two ways for each call."""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from collective.algorithms.arithmetic import bfloat16_to_float32, float32_to_bfloat16
from collective.backends.mpi import MpiBackend, MpiStore, describe, folds
from collective.backends.mpi import transport as mpi_transport
from collective.backends.mpi.carrying import POLLED, Arrival
from collective.communicator import Communicator
from collective.contract.backend import ANY_SOURCE
from collective.deadline import Deadline
from collective.errors import (
    BackendError,
    CollectiveTimeoutError,
    PeerLostError,
    RendezvousError,
)
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from collective.ops import as_op, premul_sum, user_op
from collective.request import Request
from collective.start.mpi_world import world_of
from collective.testing import RankPool
from tests.support.mpi_launches import INSTALLED, launch_of
from tests.support.on_ranks import on_ranks

Array = np.ndarray[Any, Any]
_SIZE = 3


@pytest.fixture(scope="module", params=INSTALLED)
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Start three ranks of each vendor's MPI, and keep them for the module."""
    with RankPool(_SIZE, "mpi", timeout=30.0, mpiexec=launch_of(request.param)) as pool:
        yield pool


def _transport(comm: Communicator) -> MpiBackend:
    backend = comm.inner.transport
    assert isinstance(backend, MpiBackend)
    return backend


def _buffer(array: Array) -> Buffer:
    return Buffer(array, BY_NAME[array.dtype.name])


class _Silent:
    """Channel whose waits raise at once; the error text is the call that waits."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def wait(self, where: object, timeout: float) -> Any:
        raise CollectiveTimeoutError(str(where))

    def await_heard(self, ranks: Sequence[int]) -> None:
        self.heard += ranks


def _move(late: Any, request: Request) -> None:
    backend = object.__new__(MpiBackend)
    backend._comm = types.SimpleNamespace(Ibcast=lambda *_: late)
    backend.channel = channel = _Silent()  # type: ignore[assignment]
    backend.size = 2
    try:
        backend._move(POLLED, request, time.monotonic() + 1.0, "Bcast")
    finally:
        # The other ranks must know of the failure before the caller gets its array back, because
        # MPI may go on reading the array.
        assert channel.heard == [0, 1]


def _disagree(late: Any, request: Request) -> None:
    arrival = object.__new__(Arrival)
    arrival._comm = types.SimpleNamespace(Get_size=lambda: 2, Iallgather=lambda *_: late)
    arrival._channel = _Silent()  # type: ignore[assignment]
    arrival._disagree(request, Deadline(1.0))


@pytest.mark.parametrize("step", [_move, _disagree])
def test_timeout_of_polled_request_names_call(
    step: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error does not name the MPI request, which the program does not know."""
    monkeypatch.setattr("collective.backends.mpi.library._unfinished", [])
    late = types.SimpleNamespace(Test=lambda: False)
    with pytest.raises(CollectiveTimeoutError, match=r"^broadcast\("):
        step(late, Request("broadcast", BY_NAME["float32"], (3,), root=0))


# -- dtypes and operators ---------------------------------------------------------------------


@on_ranks("ranks", shared=True)
def test_16_bit_floats_match_numpy_sum(comm: Communicator) -> None:
    for count in (1, 7, 1000, 40_000, 600_001):
        halves = (np.arange(count) % 64 + comm.rank).astype(np.float16) / 2
        total = functools.reduce(
            np.add, [(np.arange(count) % 64 + r).astype(np.float16) / 2 for r in range(comm.size)]
        )
        np.testing.assert_array_equal(comm.all_reduce(halves), total)
        np.testing.assert_array_equal(comm.all_reduce(halves, async_op=True).wait(), total)
        bits = Buffer(float32_to_bfloat16(halves.astype(np.float32)), BY_NAME["bfloat16"])
        out = Buffer.empty(count, BY_NAME["bfloat16"])
        request = Request("all_reduce", bits.dtype, (count,), op=as_op("sum"))
        _transport(comm).plan(request)(bits, out, Deadline(20.0))
        np.testing.assert_array_equal(bfloat16_to_float32(out.array), total.astype(np.float32))


@on_ranks("ranks", shared=True)
def test_logical_operators_treat_floats_as_bools(comm: Communicator) -> None:
    x = np.array([0.5, 0.0, np.nan, comm.rank])
    assert comm.all_reduce(x, op="land").tolist() == [1, 0, 1, 0]
    assert comm.all_reduce(x, op="lor").tolist() == [1, 0, 1, 1]


@on_ranks("ranks", shared=True)
def test_scaling_operators_leave_input_unchanged(comm: Communicator) -> None:
    x = np.arange(10.0) + comm.rank
    original = x.copy()
    total = comm.size * np.arange(10.0) + sum(range(comm.size))
    np.testing.assert_array_equal(comm.all_reduce(x, op=premul_sum(0.5)), total / 2)
    reduced = comm.reduce(x, op="avg", root=2)
    if comm.rank == 2:
        np.testing.assert_array_equal(reduced, total / comm.size)
    part = np.array_split(total, comm.size)[comm.rank]
    np.testing.assert_array_equal(comm.reduce_scatter(x, op=premul_sum(2.0)), part * 2)
    np.testing.assert_array_equal(x, original)


@on_ranks("ranks", shared=True)
def test_scan_of_floats_reduces_in_rank_order(comm: Communicator) -> None:
    random = np.random.default_rng(7)
    inputs = [(random.standard_normal(999) * 1e3**r).astype(np.float32) for r in range(comm.size)]
    result = comm.scan(inputs[comm.rank])
    expected = functools.reduce(np.add, inputs[: comm.rank + 1])
    assert result.tobytes() == expected.tobytes()


@on_ranks("ranks")
def test_operator_deviating_on_one_rank_is_excluded_on_all(comm: Communicator) -> None:
    """Pretend that the processor of the last rank has a different vector unit."""
    backend = _transport(comm)
    own = backend.unlike
    flags = folds.deviations(backend._mpi)
    if comm.rank == comm.size - 1:
        flags = np.maximum(flags, [pair == ("prod", "int32") for pair in folds._TRIED])
    deviations = mpi_transport._deviations(
        backend._mpi, backend._comm, flags.astype(np.uint8),
        lambda: backend.channel.wait("connect", Deadline(20.0)),
    )  # fmt: skip
    assert deviations - own == {("prod", "int32")}


class _Operator:
    """Stand-in for an MPI operator that applies a Python function to NumPy arrays."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def Reduce_local(self, source: Any, inout: Any) -> None:
        (a, _, _), (b, _, _) = source, inout
        b[:] = self._function(a, b)


def _saturating_sum(a: Array, b: Array) -> Array:
    """Add with saturation in blocks of 32 bytes, as vector units can; the rest wraps."""
    total = a + b
    if a.itemsize < 4:
        saturated = a.size - a.size % (32 // a.itemsize)
        limits = np.iinfo(a.dtype)
        exact = a[:saturated].astype(np.int64) + b[:saturated]
        total[:saturated] = np.clip(exact, limits.min, limits.max)
    return total


def test_deviations_name_operators_that_differ_from_numpy() -> None:
    operators = dict(
        SUM=_Operator(_saturating_sum), PROD=_Operator(np.multiply), MIN=_Operator(np.minimum),
        MAX=_Operator(np.maximum), BAND=_Operator(np.bitwise_and), BOR=_Operator(np.bitwise_or),
        BXOR=_Operator(np.bitwise_xor), LAND=_Operator(np.logical_and),
        LOR=_Operator(np.bitwise_or), LXOR=_Operator(np.logical_xor),
        **{f"{kind}{bits}_T": None for kind in ("INT", "UINT") for bits in (8, 16, 32, 64)},
    )  # fmt: skip
    deviations = folds.of_flags(folds.deviations(type("Module", (), operators)))
    narrow = {"int8", "int16", "uint8", "uint16"}
    integers = narrow | {"int32", "int64", "uint32", "uint64"}
    assert deviations == {("sum", name) for name in narrow} | {("lor", name) for name in integers}


# -- functions of the user ------------------------------------------------------------------


@on_ranks("ranks", shared=True)
def test_many_user_operators_reduce_correctly(comm: Communicator) -> None:
    """MPI libraries and mpi4py allow only some dozens of operators at the same time."""
    for turn in range(200):
        op = user_op(lambda a, b, turn=turn: a + b + turn, commutative=True)  # type: ignore[misc]
        result = comm.all_reduce(np.ones(3, np.int64), op=op)
        assert result.tolist() == [comm.size + turn * (comm.size - 1)] * 3


@on_ranks("ranks")
def test_operators_in_several_threads_reduce_correctly(comm: Communicator) -> None:
    """Reduce with our own functions in two threads, on two communicators, beside messages."""
    other = comm.dup()
    wrong: list[str] = []

    def fold(group: Communicator) -> None:
        for turn in range(150):
            total = group.all_reduce(np.full(500, turn, np.float32), op="max")
            if total[0] != turn:
                wrong.append(f"{total[0]} in turn {turn}")

    threads = [threading.Thread(target=fold, args=(group,)) for group in (comm, other)]
    for thread in threads:
        thread.start()
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for turn in range(150):
        received = other.sendrecv(np.full(20_000, turn), right, left, tag=2**31 - 1)
        if received[0] != turn:
            wrong.append(f"message {received[0]} in turn {turn}")
    for thread in threads:
        thread.join()
    other.close()
    assert not wrong, wrong


@on_ranks("ranks")
def test_dup_while_user_operator_runs_succeeds(comm: Communicator) -> None:
    """Make communicators in a thread while MPI calls one of our functions in another thread."""
    other = comm.dup()
    made_all = threading.Event()

    def make() -> None:
        for _ in range(40):
            group = other.dup()
            assert group.all_reduce(np.ones(2), op="max").tolist() == [1, 1]
            group.close()
        made_all.set()

    thread = threading.Thread(target=make)
    thread.start()
    over = False
    while not over:
        x = np.full(2000, float(made_all.is_set()))
        over = bool(comm.all_reduce(x, op="min")[0])
    thread.join()
    other.close()


# -- ways to carry out a call -------------------------------------------------------------------


@on_ranks("ranks", shared=True)
def test_background_calls_match_foreground_calls(comm: Communicator) -> None:
    for turn in range(20):
        x = np.full(100 + turn, comm.rank)
        for op in ("sum", user_op(np.maximum, commutative=True)):
            background = (comm.rank + turn) % 2 == 0
            result = comm.all_reduce(x, op=op, async_op=background)
            expected = sum(range(comm.size)) if op == "sum" else comm.size - 1
            assert (result.wait() if background else result).tolist() == [expected] * x.size
        work = comm.broadcast(x, root=1, async_op=True) if comm.rank == 1 else None
        received = work.wait() if work else comm.broadcast(x, root=1)
        assert received.tolist() == [1] * x.size


class _NoPersistence:
    """Communicator of an MPI library without persistent collectives (before MPI 4)."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def __getattr__(self, name: str) -> Any:
        if name == "Allreduce_init":
            raise NotImplementedError
        return getattr(self._comm, name)


@on_ranks("ranks")
def test_mpi_without_persistent_collectives_makes_calls(comm: Communicator) -> None:
    transport = _transport(comm)
    proxy = _NoPersistence(transport._comm)

    class Old(Arrival):
        def __init__(self) -> None:
            super().__init__(transport._mpi, proxy, transport.channel)

    transport._arrival = Old()
    transport._arrive = transport._arrival.arrive
    for turn in range(10):
        assert comm.all_reduce(np.array([turn])).tolist() == [comm.size * turn]
    comm.barrier()
    assert comm.all_gather(np.ones(comm.rank)).size == sum(range(comm.size))


@on_ranks("ranks")
def test_timed_out_barrier_keeps_its_memory(comm: Communicator) -> None:
    """Rank 0 times out and drops its communicator; MPI writes when the other ranks call."""
    group = comm.dup()
    arrival = _transport(group)._arrival
    memory = [weakref.ref(array) for array in (arrival._words, arrival._found)]
    if comm.rank == 0:
        with pytest.raises(CollectiveTimeoutError):
            group.barrier(timeout=0.2)
    comm.barrier()
    group.close()
    del arrival, group
    gc.collect()
    if comm.rank == 0:
        assert all(array() is not None for array in memory)
    comm.barrier()


@on_ranks("ranks")
def test_calls_above_mpi_count_limit_are_split(comm: Communicator) -> None:
    """Make every call while MPI takes only a few elements at a time."""
    from collective.backends.mpi import messages

    transport = _transport(comm)
    transport._most, most = 10, messages.MOST_BYTES
    messages.MOST_BYTES = 100_001
    try:
        for count in (11, 60_000):
            inputs = [np.arange(count) * (r + 1) for r in range(comm.size)]
            mine, total = inputs[comm.rank], sum(inputs)
            joined = np.concatenate(inputs)
            same = np.testing.assert_array_equal
            same(comm.all_reduce(mine), total)
            same(comm.scan(mine), sum(inputs[: comm.rank + 1]))
            same(comm.broadcast(mine, root=1), inputs[1])
            same(comm.all_gather(mine), joined)
            same(comm.reduce_scatter(mine), np.array_split(total, comm.size)[comm.rank])
            parts = [np.array_split(x, comm.size)[comm.rank] for x in inputs]
            same(comm.all_to_all(mine), np.concatenate(parts))
            same(comm.scatter(mine if comm.rank == 0 else None), parts[0])
            for root, rooted in ((0, comm.reduce(mine)), (2, comm.gather(mine, root=2))):
                if comm.rank == root:
                    same(rooted, joined if root else total)
            right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            same(comm.sendrecv(mine, right, left), inputs[left])
        # Only one rank is above the limit, but all ranks have to split the call.
        table = [12, 0, 0] if comm.rank == 0 else [1, 1, 1]
        assert comm.all_to_all(np.ones(sum(table)), counts=table).size == (14, 2, 2)[comm.rank]
        if comm.rank:
            comm.send(np.full(30_000, comm.rank), 0, tag=9)
        else:
            senders = {int(comm.recv(None, ANY_SOURCE, tag=9).mean()) for _ in range(comm.size - 1)}
            assert senders == set(range(1, comm.size))
    finally:
        messages.MOST_BYTES = most


# -- messages ---------------------------------------------------------------------------------

_TAGS = [0, 2**31 - 1, 2**40, -7, -(2**63), 2**63 - 1, 2**28, 5]


@on_ranks("ranks")
def test_tags_of_64_bits_are_distinct(comm: Communicator) -> None:
    transport = _transport(comm)
    for count in (3, 30_000):
        if comm.rank == 0:
            for dst in (1, 2):
                sends = []
                for tag in _TAGS:
                    x = _buffer(np.full(count, tag % 1000))
                    sends.append(
                        threading.Thread(target=transport.send, args=(x, dst, tag, Deadline(20.0)))
                    )
                    sends[-1].start()
                for thread in sends:
                    thread.join()
        else:
            for turn, tag in enumerate(reversed(_TAGS)):
                out = _buffer(np.zeros(count, np.int64))
                src = 0 if turn % 2 else ANY_SOURCE
                assert transport.recv(out, src, tag, Deadline(20.0)) == 0
                assert out.array.tolist() == [tag % 1000] * count
    assert not transport._messages._announced


@on_ranks("ranks")
def test_any_source_recv_ignores_departed_rank(comm: Communicator) -> None:
    if comm.rank == 1:
        comm.close()
    elif comm.rank == 2:
        time.sleep(1.2)  # longer than the time after which a departed rank is reported
        comm.send(np.array([2]), 0)
    else:
        assert comm.recv(None, ANY_SOURCE)[0] == 2
        with pytest.raises(PeerLostError) as lost:
            comm.recv(None, 1)
        assert lost.value.ranks == (1,)


@on_ranks("ranks")
def test_mpi_error_keeps_its_class_and_text(comm: Communicator) -> None:
    transport = _transport(comm)
    if comm.rank == 0:
        transport.send(_buffer(np.zeros(8)), 1, 3, Deadline(20.0))
    if comm.rank == 1:
        with pytest.raises(
            BackendError, match=r"(?s)recv: MPI_ERR_TRUNCATE: .*\[rank 1\]"
        ) as caught:
            transport.recv(_buffer(np.zeros(4)), 0, 3, Deadline(20.0))
        assert (caught.value.backend, type(caught.value.__cause__).__name__) == ("mpi", "Exception")
        assert caught.value.code


# -- the library, the store, the world ------------------------------------------------------------


@on_ranks("ranks", shared=True)
def test_describe_reports_vendor_and_thread_level(comm: Communicator) -> None:
    library = describe()
    assert library.vendor in ("MPICH", "Open MPI")
    assert (library.thread_level, os.path.exists(library.path)) == ("multiple", True)
    assert isinstance(library.cuda_aware, bool)


@pytest.mark.whole
@on_ranks("ranks", shared=True)
def test_store_over_mpi_sets_gets_and_deletes(comm: Communicator) -> None:
    store = MpiStore(_transport(comm)._comm, Deadline(10.0))
    last = comm.rank == comm.size - 1
    if last:
        store.set("a", b"one\0two")  # set() returns although no rank reads the key yet
    comm.barrier()
    deadline = Deadline(10.0)
    assert store.get("a", deadline) == b"one\0two"
    assert store.try_get("b") is None
    comm.barrier()
    if last:
        store.set("a", b"")
        store.delete("a")
        store.set("c", b"3")
    assert store.get("c", deadline) == b"3"
    assert store.try_get("a") is None
    with pytest.raises(RendezvousError, match="nobody published 'd'"):
        store.get("d", Deadline(0.05))
    comm.barrier()
    store.close()


@on_ranks("ranks")
def test_world_of_program_communicator_matches_its_ranks(comm: Communicator) -> None:
    program = _transport(comm)._comm.Split(comm.rank == 0, -comm.rank)
    before = program.Get_size(), program.Get_errhandler()
    world = world_of(program, timeout=10.0)
    half = MpiBackend.connect(world, Deadline(10.0))
    assert (world.rank, world.size) == (half.rank, half.size) == (program.rank, program.size)
    assert (world.local_rank, world.local_size) == (world.rank, world.size)
    assert set(program.allgather(world.job)) == {world.job}
    assert len(set(comm.all_gather_object(world.job))) == 2
    assert (program.Get_size(), program.Get_errhandler()) == before
    half.close()
    program.Free()

"""``mpi`` with arrays of GPUs: given to a CUDA-aware library as they are, staged on others.

The GPUs are the ABI fake's, whose memory every MPI can read. So this proves that MPI is given
the right memory at the right time, and nothing about CUDA-aware libraries themselves.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from collective.algorithms import arithmetic
from collective.backends.mpi import library
from collective.communicator import Communicator
from collective.cuda import Event, Stream
from collective.deadline import Deadline
from collective.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    DtypeError,
    MismatchError,
    UnsupportedError,
)
from collective.memory.arrays import adapter_of
from collective.memory.buffer import Buffer
from collective.memory.device_array import DeviceArray
from collective.memory.dtypes import BY_NAME
from collective.ops import NAMES, as_op, premul_sum
from collective.testing import RankPool, parametrize_with_checks
from tests.fakes import Fake, FakeArray, compiler
from tests.support.conformance_parts import BY_PLACE
from tests.support.fake_cuda_aware_mpi import (
    CudaAware,
    OnOddRanks,
    OnSomeRanks,
    SaysSo,
    Staged,
    Watched,
)
from tests.support.mpi_launches import VENDORS, launch_of, mpirun, needs
from tests.support.on_ranks import on_ranks

Check = Callable[[], None]

needs_compiler = pytest.mark.skipif(compiler() is None, reason="the ABI fake needs a C compiler")

# -- the public suite -----------------------------------------------------------------------------

ON_ODD = OnOddRanks("cuda-on-odd", of=str, read=str, type=object, like=None)


@needs("mpich")
@needs_compiler
@parametrize_with_checks(CudaAware, sizes=(2,), kind="cuda", mpiexec=launch_of("mpich"))
def test_mpich(check: Check) -> None:
    check()


@needs("openmpi")
@needs_compiler
@parametrize_with_checks(
    CudaAware, sizes=(2,), kind="cuda", checks=BY_PLACE, mpiexec=launch_of("openmpi")
)
def test_openmpi(check: Check) -> None:
    check()


@needs("mpich")
@needs_compiler
@parametrize_with_checks(
    OnSomeRanks, sizes=(2,), kind=ON_ODD, checks=BY_PLACE, mpiexec=launch_of("mpich")
)
def test_ranks_with_arrays_of_gpus_and_ranks_without(check: Check) -> None:
    check()


# -- every operation, on arrays of the fake -------------------------------------------------------


@pytest.fixture(scope="module", params=[pytest.param(v, marks=needs(v)) for v in VENDORS])
def pools(request: pytest.FixtureRequest) -> Iterator[Callable[[type], RankPool]]:
    """Return what gives two ranks of a class of ``cuda_aware``."""
    if compiler() is None:
        pytest.skip("the ABI fake needs a C compiler")
    with contextlib.ExitStack() as opened:

        @functools.cache
        def pool(kind: type) -> RankPool:
            launch = launch_of(request.param)
            return opened.enter_context(RankPool(2, kind, timeout=20.0, mpiexec=launch))

        yield pool


@pytest.fixture
def watched(pools: Callable[[type], RankPool]) -> RankPool:
    return pools(Watched)


def _values(rank: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape) + 1000 * (rank + 1)


def _operations(comm: Communicator, **how: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield operations on arrays of this rank's GPU: their names, results and what is expected."""
    put = functools.partial(FakeArray.of, device=comm.rank)
    every = [_values(rank, 8, 5) for rank in range(comm.size)]
    uneven = [_values(rank, 2 + 3 * rank, 5) for rank in range(comm.size)]
    mine, lines, total = every[comm.rank], uneven[comm.rank], sum(every)
    at_root = comm.rank == 1
    half = slice(4 * comm.rank, 4 * comm.rank + 4)

    yield "all_reduce", comm.all_reduce(put(mine), **how), total
    x = put(mine)
    yield "all_reduce in place", comm.all_reduce(x, out=x, **how), total
    yield "all_reduce of columns", comm.all_reduce(put(mine[:, ::2]), **how), total[:, ::2]
    out = FakeArray((8, 5), np.int32, device=comm.rank)
    yield "all_reduce to out", comm.all_reduce(put(mine), op="max", out=out, **how), every[1]
    # Takes arithmetic of ours, on the host.
    average = comm.all_reduce(put(mine.astype(np.float32)), op="avg", **how)
    yield "all_reduce by avg", average, (total / comm.size).astype(np.float32)
    tree = comm.all_reduce({"a": put(mine), "b": put(mine[0])}, **how)
    yield "all_reduce of a tree", tree, {"a": total, "b": total[0]}
    yield "reduce", comm.reduce(put(mine), root=1, **how), total if at_root else None
    yield "reduce_scatter", comm.reduce_scatter(put(mine), **how), total[half]
    parts = comm.reduce_scatter(put(mine), counts=[1, 7], **how)
    yield "reduce_scatter of parts", parts, total[:1] if comm.rank == 0 else total[1:]
    x = adapter_of(given := put(mine)).view(given)[0]
    within = comm.reduce_scatter(x, out=x[half], **how)
    yield "reduce_scatter into the input", within, total[half]
    yield "scan", comm.scan(put(mine), **how), sum(every[: comm.rank + 1])
    yield "broadcast", comm.broadcast(put(mine), root=1, **how), every[1]
    whole = put(every[1]) if at_root else None
    yield "scatter", comm.scatter(whole, root=1, like=put(mine), **how), every[1][half]
    gathered = comm.gather(put(lines), root=1, **how)
    yield "gather", gathered, np.concatenate(uneven) if at_root else None
    yield "all_gather", comm.all_gather(put(lines), **how), np.concatenate(uneven)
    yield "all_gather of as many", comm.all_gather(put(mine), **how), np.concatenate(every)
    swapped = np.concatenate([each[half] for each in every])
    yield "all_to_all", comm.all_to_all(put(mine), **how), swapped
    cut = [[1, 7], [8, 0]]
    received = [each[:1] if comm.rank == 0 else each[1:] for each in every[:1]]
    received += [every[1] if comm.rank == 0 else every[1][8:]]
    turned = comm.all_to_all(put(mine), counts=cut[comm.rank], **how)
    yield "all_to_all of parts", turned, np.concatenate(received)
    other = 1 - comm.rank
    yield "sendrecv", comm.sendrecv(put(lines), other, other, like=put(mine), **how), uneven[other]
    out = FakeArray((8, 5), np.int32, device=comm.rank)
    if at_root:
        yield "recv", comm.recv(out, src=0, **how), every[0]
    else:
        yield "send", comm.send(put(mine), 1, **how), None


def _on_host(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _on_host(value) for key, value in x.items()}
    if isinstance(x, DeviceArray):
        return x.to_host()
    return x.get() if isinstance(x, FakeArray) else x


def _same(name: str, found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        for key, value in expected.items():
            _same(name, found[key], value)
    elif expected is None:
        assert found is None, name
    else:
        assert isinstance(found, (FakeArray, DeviceArray)), f"{name}: {type(found)}"
        np.testing.assert_array_equal(_on_host(found), expected, err_msg=name)


@contextlib.contextmanager
def _nothing_begins_before_somebody_waits() -> Iterator[None]:
    """Have the fake do no work before the host waits for it: until then all is poison."""
    fake = Fake()
    fake.knob("hold", 1)

    def releasing(method: Any) -> Any:
        def call(self: Any) -> None:
            fake.knob("hold", 0)
            method(self)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for kind in (Stream, Event):
            patch.setattr(kind, "synchronize", releasing(kind.synchronize))
        try:
            yield
        finally:
            fake.knob("hold", 0)


def _all_operations(comm: Communicator) -> None:
    for name, found, expected in _operations(comm):
        _same(name, found, expected)
    for name, work, expected in _operations(comm, async_op=True):
        _same(f"{name} in the background", work.wait(), expected)


def test_every_operation_through_the_host(pools: Callable[[type], RankPool]) -> None:
    pools(Staged).run(_all_operations)


def _reads_at_once(comm: Communicator) -> None:
    mine = _values(comm.rank, 8, 5)
    out = FakeArray.of(np.zeros((8, 10), np.int32)[:, ::2], device=comm.rank)
    with Fake().turned("delay_us", 50_000):
        comm.all_reduce(FakeArray.of(mine, device=comm.rank), out=out, async_op=True).wait()
        found = out.peek()
    np.testing.assert_array_equal(found, sum(_values(rank, 8, 5) for rank in range(comm.size)))


@pytest.mark.parametrize("how", [Watched, Staged])
def test_what_has_been_waited_for_may_be_read_on_any_stream(
    pools: Callable[[type], RankPool], how: type
) -> None:
    pools(how).run(_reads_at_once)


@on_ranks("watched")
def test_mpi_reads_nothing_before_the_stream_is_done(comm: Communicator) -> None:
    operations = _operations(comm)
    while True:
        with _nothing_begins_before_somebody_waits():
            found = next(operations, None)
        if found is None:
            return
        _same(*found)


def _entries(comm: Communicator, **how: Any) -> tuple[set[str], set[bool]]:
    Watched.entries.clear()
    for _, found, _ in _operations(comm, **how):
        if how:
            found.wait()
    entered = Watched.entries
    return {each.name for each in entered}, {each.current for each in entered}


# What MPI gets as it is: everything but the average, which is made on the host.
_MOVES = "Bcast Scatterv Gatherv Allgather Allgatherv Alltoallv".split()
_FOLDS = "Allreduce Reduce Reduce_scatter Reduce_scatter_block Scan".split()


@pytest.mark.parametrize("background", [False, True])
def test_mpi_gets_addresses_of_the_gpu_with_its_context(
    watched: RankPool, background: bool
) -> None:
    how = {"async_op": True} if background else {}
    every = {f"I{name.lower()}" if background else name for name in (*_MOVES, *_FOLDS)}
    every |= {"Isend", "Irecv"}
    # What rank 0 receives without an out= comes by way of the host.
    expected = every - {"Scatterv", "Iscatterv", "Irecv"}, every
    assert watched.run(_entries, **how) == [(names, {True}) for names in expected]


# -- what does not go straight to MPI -------------------------------------------------------------


def _supported(comm: Communicator) -> dict[str, list[str]]:
    """Return on which types an operator is MPI's own, of those that it has a meaning for."""
    found: dict[str, list[str]] = {}
    for op in (*map(as_op, NAMES), premul_sum(2.0)):
        for name in ("bool", "int32", "float32", "float16", "bfloat16", "complex64"):
            for what, ordered in (("reduce", False), ("reduce", True), ("scan", False)):
                with contextlib.suppress(DtypeError):
                    arithmetic.check(op, BY_NAME[name])
                    if comm.transport.supports(what, op, BY_NAME[name], ordered):
                        key = f"{what} in order" if ordered else what
                        found.setdefault(f"{key}: {op.name}", []).append(name)
    return found


def test_what_mpi_folds_itself(watched: RankPool) -> None:
    whole = ["bool", "int32"]
    by_op = {"min": whole, "max": whole, "band": whole, "bor": whole, "bxor": whole}
    by_op |= {"sum": ["int32"], "prod": ["int32"], "land": ["bool"], "lor": ["bool"]}
    every = {
        f"{what}: {op}": types
        for what in ("reduce", "reduce in order", "scan")
        for op, types in by_op.items()
    }
    # The first rank's result of a scan is its own input, whose bytes nothing makes 0 and 1.
    for key in [key for key in every if key.startswith("scan")]:
        every[key] = [name for name in every[key] if name != "bool"]
    every = {key: names for key, names in every.items() if names}
    # In whatever order it likes, which floats would show.
    every |= {f"reduce: {op}": ["int32", "float32", "complex64"] for op in ("sum", "prod")}
    assert watched.run(_supported) == [every, every]


@on_ranks("watched")
def test_more_elements_than_one_call_of_mpi_takes(comm: Communicator) -> None:
    backend = comm.transport
    most, backend._most = backend._most, 7
    comm._path.plans.clear()
    try:
        _all_operations(comm)
    finally:
        backend._most = most
        comm._path.plans.clear()


@on_ranks("watched")
def test_a_call_that_is_made_again_waits_again(comm: Communicator) -> None:
    x, out = (FakeArray((6,), np.float32, device=comm.rank) for _ in range(2))
    for turn in range(40):
        x.set(np.full(6, turn + comm.rank))
        comm.all_reduce(x, out=out)
        np.testing.assert_array_equal(out.get(), np.full(6, 2 * turn + 1.0))


@on_ranks("watched")
def test_memory_of_gpus_that_is_shared_is_refused(comm: Communicator) -> None:
    with pytest.raises(UnsupportedError, match=r"has none that ranks share .* with its framework"):
        comm.empty(4, like=FakeArray((3,), np.int32, device=comm.rank))


@on_ranks("watched")
def test_groups_take_arrays_of_gpus_too(comm: Communicator) -> None:
    for group in (comm.split(0), comm.group([1, 0]), comm.dup()):
        assert type(group.transport) is Watched
        x = FakeArray.of(np.full(3, comm.rank + 1), device=comm.rank)
        _same("all_reduce", group.all_reduce(x), np.full(3, 3))


@on_ranks("watched")
def test_memory_that_mpi_may_still_write_to_is_kept(comm: Communicator) -> None:
    if comm.rank == 0:
        x = FakeArray((3,), np.int32, device=0)
        with pytest.raises(CollectiveTimeoutError):
            # Of this length MPI is given the address before there is a message.
            comm.transport.recv(
                Buffer(adapter_of(x).view(x)[0], BY_NAME["int32"]), 1, 5, Deadline(0.2)
            )
        kept = weakref.ref(x)
        del x
        gc.collect()
        assert kept() is not None
    else:
        with pytest.raises(CollectiveError):
            comm.barrier()


@on_ranks("watched")
def test_memory_that_mpi_never_saw_is_not_kept(comm: Communicator) -> None:
    x = FakeArray((3 + comm.rank,), np.int32, device=comm.rank)
    with pytest.raises(MismatchError):
        comm.all_reduce(x)
    kept = weakref.ref(x)
    comm.barrier()
    del x
    gc.collect()
    assert kept() is None


# -- what a library says of itself ----------------------------------------------------------------


_ASK = """
import collective
comm = collective.init("mpi")
from collective.backends.mpi.library import describe
print("aware:", describe().cuda_aware, type(comm.transport).__name__)
"""


@pytest.mark.parametrize("vendor", [pytest.param(v, marks=needs(v)) for v in VENDORS])
def test_the_wheels_of_pypi_are_not_cuda_aware(vendor: str) -> None:
    assert "aware: False MpiBackend\n" in mpirun(vendor, 1, _ASK).stdout


def _library(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    monkeypatch.setattr(library.ctypes, "CDLL", lambda path: SimpleNamespace(**functions))


@pytest.mark.parametrize("answer", [0, 1])
def test_the_library_is_asked_where_it_has_an_answer(
    monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    _library(monkeypatch, MPIX_Query_cuda_support=lambda: answer)
    monkeypatch.setenv("I_MPI_OFFLOAD", "1")
    monkeypatch.setenv("I_MPI_OFFLOAD_MODE", "cuda")
    assert library._cuda_aware("libmpi.so") is bool(answer)


@pytest.mark.parametrize(
    ("offload", "mode", "aware"),
    [("", "cuda", False), ("0", "cuda", False), ("1", "cuda", True), ("2", "CUDA", True),
     ("1", "", False), ("1", "cmaps", False)],
)  # fmt: skip
def test_intel_mpi_is_aware_of_cuda_if_it_is_told_so(
    monkeypatch: pytest.MonkeyPatch, offload: str, mode: str, aware: bool
) -> None:
    _library(monkeypatch)
    monkeypatch.setenv("I_MPI_OFFLOAD", offload)
    monkeypatch.setenv("I_MPI_OFFLOAD_MODE", mode)
    assert library._cuda_aware("libmpi.so") is aware


def test_a_library_that_cannot_be_found_is_not_asked() -> None:
    assert library._cuda_aware("") is False


def _chosen(comm: Communicator) -> str:
    return type(comm.transport).__name__


def test_a_library_that_says_so_is_given_arrays_of_gpus(pools: Callable[[type], RankPool]) -> None:
    assert pools(SaysSo).run(_chosen) == ["CudaAwareMpi"] * 2

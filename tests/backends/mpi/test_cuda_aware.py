"""``mpi`` with GPU arrays: a CUDA-aware library gets them directly, others via host memory.

The GPUs are those of the ABI fake, and every MPI can read their memory. So these tests show that
MPI gets the right memory at the right time. They show nothing about real CUDA-aware libraries.
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

pytestmark = pytest.mark.whole

Check = Callable[[], None]

needs_compiler = pytest.mark.skipif(compiler() is None, reason="the ABI fake needs a C compiler")

# -- the public conformance suite -----------------------------------------------------------------

ON_ODD = OnOddRanks("cuda-on-odd", of=str, read=str, type=object, like=None)


@needs("mpich")
@needs_compiler
@parametrize_with_checks(CudaAware, sizes=(2,), kind="cuda", mpiexec=launch_of("mpich"))
def test_cuda_aware_mpich_passes_suite(check: Check) -> None:
    check()


@needs("openmpi")
@needs_compiler
@parametrize_with_checks(
    CudaAware, sizes=(2,), kind="cuda", checks=BY_PLACE, mpiexec=launch_of("openmpi")
)
def test_cuda_aware_openmpi_passes_suite(check: Check) -> None:
    check()


@needs("mpich")
@needs_compiler
@parametrize_with_checks(
    OnSomeRanks, sizes=(2,), kind=ON_ODD, checks=BY_PLACE, mpiexec=launch_of("mpich")
)
def test_mixed_gpu_and_cpu_ranks_pass_suite(check: Check) -> None:
    check()


# -- every operation, on arrays of the fake GPU ---------------------------------------------------


@pytest.fixture(scope="module", params=[pytest.param(v, marks=needs(v)) for v in VENDORS])
def pools(request: pytest.FixtureRequest) -> Iterator[Callable[[type], RankPool]]:
    """Return a function that starts two ranks of a given transport class, and keeps them."""
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
    """Yield name, result and expected result of operations on arrays of this rank's GPU."""
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
    # Our own arithmetic computes the average, in host memory.
    average = comm.all_reduce(put(mine.astype(np.float32)), op="avg", **how)
    yield "all_reduce by avg", average, (total / comm.size).astype(np.float32)
    tree = comm.all_reduce({"a": put(mine), "b": put(mine[0])}, **how)
    yield "all_reduce of a tree", tree, {"a": total, "b": total[0]}
    yield "reduce", comm.reduce(put(mine), root=1, **how), total if at_root else None
    yield "reduce_scatter", comm.reduce_scatter(put(mine), **how), total[half]
    parts = comm.reduce_scatter(put(mine), counts=[1, 7], **how)
    yield "reduce_scatter of parts", parts, total[:1] if comm.rank == 0 else total[1:]
    x = adapter_of(array := put(mine)).view(array)[0]
    within = comm.reduce_scatter(x, out=x[half], **how)
    yield "reduce_scatter into the input", within, total[half]
    yield "scan", comm.scan(put(mine), **how), sum(every[: comm.rank + 1])
    yield "broadcast", comm.broadcast(put(mine), root=1, **how), every[1]
    root_input = put(every[1]) if at_root else None
    yield "scatter", comm.scatter(root_input, root=1, like=put(mine), **how), every[1][half]
    gathered = comm.gather(put(lines), root=1, **how)
    yield "gather", gathered, np.concatenate(uneven) if at_root else None
    yield "all_gather", comm.all_gather(put(lines), **how), np.concatenate(uneven)
    yield "all_gather of as many", comm.all_gather(put(mine), **how), np.concatenate(every)
    swapped = np.concatenate([inputs_of_rank[half] for inputs_of_rank in every])
    yield "all_to_all", comm.all_to_all(put(mine), **how), swapped
    cut = [[1, 7], [8, 0]]
    received = [
        inputs_of_rank[:1] if comm.rank == 0 else inputs_of_rank[1:] for inputs_of_rank in every[:1]
    ]
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


def _same(name: str, result: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        for key, value in expected.items():
            _same(name, result[key], value)
    elif expected is None:
        assert result is None, name
    else:
        assert isinstance(result, (FakeArray, DeviceArray)), f"{name}: {type(result)}"
        np.testing.assert_array_equal(_on_host(result), expected, err_msg=name)


@contextlib.contextmanager
def _nothing_begins_before_somebody_waits() -> Iterator[None]:
    """Let the fake start no work before the host waits for it; until then outputs are poison."""
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
    for name, result, expected in _operations(comm):
        _same(name, result, expected)
    for name, work, expected in _operations(comm, async_op=True):
        _same(f"{name} in the background", work.wait(), expected)


def test_staged_operations_return_expected_results(pools: Callable[[type], RankPool]) -> None:
    pools(Staged).run(_all_operations)


def _reads_at_once(comm: Communicator) -> None:
    mine = _values(comm.rank, 8, 5)
    out = FakeArray.of(np.zeros((8, 10), np.int32)[:, ::2], device=comm.rank)
    with Fake().turned("delay_us", 50_000):
        comm.all_reduce(FakeArray.of(mine, device=comm.rank), out=out, async_op=True).wait()
        content = out.peek()
    np.testing.assert_array_equal(content, sum(_values(rank, 8, 5) for rank in range(comm.size)))


@pytest.mark.parametrize("how", [Watched, Staged])
def test_waited_result_is_readable_on_any_stream(
    pools: Callable[[type], RankPool], how: type
) -> None:
    pools(how).run(_reads_at_once)


@on_ranks("watched")
def test_mpi_reads_input_only_after_stream_is_done(comm: Communicator) -> None:
    operations = _operations(comm)
    while True:
        with _nothing_begins_before_somebody_waits():
            operation = next(operations, None)
        if operation is None:
            return
        _same(*operation)


def _entries(comm: Communicator, **how: Any) -> tuple[set[str], set[bool]]:
    Watched.entries.clear()
    for _, work, _ in _operations(comm, **how):
        if how:
            work.wait()
    entered = Watched.entries
    return {entry.name for entry in entered}, {entry.current for entry in entered}


# The operations that MPI gets directly: all but the average, which is computed in host memory.
_MOVES = "Bcast Scatterv Gatherv Allgather Allgatherv Alltoallv".split()
_FOLDS = "Allreduce Reduce Reduce_scatter Reduce_scatter_block Scan".split()


@pytest.mark.parametrize("background", [False, True])
def test_mpi_gets_gpu_addresses_with_current_context(watched: RankPool, background: bool) -> None:
    how = {"async_op": True} if background else {}
    every = {f"I{name.lower()}" if background else name for name in (*_MOVES, *_FOLDS)}
    every |= {"Isend", "Irecv"}
    # Results that rank 0 receives without an out= come through host memory.
    expected = every - {"Scatterv", "Iscatterv", "Irecv"}, every
    assert watched.run(_entries, **how) == [(names, {True}) for names in expected]


# -- calls that do not go straight to MPI ---------------------------------------------------------


def _supported(comm: Communicator) -> dict[str, list[str]]:
    """Return the types for which MPI has each operator, of the types that the operator allows."""
    types: dict[str, list[str]] = {}
    for op in (*map(as_op, NAMES), premul_sum(2.0)):
        for name in ("bool", "int32", "float32", "float16", "bfloat16", "complex64"):
            for operation, ordered in (("reduce", False), ("reduce", True), ("scan", False)):
                with contextlib.suppress(DtypeError):
                    arithmetic.check(op, BY_NAME[name])
                    if comm.inner.transport.supports(operation, op, BY_NAME[name], ordered):
                        key = f"{operation} in order" if ordered else operation
                        types.setdefault(f"{key}: {op.name}", []).append(name)
    return types


def test_supports_names_operators_that_mpi_reduces(watched: RankPool) -> None:
    integers = ["bool", "int32"]
    by_op = {"min": integers, "max": integers, "band": integers, "bor": integers, "bxor": integers}
    by_op |= {"sum": ["int32"], "prod": ["int32"], "land": ["bool"], "lor": ["bool"]}
    every = {
        f"{operation}: {op}": types
        for operation in ("reduce", "reduce in order", "scan")
        for op, types in by_op.items()
    }
    # In a scan rank 0 returns its input unchanged, so nothing converts its bool bytes to 0 and 1.
    for key in [key for key in every if key.startswith("scan")]:
        every[key] = [name for name in every[key] if name != "bool"]
    every = {key: names for key, names in every.items() if names}
    # Without a fixed order MPI also reduces floats, whose sums depend on the order.
    every |= {f"reduce: {op}": ["int32", "float32", "complex64"] for op in ("sum", "prod")}
    assert watched.run(_supported) == [every, every]


@on_ranks("watched")
def test_gpu_calls_above_mpi_count_limit_are_split(comm: Communicator) -> None:
    backend = comm.inner.transport
    most, backend._most = backend._most, 7
    comm._path.plans.clear()
    try:
        _all_operations(comm)
    finally:
        backend._most = most
        comm._path.plans.clear()


@on_ranks("watched")
def test_repeated_call_waits_for_stream_each_time(comm: Communicator) -> None:
    x, out = (FakeArray((6,), np.float32, device=comm.rank) for _ in range(2))
    for turn in range(40):
        x.set(np.full(6, turn + comm.rank))
        comm.all_reduce(x, out=out)
        np.testing.assert_array_equal(out.get(), np.full(6, 2 * turn + 1.0))


@on_ranks("watched")
def test_shared_gpu_memory_is_refused(comm: Communicator) -> None:
    with pytest.raises(UnsupportedError, match=r"has none that ranks share .* with its framework"):
        comm.empty(4, like=FakeArray((3,), np.int32, device=comm.rank))


@on_ranks("watched")
def test_groups_take_gpu_arrays(comm: Communicator) -> None:
    for group in (comm.split(0), comm.group([1, 0]), comm.dup()):
        assert type(group.inner.transport) is Watched
        x = FakeArray.of(np.full(3, comm.rank + 1), device=comm.rank)
        _same("all_reduce", group.all_reduce(x), np.full(3, 3))


@on_ranks("watched")
def test_timed_out_recv_keeps_gpu_memory(comm: Communicator) -> None:
    if comm.rank == 0:
        x = FakeArray((3,), np.int32, device=0)
        with pytest.raises(CollectiveTimeoutError):
            # For this length MPI gets the address before there is a message.
            comm.inner.transport.recv(
                Buffer(adapter_of(x).view(x)[0], BY_NAME["int32"]), 1, 5, Deadline(0.2)
            )
        array_ref = weakref.ref(x)
        del x
        gc.collect()
        assert array_ref() is not None
    else:
        with pytest.raises(CollectiveError):
            comm.barrier()


@on_ranks("watched")
def test_mismatched_call_frees_gpu_memory(comm: Communicator) -> None:
    x = FakeArray((3 + comm.rank,), np.int32, device=comm.rank)
    with pytest.raises(MismatchError):
        comm.all_reduce(x)
    array_ref = weakref.ref(x)
    comm.barrier()
    del x
    gc.collect()
    assert array_ref() is None


# -- whether a library is CUDA-aware --------------------------------------------------------------


_ASK = """
import collective
comm = collective.init("mpi")
from collective.backends.mpi.library import describe
print("aware:", describe().cuda_aware, type(comm.inner.transport).__name__)
"""


@pytest.mark.parametrize("vendor", [pytest.param(v, marks=needs(v)) for v in VENDORS])
def test_pypi_wheels_are_not_cuda_aware(vendor: str) -> None:
    assert "aware: False MpiBackend\n" in mpirun(vendor, 1, _ASK).stdout


def _library(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    monkeypatch.setattr(library.ctypes, "CDLL", lambda path: SimpleNamespace(**functions))


@pytest.mark.parametrize("answer", [0, 1])
def test_cuda_query_of_library_takes_precedence(
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
def test_intel_mpi_is_cuda_aware_if_environment_says_so(
    monkeypatch: pytest.MonkeyPatch, offload: str, mode: str, aware: bool
) -> None:
    _library(monkeypatch)
    monkeypatch.setenv("I_MPI_OFFLOAD", offload)
    monkeypatch.setenv("I_MPI_OFFLOAD_MODE", mode)
    assert library._cuda_aware("libmpi.so") is aware


def test_missing_library_is_not_cuda_aware() -> None:
    assert library._cuda_aware("") is False


def _chosen(comm: Communicator) -> str:
    return type(comm.inner.transport).__name__


def test_cuda_aware_library_selects_cuda_aware_transport(pools: Callable[[type], RankPool]) -> None:
    assert pools(SaysSo).run(_chosen) == ["CudaAwareMpi"] * 2

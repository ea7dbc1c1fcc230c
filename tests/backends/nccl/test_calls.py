"""Calls over ``nccl`` on the ABI fake, with arrays of several libraries: the calls of NCCL.

The public suite, backends/nccl/test_conformance.py, tests the results of the calls.
"""

from __future__ import annotations

import gc
import importlib.util
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tests.fakes")

from collective import native
from collective.errors import DtypeError, InvalidArgumentError, ShapeError
from collective.memory.arrays import adapter_of
from collective.memory.device_array import DeviceArray
from tests.fakes import Fake
from tests.meta.test_walks import walk
from tests.support.nccl_processes import Pools, needs_compiler, pools
from tests.support.nccl_programs import (
    Both,
    Framework,
    Gpus,
    calls_of_nccl,
    error_of,
    framework,
    new_stream,
    of_device,
    of_fake,
    ordinal_of,
    read,
    settled,
    warm,
)
from tests.support.on_ranks import on_ranks

pytestmark = needs_compiler

HAS_TORCH = importlib.util.find_spec("torch") is not None
KINDS = ["fake", "device"] + ["torch"] * HAS_TORCH
OTHERS = [("fake", "device"), ("device", "fake")]
OTHERS += [("torch", "device"), ("device", "torch")] * HAS_TORCH


nccl = pools(Gpus)
both = pools(Both)


def numbers(rank: int, *shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """Return the input of a rank: small whole numbers, which every dtype holds exactly."""
    count = int(np.prod(shape, dtype=int))
    return ((np.arange(count) * 7 + rank * 3) % 4 + 1).reshape(shape).astype(dtype)


def everyone(comm: Any, *shape: int, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.stack([numbers(rank, *shape, dtype=dtype) for rank in range(comm.size)])


# -- reductions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@on_ranks("nccl", size=3, shared=True)
def test_reductions_missing_in_nccl_use_host_memory(comm: Any, kind: str) -> None:
    """Reductions that NCCL lacks go through host memory, without a call of NCCL."""
    warm(comm)
    rank = comm.rank
    ints, floats = everyone(comm, 6, dtype=np.int32), everyone(comm, 6)
    Fake().clear_log()
    with framework(comm, kind) as fw:
        fw.check(comm.all_reduce(fw.of(ints[rank]), op="bxor"), np.bitwise_xor.reduce(ints))
        fw.check(comm.all_reduce(fw.of(floats[rank]), order="rank"), floats.sum(0))
        fw.check(comm.scan(fw.of(floats[rank])), floats[: rank + 1].sum(0))
        shorts = ints.astype(np.int16)
        fw.check(comm.all_reduce(fw.of(shorts[rank]), op="max"), shorts.max(0))
        complexes = floats + 1j * floats
        fw.check(comm.all_reduce(fw.of(complexes[rank])), complexes.sum(0))
        assert not calls_of_nccl(), calls_of_nccl()
        # NCCL reduces those leaves of a structure that it can reduce.
        x = {"bits": fw.of(shorts[rank]), "f": fw.of(floats[rank])}
        tree = comm.all_reduce(x, op="max")
        fw.check(tree["bits"], shorts.max(0))
        fw.check(tree["f"], floats.max(0))
        assert len(calls_of_nccl()) == 1, calls_of_nccl()
    settled(comm)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks("nccl", shared=True)
def test_dtypes_missing_in_numpy_are_reduced_by_nccl(comm: Any, kind: str, dtype: str) -> None:
    import ml_dtypes

    warm(comm)
    every = everyone(comm, 8, dtype=getattr(ml_dtypes, dtype))
    with framework(comm, kind) as fw:
        x = fw.of(every[comm.rank])
        Fake().clear_log()
        result = comm.all_reduce(x)
        codes = {"bfloat16": 9, "float8_e4m3fn": 10, "float8_e5m2": 11}
        (call,) = calls_of_nccl()
        assert f"datatype={codes[dtype]}," in call, call
        fw.check(result, every.astype(np.float32).sum(0))
        assert np.dtype(fw.read(result).dtype) == every.dtype
        fw.check(comm.all_gather(x), every.ravel().astype(np.float32))
        assert comm.all_reduce(x, op="max", out=x) is x
        expected = every.astype(np.float32).max(0)
        np.testing.assert_array_equal(fw.read(x).astype(np.float32), expected)
    settled(comm)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks("nccl", shared=True)
def test_structure_is_reduced_in_one_nccl_group(comm: Any, kind: str) -> None:
    """Each leaf of a structure is one call of NCCL; the calls start together in one group."""
    warm(comm)
    rank, size = comm.rank, comm.size
    every = [[numbers(r, *shape) for shape in [(3,), (2, 2), (), (5,)]] for r in range(size)]
    with framework(comm, kind) as fw:
        a, b, c, d = (fw.of(value) for value in every[rank])
        Fake().clear_log()
        result = comm.all_reduce({"a": [a, b], "b": (c,), "c": {"d": d}})
        text = Fake().log("nccl")
        names = [line.partition("(")[0] for line in text]
        assert names.count("ncclGroupStart") == names.count("ncclGroupEnd") == 1, text
        start, end = names.index("ncclGroupStart"), names.index("ncclGroupEnd")
        assert names[start + 1 : end] == ["ncclAllReduce"] * 4, text
        for k, leaf in enumerate([*result["a"], *result["b"], result["c"]["d"]]):
            fw.check(leaf, sum(every[r][k] for r in range(size)))
    settled(comm)


@pytest.mark.parametrize(("given", "wanted"), OTHERS)
@on_ranks("nccl", shared=True)
def test_results_go_to_arrays_of_another_library(comm: Any, given: str, wanted: str) -> None:
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
        result = comm.broadcast(x if rank == 0 else None, like=like)
        if rank:
            other.check(result, every[0])
        other.check(comm.sendrecv(x, peer, left, like=like), every[left])
        # Without like= and out= the result is a DeviceArray.
        result = comm.broadcast(x if rank == 0 else None)
        if rank:
            assert type(result) is DeviceArray
            np.testing.assert_array_equal(read(result), every[0])
    settled(comm)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks("nccl", shared=True)
def test_strided_outputs_and_repeated_calls_are_correct(comm: Any, kind: str) -> None:
    """Make calls with strided outputs, and repeat calls on the same arrays."""
    warm(comm)
    rank, size = comm.rank, comm.size
    every = everyone(comm, 4, 3)
    with framework(comm, kind) as fw:
        # First with streams of their own, then on one stream, then again with the prepared calls.
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


def views_in_place(comm: Any, kind: str) -> int:
    warm(comm)
    with framework(comm, kind) as fw:
        x = fw.of(np.ones(8, np.float32))
        adapter: Any = adapter_of(x)
        view, seen = adapter.view, []

        def counting(array: Any) -> Any:
            seen.append(array)
            return view(array)

        adapter.view = counting
        try:
            comm.all_reduce(x, out=x)
        finally:
            del adapter.view
    settled(comm)
    return len(seen)


@pytest.mark.parametrize("kind", KINDS)
def test_in_place_call_views_its_array_once(nccl: Pools, kind: str) -> None:
    # If there is a plan already, looking up the place of the array is enough.
    assert max(nccl(2, views_in_place, kind, shared=True)) <= 1


@pytest.mark.parametrize(
    "case",
    ["overlaps", "same memory", "on another stream", "strided input", "strided output",
     "read-only input", "in the background"],
)  # fmt: skip
@on_ranks("nccl", shared=True)
def test_arrays_outside_plan_are_reduced_correctly(comm: Any, case: str) -> None:
    """Make a call that has a plan already, on arrays that the plan does not cover."""
    warm(comm)
    every = everyone(comm, 12)
    stream = new_stream(comm)
    plain = of_device(comm, every[comm.rank][:8], stream)
    for _ in range(2):
        comm.all_reduce(plain)
    x = of_device(comm, every[comm.rank], stream)
    source, out = x[:8], None
    match case:
        case "overlaps":
            out = x[4:]
        case "same memory":
            out = x[:8]
        case "on another stream":
            out = of_device(comm, np.zeros(8, np.float32))
        case "strided input":
            every = everyone(comm, 8).repeat(2, 1)
            source = of_device(comm, every[comm.rank], stream)[::2]
            every = every[:, ::2]
        case "strided output":
            out = of_device(comm, np.zeros(16, np.float32), stream)[::2]
        case "read-only input":
            source.writeable = False
        case "in the background":
            result = comm.all_reduce(source, async_op=True)
            source = x = None  # the call keeps the arrays until it has completed
            np.testing.assert_array_equal(read(result.wait()), every[:, :8].sum(0))
    if source is not None:
        result = comm.all_reduce(source, out=out)
        assert out is None or result is out
        np.testing.assert_array_equal(read(result), every[:, :8].sum(0))
    settled(comm)


@pytest.mark.parametrize(
    ("out", "error"),
    [("shape", ShapeError), ("dtype", DtypeError), ("read-only", InvalidArgumentError)],
)
@on_ranks("nccl", shared=True)
def test_unsuitable_output_is_refused_despite_plan(
    comm: Any, out: str, error: type[Exception]
) -> None:
    warm(comm)
    stream = new_stream(comm)
    x = of_device(comm, np.ones(8, np.float32), stream)
    for _ in range(2):
        comm.all_reduce(x)
    wrong = of_device(comm, np.ones(9 if out == "shape" else 8, np.float32), stream)
    if out == "dtype":
        wrong = wrong.view(np.int32)
    elif out == "read-only":
        wrong.writeable = False
    assert isinstance(error_of(comm.all_reduce, x, out=wrong), error)
    settled(comm)


@pytest.mark.parametrize("what", ["broadcast", "reduce", "gather", "all_gather"])
@on_ranks("nccl", shared=True)
def test_repeated_calls_with_different_outputs_are_correct(comm: Any, what: str) -> None:
    """Repeat rooted and gathering calls with new outputs, given outputs and parts of an output."""
    warm(comm)
    size, rank = comm.size, comm.rank
    every = everyone(comm, 4)
    stream = new_stream(comm)
    full_output = of_device(comm, np.zeros(4 * size, np.float32), stream)
    part = full_output[4 * rank : 4 * rank + 4]
    part.fill_from_host(every[rank])
    x = of_device(comm, every[rank], stream)
    for source, out in (
        (x, None),
        (x, None),
        (x, full_output),
        (x, full_output),
        (part, full_output),
    ):
        if what == "broadcast":
            source = of_device(comm, every[rank], stream)
            target = source if out is full_output or rank else None
            result, expected = comm.broadcast(source, root=0, out=target), every[0]
        elif what == "reduce":
            target = part if out is full_output and rank == 0 else None
            result, expected = comm.reduce(x, out=target), every.sum(0)
        else:
            options = {"root": 0} if what == "gather" else {}
            result = getattr(comm, what)(source, counts=[4] * size, out=out, **options)
            expected = every.ravel()
        if what in ("all_gather", "broadcast") or rank == 0:
            np.testing.assert_array_equal(read(result), expected)
        else:
            assert result is None
    settled(comm)


def walk_in_place(comm: Any, kind: str) -> int:
    """Return how many of our functions a repeated call runs."""
    warm(comm)
    stream = comm.inner.transport.device.new_stream()
    for event in [stream.record() for _ in range(20)]:
        event.release()  # the pool now holds enough events
    with framework(comm, kind) as fw:
        x = fw.of(np.ones(8, np.float32))
        counts = [walk(lambda: comm.all_reduce(x, out=x))[0] for _ in range(10)]
    settled(comm)
    return min(counts)


@pytest.mark.skipif(native.chosen.extension is None, reason="the native core is not in use")
@pytest.mark.parametrize("kind", KINDS)
def test_in_place_call_stays_within_function_count(nccl: Pools, kind: str) -> None:
    # The numbers of today, as in tests/meta/test_walks.py. Lower them when a call gets shorter.
    ceiling = {"fake": 47, "device": 21, "torch": 24}[kind]
    assert max(nccl(2, walk_in_place, kind, shared=True)) <= ceiling


# -- memory, groups, objects ----------------------------------------------------------------------


@on_ranks("nccl", shared=True)
def test_symmetric_memory_is_registered_and_reduced(comm: Any) -> None:
    warm(comm)
    size = comm.size
    fake = Fake()
    like = of_fake(comm, np.zeros(1, np.float32))
    for likes in (None, "cuda", like):
        fake.clear_log()
        x = comm.empty((4, 2), like=likes)
        assert type(x) is DeviceArray
        assert x.shape == (4, 2)
        assert fake.log("ncclCommWindowRegister"), "the memory is not registered with NCCL"
        x.fill_from_host(np.ones((4, 2), np.float32))
        comm.all_reduce(x, out=x)
        np.testing.assert_array_equal(read(x), np.full((4, 2), size))
        part = x[1:3]
        comm.all_reduce(part, out=part)
        gathered = comm.all_gather(x[:1])
        np.testing.assert_array_equal(read(gathered), np.full((size, 2), size))
        assert read(x).tolist() == [[size] * 2, [size**2] * 2, [size**2] * 2, [size] * 2]
        # Drop the array while the GPU still works with it.
        with fake.turned("delay_us", 3000, back=300):
            work = comm.all_reduce(x, out=x, async_op=True)
            del x, part, work
            gc.collect()
            y = comm.empty(8, like=likes)
            comm.all_reduce(y, out=y)
            del y, gathered
            gc.collect()
        settled(comm)
        comm.barrier()
    nothing = comm.empty((0, 3), "bfloat16")
    assert nothing.shape == (0, 3)
    comm.barrier()
    for _ in range(20):
        comm.empty(1000)
    settled(comm)


@on_ranks("nccl", size=3)
def test_objects_and_barriers_make_no_nccl_calls(comm: Any) -> None:
    """Calls without GPU memory make no call of NCCL."""
    Fake().clear_log()
    comm.barrier()
    assert comm.broadcast_object({"from": comm.rank}, root=1) == {"from": 1}
    if comm.rank == 0:
        comm.send_object([1, 2], 1, tag=3)
    elif comm.rank == 1:
        assert comm.recv_object(0, tag=3) == [1, 2]
    assert not Fake().log("nccl")


@on_ranks("both")
def test_cpu_and_gpu_arrays_share_one_communicator(comm: Any) -> None:
    """``"cpu:shm,cuda:nccl"`` takes arrays of both kinds, one kind in each call."""
    rank, size = comm.rank, comm.size
    every = everyone(comm, 4)
    for _ in range(2):
        result = comm.all_reduce(every[rank])
        assert type(result) is np.ndarray
        np.testing.assert_array_equal(result, every.sum(0))
        np.testing.assert_array_equal(read(comm.all_reduce(of_fake(comm, every[rank]))), result)
        joined = np.concatenate([every[r][: r + 1] for r in range(size)])
        np.testing.assert_array_equal(comm.all_gather(every[rank][: rank + 1]), joined)
    # A rank that passes None gets an array of the kind that the root has.
    for there, x in ((np.ndarray, every[rank]), (DeviceArray, of_fake(comm, every[rank]))):
        result = comm.broadcast(x if rank == 0 else None)
        assert rank == 0 or type(result) is there
        np.testing.assert_array_equal(read(result) if rank else every[0], every[0])
        if rank == 0:
            comm.send(x, 1)
        elif rank == 1:
            result = comm.recv(None, 0)
            assert type(result) is there
            np.testing.assert_array_equal(read(result), every[0])
    # Messages from one kind of memory into the other kind.
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


@pytest.mark.skipif(not HAS_TORCH, reason="needs PyTorch")
@on_ranks("nccl", shared=True)
def test_current_stream_of_torch_is_used(comm: Any) -> None:
    """Calls are enqueued on the stream that PyTorch has made current."""
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
        result = comm.all_reduce(x)
        assert f"stream={a:#x}" in calls_of_nccl()[0]
        fw.check(result, every.sum(0))
        for _ in range(2):
            Fake().clear_log()
            comm.all_reduce(x, out=result)
            assert f"stream={a:#x}" in calls_of_nccl()[0]
        work = comm.all_gather(x, async_op=True)
        gathered = work.wait()
        fw.check(gathered, every.ravel())
        assert gathered.used_on == [a], (
            "PyTorch could reuse the memory while the program still reads it"
        )
        assert result.used_on == comm.all_gather(x).used_on == []
        b = new_stream(comm)
        with torch.cuda.stream(torch.cuda.ExternalStream(b, device=ordinal_of(comm))):
            Fake().clear_log()
            comm.all_reduce(x, out=result)
            assert f"stream={b:#x}" in calls_of_nccl()[0], (
                "a repeated call uses the stream of the earlier call"
            )
            work = comm.all_reduce(x, out=result, async_op=True)
        work.wait()
        np.testing.assert_array_equal(fw.read(result), every.sum(0))
    settled(comm)

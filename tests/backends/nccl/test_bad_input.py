"""Invalid calls over ``nccl`` on the ABI fake, and failures during calls.

An invalid call raises before anything is enqueued, and the communicator stays usable. A failure
breaks the communicator on every rank within the deadline, and leaves no stream blocked.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("tests.fakes")

from collective.backends.nccl import NcclBackend
from collective.contract.world import World
from collective.deadline import Deadline
from collective.errors import (
    BackendError,
    BackendUnavailableError,
    CollectiveError,
    CollectiveTimeoutError,
    CommunicatorAbortedError,
    DeviceError,
    DtypeError,
    InvalidArgumentError,
    MismatchError,
    PeerLostError,
    ShapeError,
)
from collective.testing import RankDiedError, RanksFailedError
from collective.testing.checks_shrink import gather
from tests.fakes import Fake, FakeArray, library_path
from tests.support.nccl_processes import Pools, needs_compiler, pools
from tests.support.nccl_programs import (
    Both,
    Gpus,
    calls_of_nccl,
    error_of,
    new_stream,
    of_device,
    of_fake,
    ordinal_of,
    read,
    settled,
    until,
    warm,
)
from tests.support.on_ranks import on_ranks

pytestmark = needs_compiler

# The promised delay of an error, and the delay that a busy machine may add.
PROMISED_S, NOISE_S = 3.0, 15.0


nccl = pools(Gpus)
both = pools(Both)


def ones(comm: Any, count: int = 6) -> FakeArray:
    return of_fake(comm, np.ones(count, np.float32))


def refused(kind: type[BaseException], *texts: str, call: Any) -> None:
    """Check that a call raises an error with these texts and enqueues nothing."""
    Fake().clear_log()
    try:
        error: BaseException = error_of(call)
    except AssertionError:
        names = ", ".join(call.__code__.co_names)
        raise AssertionError(f"{names}, line {call.__code__.co_firstlineno}: accepted") from None
    assert type(error) is kind, repr(error)
    assert not calls_of_nccl(), calls_of_nccl()
    for text in texts:
        assert re.search(text, str(error)), str(error)


def goes_on(comm: Any) -> None:
    """Check that the communicator still works."""
    x = ones(comm)
    total = comm.all_reduce(x)
    np.testing.assert_array_equal(read(total), [comm.size] * 6)
    assert comm.all_gather_object(comm.rank) == list(range(comm.size))
    settled(comm)


# -- invalid calls --------------------------------------------------------------------------------


def with_input(comm: Any, x: Any, good: FakeArray) -> dict[str, Any]:
    """Return calls with the unsuitable input ``x``, by operation."""
    peer = (comm.rank + 1) % comm.size
    return {
        "all_reduce": lambda: comm.all_reduce(x),
        "all_reduce in rank order": lambda: comm.all_reduce(x, order="rank"),
        "all_reduce of several": lambda: comm.all_reduce({"a": good, "b": x}),
        "all_reduce in the background": lambda: comm.all_reduce(x, out=x, async_op=True),
        "reduce": lambda: comm.reduce(x),
        "broadcast": lambda: comm.broadcast(x),
        "gather": lambda: comm.gather(x),
        "all_gather": lambda: comm.all_gather(x),
        "scatter": lambda: comm.scatter(x, root=comm.rank),
        "reduce_scatter": lambda: comm.reduce_scatter(x),
        "all_to_all": lambda: comm.all_to_all(x),
        "scan": lambda: comm.scan(x),
        "send": lambda: comm.send(x, peer),
        "recv": lambda: comm.recv(x, peer),
        "sendrecv": lambda: comm.sendrecv(x, peer, peer),
    }


def with_output(comm: Any, out: Any, half: Any, x: FakeArray) -> dict[str, Any]:
    """Return calls with the unsuitable output ``out`` or its half ``half``, by operation."""
    peer = (comm.rank + 1) % comm.size
    return {
        "all_reduce": lambda: comm.all_reduce(x, out=out),
        "all_reduce in the background": lambda: comm.all_reduce(x, out=out, async_op=True),
        "all_reduce in rank order": lambda: comm.all_reduce(x, out=out, order="rank"),
        "all_reduce of several": lambda: comm.all_reduce([x, x], out=[x, out]),
        "reduce": lambda: comm.reduce(x, out=out, root=comm.rank),
        "broadcast": lambda: comm.broadcast(x, out=out, root=peer),
        "reduce_scatter": lambda: comm.reduce_scatter(x, out=half),
        "scan": lambda: comm.scan(x, out=out),
        "sendrecv": lambda: comm.sendrecv(x, peer, peer, out=out),
    }


@on_ranks("nccl")
def test_cpu_array_is_refused(comm: Any) -> None:
    host, x = np.ones(6, np.float32), ones(comm)
    for _ in range(2):  # the first time without, the second time with a communicator of NCCL
        for name, call in with_input(comm, host, x).items():
            refused(
                DeviceError,
                f"^{name.split()[0]}: an array on the CPU",
                r"backend 'nccl.*' takes arrays on GPUs",
                rf"\[rank {comm.rank} of {comm.size}\]",
                "Copy it to the GPU.*backend='cpu:shm,cuda:nccl'",
                call=call,
            )
        goes_on(comm)
    for name, call in with_output(comm, host, host[:3], x).items():
        refused(DeviceError, f"^{name.split()[0]}: ", "CPU", call=call)
    goes_on(comm)


@on_ranks("nccl", shared=True)
def test_unsuitable_output_on_one_rank_raises_only_there(comm: Any) -> None:
    """Peers are in the call when sizes are exchanged, so it completes before it raises here."""
    warm(comm)
    host, x = np.zeros(12, np.float32), ones(comm)
    there = FakeArray.of(np.zeros(12, np.float32), ordinal_of(comm) + 2)
    integers, fixed = (of_fake(comm, np.zeros(12, np.int32)) for _ in "12")
    fixed.readonly = True
    for out, kind in (
        (host, DeviceError), (there, DeviceError), (integers, DtypeError),
        (fixed, InvalidArgumentError), (x, ShapeError),
    ):  # fmt: skip
        for name in ("all_gather", "gather"):
            if comm.rank == 0:
                error = error_of(getattr(comm, name), x, out=out)
                assert type(error) is kind, repr(error)
            else:  # this rank passes no unsuitable output
                getattr(comm, name)(x)
            goes_on(comm)
    for call in (
        lambda: comm.all_to_all(x, out=host[:6]),
        lambda: comm.scatter(x, out=host[:3], root=0),
        lambda: comm.scatter([x, x], out=[x, host[:3]], root=0),
    ):
        if comm.rank == 0:
            error = error_of(call)
            assert isinstance(error, (DeviceError, ShapeError)), repr(error)
        else:
            getattr(comm, call.__code__.co_names[0])(x)
        goes_on(comm)


@on_ranks("nccl", shared=True)
def test_array_on_another_gpu_is_refused(comm: Any) -> None:
    warm(comm)
    mine = ordinal_of(comm)
    other = mine + 2
    x = ones(comm)
    there, half = (FakeArray.of(np.ones(count, np.float32), other) for count in (6, 3))
    for call in with_input(comm, there, x).values():
        refused(
            DeviceError, f"cuda:{other}", rf"this rank's GPU is cuda:{mine} \[rank {comm.rank} of",
            "Copy the array to this rank's GPU, or choose another GPU with COLLECTIVE_DEVICE",
            call=call,
        )  # fmt: skip
    for call in with_output(comm, there, half, x).values():
        refused(DeviceError, f"cuda:{other}", f"cuda:{mine}", call=call)
    goes_on(comm)


@on_ranks("nccl", shared=True)
def test_read_only_output_is_refused(comm: Any) -> None:
    warm(comm)
    x = ones(comm)
    fixed, half = ones(comm), ones(comm, 3)
    fixed.readonly = half.readonly = True
    array, half_array = (of_device(comm, np.ones(count, np.float32)) for count in (6, 3))
    array.writeable = half_array.writeable = False
    for pair in ((fixed, half), (array, half_array)):
        calls = with_output(comm, *pair, x)
        calls["recv"] = lambda: comm.recv(pair[0], 1 - comm.rank)  # noqa: B023  called at once
        calls["in place"] = lambda: comm.all_reduce(pair[0], out=pair[0])  # noqa: B023
        for call in calls.values():
            refused(InvalidArgumentError, "out: the array is read-only; pass a writable", call=call)
    # The same array may have been writable in earlier calls, whose plans are reused.
    once = of_device(comm, np.ones(6, np.float32))
    comm.all_reduce(once, out=once)
    comm.all_reduce(once, out=once)
    settled(comm)
    once.writeable = False
    refused(InvalidArgumentError, "read-only", call=lambda: comm.all_reduce(once, out=once))
    known = ones(comm)
    comm.all_reduce(x, out=known)
    settled(comm)
    known.readonly = True
    refused(InvalidArgumentError, "read-only", call=lambda: comm.all_reduce(x, out=known))
    spread = FakeArray((6,), "float32", (0,), ordinal_of(comm))
    refused(InvalidArgumentError, "expanded view", call=lambda: comm.all_reduce(x, out=spread))
    # Read-only and expanded arrays are valid inputs.
    assert read(comm.all_reduce(fixed)).tolist() == [comm.size] * 6
    spread.set(np.ones(6, np.float32))
    assert read(comm.all_reduce(spread)).tolist() == [comm.size] * 6
    goes_on(comm)


# -- libraries, GPUs and versions of the ranks ----------------------------------------------------


class NoLibrary(Gpus):
    """Transport whose last rank has no NCCL."""

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> NcclBackend:
        backend = super().connect(world, deadline)
        if world.rank == world.size - 1:
            os.environ["COLLECTIVE_NCCL_LIBRARY"] = "/nowhere/libnccl.so.2"
        return backend


class OneGpu(Gpus):
    """Transport whose setting gives all ranks the same GPU."""

    options: ClassVar[dict[str, str]] = {"device": "0"}


class NoGpu(Gpus):
    """Transport whose setting names a missing GPU for rank 0."""

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> NcclBackend:
        cls.options = {"device": "9"} if world.rank == 0 else {}
        return super().connect(world, deadline)


class OtherVersion(Gpus):
    """Transport whose rank 1 has a different version of NCCL."""

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> NcclBackend:
        backend = super().connect(world, deadline)
        if world.rank == 1:
            os.environ["COLLECTIVE_NCCL_LIBRARY"] = library_path(21903)
        return backend


class TooOld(Gpus):
    """Transport with a version of NCCL that cannot register memory."""

    version = 21801


class Version219(Both):
    version = 21903


class Version227(Both):
    version = 22703


class SharedGpu(Both):
    """Two ranks with one GPU; NCCL_HOSTID makes NCCL take them for ranks of different hosts."""

    options: ClassVar[dict[str, str]] = {**Both.options, "device": "0"}

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> NcclBackend:
        os.environ["NCCL_HOSTID"] = f"host{world.rank}"
        return super().connect(world, deadline)


def cannot(comm: Any, kind: type[BaseException], where: str) -> list[str]:
    """Make calls that raise on every rank, check that other calls work, and return the texts."""
    x = FakeArray.of(np.ones(4, np.float32), 0 if where == "0" else comm.rank)
    texts = []
    for call in (
        lambda: comm.all_reduce(x),
        lambda: comm.all_reduce([x, x]),
        lambda: comm.all_gather(x),
        lambda: comm.all_reduce(x, async_op=True).wait(),
        lambda: comm.empty(4),
    ):
        Fake().clear_log()
        error = error_of(call)
        assert type(error) is kind, repr(error)
        assert not calls_of_nccl()
        texts.append(str(error))
        comm.barrier()
        assert comm.all_gather_object(comm.rank) == [0, 1]
    peer = 1 - comm.rank
    for _ in range(2):
        error = error_of(lambda: comm.sendrecv(x, peer, peer, like=x))
        assert type(error) is kind, repr(error)
        texts.append(str(error))
    comm.barrier()
    return texts


@pytest.mark.parametrize(
    ("transport", "kind", "text"),
    [
        (NoLibrary, BackendUnavailableError,
         r"rank 1: nccl: .*/nowhere/libnccl.*COLLECTIVE_NCCL_LIBRARY|pip install"),
        (OneGpu, DeviceError, r"ranks [01] and [01] use the same GPU \S+ \(Duplicate GPU\): "
         r"give each rank its own by COLLECTIVE_DEVICE or CUDA_VISIBLE_DEVICES"),
        (OtherVersion, BackendUnavailableError,
         r"2\.19\.3 on rank 1; NCCL 2\.29\.7 on rank 0.*Install the same one on all of them"),
        (TooOld, BackendUnavailableError, r"NCCL 2\.18\.1; 2\.19\.1 is the oldest.*pip install"),
    ],
)  # fmt: skip
def test_unsuitable_library_or_gpu_is_refused_on_all_ranks(
    transport: type[NcclBackend], kind: type[BaseException], text: str
) -> None:
    where = "0" if transport is OneGpu else ""
    with Pools(transport) as run:
        reports = run(2, cannot, kind, where)
        for text_of_rank in (*reports[0], *reports[1]):
            assert re.search(text, text_of_rank), text_of_rank
        # The texts of both ranks are equal, except for the number of the reporting rank.
        assert [re.sub(r"\[rank \d\]", "", text_of_rank) for text_of_rank in reports[0][:2]] == [
            re.sub(r"\[rank \d\]", "", text_of_rank) for text_of_rank in reports[1][:2]
        ]


def no_gpu(comm: Any) -> str:
    if comm.rank == 0:
        x: Any = FakeArray.of(np.ones(4, np.float32), 0)
        error = error_of(comm.all_reduce, x)
        assert isinstance(error, DeviceError), repr(error)
        comm.abort("no GPU")  # as an exception at the end of the program does
        return str(error)
    error = error_of(lambda: comm.all_reduce(ones(comm)))
    assert isinstance(error, CollectiveError), repr(error)
    return str(error)


def test_missing_gpu_raises_device_error() -> None:
    with Pools(NoGpu) as run:
        reports = run(2, no_gpu)
        assert re.search(r"cuda:9: this process sees cuda:0 to cuda:3", reports[0]), reports


def all_calls(comm: Any) -> None:
    """Check that all calls work without the functions of later versions."""
    warm(comm)
    rank, size = comm.rank, comm.size
    x = of_fake(comm, np.arange(4, dtype=np.float32) + 10 * rank)
    every = np.stack([np.arange(4) + 10 * r for r in range(size)])
    assert read(comm.all_gather(x)).tolist() == every.ravel().tolist()
    uneven = [value for r in range(size) for value in every[r, : 2 + r]]
    mine = of_fake(comm, every[rank, : 2 + rank].astype(np.float32))
    assert read(comm.all_gather(mine)).tolist() == uneven
    assert read(comm.all_to_all(x)).tolist() == every[:, 2 * rank : 2 * rank + 2].ravel().tolist()
    # Gather into memory that already holds the root's part, and into other memory.
    root_output = of_device(comm, np.zeros(8, np.float32))
    part = root_output[4 * rank : 4 * rank + 4]
    part.fill_from_host(every[rank].astype(np.float32))
    for src, out in ((x, None), (part, root_output if rank == 1 else None)):
        gathered = comm.gather(src, root=1, counts=[4, 4], out=out)
        assert rank != 1 or read(gathered).tolist() == every.ravel().tolist()
    assert read(comm.sendrecv(x, 1 - rank, 1 - rank, like=x)).tolist() == every[1 - rank].tolist()
    y = comm.empty(4, like="cuda")
    y.fill_from_host(np.ones(4, np.float32))
    assert read(comm.all_reduce(y, out=y)).tolist() == [size] * 4
    Fake().clear_log()
    assert read(comm.all_reduce(x, op="avg")).tolist() == every.mean(0).tolist()
    assert len(calls_of_nccl()) == 1
    child = comm.split(0)
    assert read(child.all_reduce(x)).tolist() == every.sum(0).tolist()
    goes_on(comm)


@pytest.mark.parametrize("transport", [SharedGpu, Version219, Version227])
def test_supported_versions_make_all_calls(transport: type[NcclBackend]) -> None:
    with Pools(transport) as run:
        run(2, all_calls)


# -- ranks that make different calls --------------------------------------------------------------


def soon(function: Any, seconds: float, *texts: str) -> BaseException:
    """Return the error of a call; check its texts, and that it takes ``seconds`` plus the delay."""
    since = time.monotonic()
    error = error_of(function)
    took = time.monotonic() - since
    assert took < seconds + PROMISED_S + NOISE_S, took
    for text in texts:
        assert re.search(text, str(error)), repr(error)
    return error


def to_the_end(comm: Any, call: Any) -> None:
    """Make a call and wait for its stream, as frameworks do, even if the call has failed."""
    x = ones(comm)
    try:
        call(x)
    finally:
        Fake().synchronize(x.stream, x.device)
    # A program that waits for the stream only gets the error from its next call.
    until(lambda: comm.inner.transport.channel.failure is not None, 1.0 + PROMISED_S + NOISE_S)
    comm.all_reduce(ones(comm))


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "broadcast", "all_to_all"])
@on_ranks("both")
def test_cpu_array_on_one_rank_and_gpu_array_on_other_raise(comm: Any, name: str) -> None:
    warm(comm)
    x: Any = np.ones(6, np.float32) if comm.rank == 0 else ones(comm)

    def call() -> None:
        getattr(comm, name)(x, timeout=1.0)
        comm.barrier(timeout=1.0)

    error = soon(call, 2.0, r"rank [01]", name)
    assert isinstance(error, (MismatchError, CollectiveTimeoutError, CommunicatorAbortedError)), (
        repr(error)
    )
    Fake().synchronize(new_stream(comm), ordinal_of(comm))
    if comm.rank:
        Fake().synchronize(x.stream, x.device)


@on_ranks("nccl", shared=True)
def test_differing_calls_with_variable_sizes_raise_mismatch(comm: Any) -> None:
    """Calls whose sizes may differ between ranks are compared even where other calls are not."""
    warm(comm)
    x, y = ones(comm), of_fake(comm, np.ones(6, (np.float32, np.int32)[comm.rank]))
    refused(MismatchError, "float32", "int32", call=lambda: comm.all_gather(y))
    refused(MismatchError, "float32", "int32", call=lambda: comm.all_to_all(y))
    call = lambda: comm.broadcast(x, root=comm.rank)  # noqa: E731
    refused(MismatchError, "root=0", "root=1", call=call)
    call = lambda: comm.broadcast(ones(comm, 3 + comm.rank))  # noqa: E731
    refused(MismatchError, r"\[3\]", r"\[4\]", call=call)
    goes_on(comm)


@pytest.mark.parametrize("name", ["shapes", "operators", "calls", "structures"])
@on_ranks("nccl")
def test_uncompared_differing_calls_end_within_deadline(comm: Any, name: str) -> None:
    """Without a comparison the error comes when NCCL or the deadline notices the difference."""
    warm(comm)
    rank = comm.rank
    calls = {
        "shapes": lambda x: comm.all_reduce(ones(comm, 3 + rank), timeout=1.0),
        "operators": lambda x: comm.all_reduce(x, op=["sum", "max"][rank], timeout=1.0),
        "calls": lambda x: (comm.all_reduce if rank else comm.reduce)(x, timeout=1.0),
        "structures": lambda x: comm.all_reduce([x] * (1 + rank), timeout=1.0),
    }
    words = "rank 0", "rank 1", r"made different calls \(their call \d+\)"
    error = soon(lambda: to_the_end(comm, calls[name]), 1.0, *words)
    assert isinstance(
        error, (MismatchError, BackendError, CollectiveTimeoutError, CommunicatorAbortedError)
    ), repr(error)


# -- failures during calls ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["stream", "work"])
@on_ranks("nccl", size=3)
def test_deadline_names_late_rank(comm: Any, kind: str) -> None:
    warm(comm)
    text = "waited 1 s for rank 1: rank 1 last did its call"
    if comm.rank == 1:
        broken = lambda: comm.inner.transport.channel.failure is not None  # noqa: E731
        soon(lambda: to_the_end(comm, lambda x: until(broken)), 1.0, text)
        return
    if kind == "work":
        work = comm.all_reduce(ones(comm), timeout=1.0, async_op=True)
        assert work.wait() is not None  # it has been enqueued
        error = soon(work.synchronize, 1.0, text)
        assert isinstance(error, (CollectiveTimeoutError, CommunicatorAbortedError)), repr(error)
        until(work.done, PROMISED_S + NOISE_S)
        x = ones(comm)
        Fake().synchronize(x.stream, x.device)
    else:
        soon(lambda: to_the_end(comm, lambda x: comm.all_reduce(x, timeout=1.0)), 1.0, text)
    for call in (lambda: comm.all_reduce(ones(comm)), comm.barrier):
        later = error_of(call)
        assert isinstance(later, (CollectiveTimeoutError, CommunicatorAbortedError)), repr(later)


@on_ranks("nccl")
def test_deadline_of_first_background_call_raises(comm: Any) -> None:
    """The first call makes the communicator, so it needs the other ranks."""
    text = "waited 1 s for rank|different"
    if comm.rank == 1:
        soon(lambda: comm.barrier(timeout=10.0), 1.0, text)
        return
    work = comm.all_reduce(ones(comm), timeout=1.0, async_op=True)
    error = soon(work.wait, 1.0, text)
    assert work.exception() is error
    assert work.done()


@pytest.mark.parametrize("async_op", [False, True])
@on_ranks("nccl")
def test_deadline_of_message_names_peer(comm: Any, async_op: bool) -> None:
    warm(comm)
    text = r"waited (1|0\.9\d*) s for rank 1"
    if comm.rank == 1:
        soon(lambda: comm.barrier(timeout=10.0), 1.0, text)
        return
    x = ones(comm)
    receive = comm.recv(x, 1, timeout=1.0, async_op=True) if async_op else None
    soon(receive.wait if receive else lambda: comm.send(x, 1, timeout=1.0), 1.0, text)
    Fake().synchronize(x.stream, x.device)


def killed(comm: Any, how: str, marks: str) -> None:
    warm(comm)
    gather(comm, marks)
    x = ones(comm)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "work":
        works = [comm.all_reduce(x, out=x, async_op=True) for _ in range(3)]
        error = soon(works[-1].synchronize, 0.0)
        assert [type(error_of(work.synchronize)) for work in works] == [PeerLostError] * 3
    elif how == "message":
        error = soon(lambda: comm.recv(x, 1), 0.0)
    else:
        error = soon(lambda: to_the_end(comm, lambda x: comm.all_reduce(x, out=x)), 0.0)
    Fake().synchronize(x.stream, x.device)
    assert isinstance(error, PeerLostError), repr(error)
    assert error.ranks == (1,)


@pytest.mark.parametrize("how", ["stream", "work", "message"])
def test_killed_peer_raises_peer_lost(nccl: Pools, how: str, tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError) as caught:
        nccl(3, killed, how, str(tmp_path))
    assert [*caught.value.errors] == [1], str(caught.value)
    assert isinstance(caught.value.errors[1], RankDiedError)
    nccl(3, goes_on)


@pytest.mark.parametrize(("aborter", "how"), [(1, "stream"), (0, "stream"), (0, "work")])
@on_ranks("nccl")
def test_abort_from_another_thread_ends_waits(
    comm: Any, aborter: int, how: str, tmp_path: Path
) -> None:
    """Rank 0 waits for the GPU while a thread of rank 0 or of rank 1 calls abort()."""
    warm(comm)
    gather(comm, str(tmp_path))
    if comm.rank == aborter:
        threading.Timer(0.3, comm.abort, ["had enough"]).start()
    if comm.rank == 1:
        soon(lambda: comm.barrier(timeout=10.0), 0.5, "had enough")
    elif how == "stream":
        soon(lambda: to_the_end(comm, lambda x: comm.all_reduce(x)), 0.5, "had enough")
    else:
        x = ones(comm)
        work = comm.all_reduce(x, out=x, async_op=True)
        soon(work.synchronize, 0.5, "had enough")
        Fake().synchronize(x.stream, x.device)  # the stream ends


@on_ranks("nccl")
def test_late_error_of_nccl_is_raised(comm: Any, tmp_path: Path) -> None:
    warm(comm)
    gather(comm, str(tmp_path))
    if comm.rank == 1:
        Fake().knob("remote_error_at", 1)
    call = lambda x: comm.all_reduce(x, out=x)  # noqa: E731
    soon(lambda: to_the_end(comm, call), 0.0, "ncclRemoteError")


def no_memory(comm: Any) -> str:
    """Fill the GPU of rank 1, so that its call fails; return the error of each rank."""
    warm(comm)
    x = ones(comm)
    comm.barrier()
    if comm.rank == 1:
        Fake().knob("alloc_fail_at", 1)
    error = soon(
        lambda: (comm.all_gather(x, timeout=1.0), comm.barrier(timeout=1.0), comm.barrier()), 2.0
    )
    Fake().knob("alloc_fail_at", 0)
    Fake().synchronize(x.stream, x.device)
    return f"{type(error).__name__}: {error}"


def test_allocation_failure_on_one_rank_is_named_on_others(nccl: Pools) -> None:
    reports = nccl(2, no_memory)
    assert "AllocationError" in reports[1], reports
    assert "rank 1" in reports[0], reports
    nccl(2, goes_on)

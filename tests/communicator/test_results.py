"""Results that ``check="results"`` compares between the ranks, and bits that one rank flips."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from collective import native
from collective.communicator import Communicator
from collective.communicator.results import checksum, sums_of
from collective.deadline import Deadline
from collective.errors import (
    CollectiveError,
    ConfigError,
    CorruptionError,
    MismatchError,
    PeerFailedError,
    UnsupportedError,
)
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from collective.ops import as_op
from collective.request import Request
from collective.shards import Shards
from collective.start import config
from collective.testing import RanksFailedError, run_ranks
from collective.testing.samples import of_bits
from tests.support.loopback import Loopback, run
from tests.support.selection import in_whole

FLOAT32 = BY_NAME["float32"]
TRANSPORTS = ["threads", "shm", in_whole("gloo"), in_whole("hierarchical")]


def flip_after(
    comm: Communicator, operation: str, rank: int, results: bool = False, once: int | None = None
) -> None:
    """Make ``rank`` flip a bit of its result in each new plan of an operation.

    Args:
        results: whether to flip a bit of the received checksums instead.
        once: which run of the plans flips, from 0; None for all.
    """
    backend: Any = comm.inner.transport
    plan, runs = backend.plan, itertools.count()

    def plan_that_flips(request: Any) -> Any:
        actual = plan(request)
        compares = request.options.get("compared") == "results"

        def run_and_flip(src: Buffer, dst: Buffer | None, deadline: Any) -> Any:
            work = actual(src, dst, deadline)
            if work is not None:
                work.wait()
            affected = compares == results and (results or is_call(request))
            if dst is not None and affected and once in (None, next(runs)):
                data = dst.bytes().array
                data[data.size // 2] ^= 4
            return None

        return run_and_flip

    def is_call(request: Any) -> bool:
        return bool(request.operation == operation and request.dtype is not None)

    if comm.rank == rank:
        backend.plan = plan_that_flips


def error_of(call: Callable[[], Any], kind: type[Exception] = CorruptionError) -> tuple[Any, str]:
    with pytest.raises(kind) as caught:
        call()
    return getattr(caught.value, "ranks", None), str(caught.value)


def flipped_all_reduce(comm: Communicator) -> tuple[Any, str, Any]:
    flip_after(comm, "all_reduce", 1)
    ranks, text = error_of(lambda: comm.all_reduce(np.ones(500, np.float32)))
    return ranks, text, comm.broadcast(np.arange(3)).tolist()


@pytest.mark.parametrize("backend", ["threads", "shm", in_whole("gloo")])
def test_flip_in_all_reduce_names_rank_on_all_ranks(backend: str) -> None:
    for number, (ranks, text, after) in enumerate(
        run_ranks(3, flipped_all_reduce, backend=backend, check="results")
    ):
        assert ranks == (1,)
        assert re.match(
            r"all_reduce: rank 1 has another result than ranks 0, 2, in call \d+, "
            r"all_reduce\(float32\[500\], op=sum\) at \S*test_results.py:\d+ in <lambda> "
            rf"\[rank {number} of 3\]\. A bit of memory or of a message has changed",
            text,
        )
        assert after == [0, 1, 2]


def test_flip_without_majority_names_all_ranks() -> None:
    for ranks, text, _ in run_ranks(2, flipped_all_reduce, check="results"):
        assert ranks == (0, 1)
        assert "the ranks have different results, and no majority: rank 0; rank 1" in text


def flipped_twice_made(comm: Communicator, call: str, in_place: bool, once: int) -> Any:
    """Return the ranks and the text of the error; None if no rank got a wrong result."""
    flip_after(comm, call, comm.size - 1, once=once)
    options: dict[str, Any] = {"root": comm.size - 1} if call == "reduce" else {}
    x = np.arange(3000.0) + comm.rank
    if in_place:
        options["out"] = x[: 3000 // comm.size] if call == "reduce_scatter" else x
    return error_of(lambda: getattr(comm, call)(x, **options))


@pytest.mark.parametrize("call", ["reduce", "reduce_scatter", "scan"])
@pytest.mark.parametrize("backend", ["shm", "threads", in_whole("gloo")])
@pytest.mark.parametrize(("in_place", "once"), [(False, 0), (True, 1)])
def test_flip_in_result_of_one_rank_is_found_by_second_call(
    backend: str, call: str, in_place: bool, once: int
) -> None:
    outcomes = run_ranks(3, flipped_twice_made, call, in_place, once, backend=backend,
                         check="results")  # fmt: skip
    for number, (ranks, text) in enumerate(outcomes):
        assert ranks == (2,)
        assert text.startswith(
            f"{call}: rank 2 has another result when the call is made twice, in call "
        )
        assert f" in <lambda> [rank {number} of 3]. A bit of memory" in text


def twice_in_place(comm: Communicator, call: str, count: int) -> bool:
    x = np.random.default_rng(comm.rank).standard_normal(count)
    every = [np.random.default_rng(rank).standard_normal(count) for rank in range(comm.size)]
    part = slice(None)
    if call == "reduce_scatter":
        part = slice(comm.rank * count // comm.size, (comm.rank + 1) * count // comm.size)
    expected = sum(every[: comm.rank + 1] if call == "scan" else every)[part]
    out = x[part] if call == "reduce_scatter" else x
    getattr(comm, call)(x, out=out)
    return (call == "reduce" and comm.rank > 0) or bool(np.allclose(out, expected, rtol=1e-12))


# Short calls and calls that are staged; each overwrites its input.
@pytest.mark.parametrize("call", ["reduce", "reduce_scatter", "scan"])
@pytest.mark.parametrize("count", [300, 300_000])
def test_call_made_twice_uses_its_input_twice(call: str, count: int) -> None:
    results = run_ranks(3, twice_in_place, call, count, backend="shm", check="results")
    assert results == [True] * 3


def other_nan(comm: Communicator, call: str, dtype: str, differs: str) -> Any:
    """Reduce NaN; rank 1's result has another payload, or in a scan each rank's second result."""
    backend: Any = comm.inner.transport
    plan, runs = backend.plan, itertools.count()

    def plan_with_other_nan(request: Any) -> Any:
        actual = plan(request)

        def run(src: Any, dst: Any, deadline: Any) -> None:
            actual(src, dst, deadline)
            if request.operation == call and (next(runs) if call == "scan" else comm.rank):
                bits = dst.bytes().array
                bits[-dst.array.itemsize if differs == "value" else 0] ^= 1

        return run

    backend.plan = plan_with_other_nan
    x = of_bits(dtype, np.array([0x7FC1, 0x3F80, 0x3F80], np.uint16)) if dtype == "bfloat16" else (
        np.array([np.nan, 1, 1], dtype)
    )  # fmt: skip
    getattr(comm, call)(x)
    return comm.all_gather_object(comm.rank)


@pytest.mark.parametrize("call", ["scan", "all_reduce"])
@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
)
def test_other_payload_of_nan_is_no_other_result(call: str, dtype: str) -> None:
    assert run_ranks(2, other_nan, call, dtype, "payload", check="results") == [[0, 1]] * 2
    with pytest.raises(RanksFailedError, match=r"another result when the call|different results"):
        run_ranks(2, other_nan, call, dtype, "value", check="results")


def flipped_all_gather(comm: Communicator) -> tuple[Any, str]:
    flip_after(comm, "all_gather", 0)
    return error_of(lambda: comm.all_gather(np.ones(500)))


def test_flip_in_all_gather_names_receiver_and_sender() -> None:
    for ranks, text in run_ranks(2, flipped_all_gather, backend="shm", check="results"):
        assert ranks == (0,)
        assert "rank 0 has another piece than rank 1 sent" in text


def every_second_call(comm: Communicator) -> list[bool]:
    flip_after(comm, "all_reduce", 1)
    found = []
    for _ in range(4):
        try:
            comm.all_reduce(np.ones(500))
            found.append(False)
        except CorruptionError:
            found.append(True)
    return found


def test_interval_of_two_compares_every_second_call() -> None:
    assert run_ranks(2, every_second_call, check="results:2") == [[False, True] * 2] * 2


def calls_left(comm: Communicator) -> list[tuple[str, int]]:
    """Make each call, in turns in C, in Python and in the background; return the calls left."""
    size, rank = comm.size, comm.rank
    left = []
    for count in (6, 30_000):
        x, y, piece = (np.ones(n, np.float32) for n in (count * size, count * size, count))
        calls: dict[str, Callable[..., Any]] = {
            "all_reduce": partial(comm.all_reduce, x, out=y),
            "reduce": partial(comm.reduce, x, out=None if rank else y),
            "scan": partial(comm.scan, x, out=y),
            "reduce_scatter": partial(comm.reduce_scatter, x, out=piece),
            "broadcast": partial(comm.broadcast, x, out=x),
            "scatter": partial(comm.scatter, None if rank else x, out=piece),
            "all_gather": partial(comm.all_gather, x),
            "all_gather of uneven arrays": partial(comm.all_gather, x[rank:]),
            "all_gather with counts": partial(comm.all_gather, x, counts=[x.size] * size),
            "gather": partial(comm.gather, x),
            "all_to_all": partial(comm.all_to_all, x),
            "barrier": comm.barrier,
        }
        for name, call in calls.items():
            for turn in range(2 * size):
                if turn % size != rank:
                    call()
                elif turn == rank:
                    call(timeout=30.0)
                else:
                    call(async_op=True).wait()
                left.append((name, comm._path.recorder.ring.left))
    return left


@pytest.mark.parametrize("backend", ["shm", in_whole("gloo")])
@pytest.mark.parametrize("interval", [3, 4])
def test_ranks_count_each_call_once_whether_c_or_python_makes_it(
    backend: str, interval: int
) -> None:
    first, *others = run_ranks(3, calls_left, backend=backend, check=f"results:{interval}")
    assert others == [first] * 2
    for (_, before), (name, after) in pairwise(first):
        expected = before - 1 if before else interval - 1
        assert after == (before if name == "barrier" else expected)


def refused_and_left(comm: Communicator) -> list[int]:
    ring = comm._path.recorder.ring
    left = []
    for _ in range(2):
        with pytest.raises(MismatchError):
            comm.all_reduce(np.ones(3 + comm.rank))
        left.append(ring.left)
        comm.all_reduce(np.ones(3))
        left.append(ring.left)
    return left


def test_call_that_fails_on_all_ranks_is_not_counted() -> None:
    assert run_ranks(2, refused_and_left, backend="shm", check="results:5") == [[4, 3, 3, 2]] * 2


def without_memory(comm: Communicator, call: str) -> tuple[str, str, float]:
    """Return the error of a rank, and the seconds until then; rank 1 has no memory."""
    if comm.rank == 1:
        where = "checksum" if call == "all_reduce" else "Buffer.empty"
        name = f"collective.communicator.results.{where}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(name, Mock(side_effect=MemoryError("no memory")))
            return error_and_seconds(comm, call)
    return error_and_seconds(comm, call)


def error_and_seconds(comm: Communicator, call: str) -> tuple[str, str, float]:
    began = time.monotonic()
    try:
        getattr(comm, call)(np.ones(30), out=np.ones(10 if call == "reduce_scatter" else 30))
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    raise AssertionError("no error")


@pytest.mark.parametrize("call", ["reduce_scatter", "scan", "all_reduce"])
@pytest.mark.parametrize("backend", ["shm", in_whole("gloo")])
def test_peers_of_rank_without_memory_for_comparison_fail_at_once(backend: str, call: str) -> None:
    names, texts, seconds = zip(
        *run_ranks(3, without_memory, call, backend=backend, call_timeout=40.0, check="results")
    )
    assert names == ("PeerFailedError", "MemoryError", "PeerFailedError")
    for rank in (0, 2):
        assert texts[rank].startswith(f"{call}")
        assert f"rank 1 failed [rank {rank}]; its traceback:" in texts[rank]
        assert texts[rank].endswith("MemoryError: no memory")
        assert seconds[rank] < 20


def damaged_checksums(comm: Communicator) -> tuple[Any, str] | None:
    flip_after(comm, "", 1, results=True)
    if comm.rank == 1:
        return error_of(lambda: comm.all_reduce(np.ones(5)))
    with contextlib.suppress(PeerFailedError):  # a failure may overtake the end of the call
        comm.all_reduce(np.ones(5))
    return None


def test_flip_in_checksums_is_no_flip_in_result() -> None:
    _, error, _ = run_ranks(3, damaged_checksums, check="results")
    assert error is not None
    ranks, text = error
    assert ranks == (1,)
    assert "all_reduce: the checksums of rank 1 for call 1 arrived damaged [rank 1 of 3]" in text


def after_damaged_checksums(comm: Communicator) -> tuple[str, float]:
    if comm.rank == 1:
        flip_after(comm, "", 1, results=True)
        with pytest.raises(CorruptionError):
            comm.all_reduce(np.ones(5))
    began = time.monotonic()
    try:
        while True:  # the news may arrive after the next call, over some transports
            comm.all_reduce(np.ones(5))
    except CollectiveError as error:
        return type(error).__name__, time.monotonic() - began


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_peers_of_rank_with_damaged_checksums_fail_at_once(backend: str) -> None:
    outcomes = run_ranks(3, after_damaged_checksums, backend=backend, call_timeout=40.0,
                         check="results")  # fmt: skip
    for name, seconds in outcomes:
        assert name == "PeerFailedError"
        assert seconds < 20


class _Flipping(Loopback):
    """Loopback that flips a bit of every message of 1600 bytes."""

    name = "loopback-flipping-all"

    def send(self, src: Any, dst: int, tag: int, deadline: Any) -> None:
        if src.nbytes == 1600:
            src = Buffer(src.array.copy(), src.dtype)
            src.bytes().array[700] ^= 1
        super().send(src, dst, tag, deadline)


def test_flip_in_message_raises_on_receiver() -> None:
    def body(backend: Any) -> Any:
        comm = Communicator(
            backend, local_rank=backend.rank, local_size=2, host="", timeout=9.0, check="results"
        )
        if comm.rank == 0:
            comm.send(np.ones(200), 1, tag=3)
            return None
        return error_of(lambda: comm.recv(np.ones(200), 0, tag=3))

    _, (ranks, text) = run(2, body, _Flipping)
    assert ranks == (1,)
    assert text.startswith(
        "recv: the message with tag 3 from rank 0 is not the one that rank 0 sent [rank 1 of 2]."
    )


def several_calls(comm: Communicator) -> list[Any]:
    rank, size = comm.rank, comm.size
    nan = np.full(4, np.nan)
    results = [
        comm.all_reduce(np.arange(20_000.0) + rank).sum(),
        np.isnan(comm.all_reduce(nan, op="max")).all(),
        comm.all_gather(np.full(rank, 7)).tolist(),
        comm.gather({"a": np.ones(3000), "b": np.arange(rank)}),
        comm.scatter(np.arange(size * 2) if rank == 0 else None).tolist(),
        comm.all_to_all(np.arange(size * 1000)).sum(),
        comm.broadcast_object({"k": 1} if rank == 0 else None),
        comm.reduce(np.arange(20_000.0) + rank, root=size - 1, op="max"),
        comm.reduce_scatter({"a": np.arange(size * 2000.0), "b": np.ones(size)}),
        comm.scan(np.full(3000, rank)).sum(),
        comm.reduce(np.ones((len(Shards(5, comm).mine), 3)), order=Shards(5, comm)),
        comm.sendrecv(np.full(3000, rank), (rank + 1) % size, (rank - 1) % size).sum(),
        comm.split(rank % 2).all_reduce(1),
        comm.all_reduce(np.ones(5), async_op=True).wait().tolist(),
    ]
    comm.barrier()
    return [len(results)]


@pytest.mark.parametrize("backend", TRANSPORTS)
def test_sound_calls_raise_nothing(backend: str) -> None:
    assert run_ranks(3, several_calls, backend=backend, check="results") == [[14]] * 3


def test_call_after_listener_is_still_compared() -> None:
    def body(comm: Communicator) -> Any:
        comm.hook(before=lambda event: None)()
        return flipped_all_reduce(comm)[0]

    assert run_ranks(3, body, check="results") == [(1,)] * 3


class _Enqueueing(Loopback):
    name = "loopback-enqueueing"
    enqueues = True


def test_transport_that_enqueues_refuses_results() -> None:
    def body(backend: Any) -> Any:
        with pytest.raises(UnsupportedError, match=r"check: 'results' is not supported by backend"):
            Communicator(backend, local_rank=0, local_size=2, host="", timeout=9.0, check="results")

    run(2, body, _Enqueueing)


@pytest.mark.parametrize("value", ["results", "results:1", "results:100", "always", "auto"])
def test_check_accepts(value: str) -> None:
    assert config.load({"check": value}).check == value


@pytest.mark.parametrize("value", ["results:0", "results:-1", "results:", "results:x", "always:2"])
def test_check_refuses(value: str) -> None:
    with pytest.raises(ConfigError, match="'results:10' for every tenth call"):
        config.load({"check": value})


@pytest.mark.parametrize("nbytes", [1, 8, 1000, 1024, 1033, 5000, 65_536, 65_543, 200_000])
def test_checksum_differs_after_any_flip(nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    before = checksum(data)
    for at in {0, nbytes // 3, nbytes // 2, nbytes - 1, max(0, nbytes - 9)}:
        for bit in range(8):
            data[at] ^= np.uint8(1 << bit)
            assert checksum(data) != before
            data[at] ^= np.uint8(1 << bit)
    assert checksum(data) == before


def test_checksum_differs_after_exchanged_blocks() -> None:
    data = np.arange(1 << 15, dtype=np.uint64)
    other = np.concatenate([data[1 << 14 :], data[: 1 << 14]])
    assert checksum(data) != checksum(other)


def test_ranks_with_different_settings_get_mismatch() -> None:
    def body(comm: Communicator) -> str:
        if comm.rank:
            comm = Communicator(
                comm.inner.transport,
                local_rank=1,
                local_size=2,
                host="",
                timeout=9.0,
                check="results",
            )
        return error_of(lambda: [comm.all_reduce(np.ones(3)) for _ in range(2)], MismatchError)[1]

    for text in run_ranks(2, body):
        assert "compared=results" in text


def sums_of_plan(
    comm: Communicator, count: int, offset: int = 0, sums: bool = True
) -> tuple[Any, Any]:
    """Return what a plan of ``all_reduce`` reports of the sums of its result, and the result."""
    plan: Any = comm.inner.transport.plan(Request("all_reduce", FLOAT32, (count,), op=as_op("sum")))
    x = np.random.default_rng(comm.rank).standard_normal(count, np.float32)
    out = np.empty(count + offset, np.float32)[offset:]
    run = plan.summed if sums else plan
    return run(Buffer(x, FLOAT32), Buffer(out, FLOAT32), Deadline(30.0)), out


def summed_on_the_way(comm: Communicator, count: int, offset: int) -> tuple[bool, bool, bool]:
    """Return whether C has the sums of the whole result, the right ones, and all ranks' sums."""
    (total, placed, nbytes, announced), out = sums_of_plan(comm, count, offset)
    sums = sums_of(out)
    words = np.frombuffer(announced, np.uint64).reshape(comm.size, 3)
    everywhere = (words[:, :2] == np.array(sums, np.uint64)).all()
    return nbytes == out.nbytes, (total, placed) == sums, bool(everywhere)


# Lengths that are staged: in one block, in uneven pieces that end within a word, and beyond the
# caches.
@pytest.mark.skipif(native.chosen.extension is None, reason="the native core is not in use")
@pytest.mark.parametrize(("count", "offset"), [(8192, 0), (100_003, 1), (5_000_001, 0)])
def test_checksum_of_staged_result_is_computed_by_c(count: int, offset: int) -> None:
    assert run_ranks(2, summed_on_the_way, count, offset, backend="shm") == [(True,) * 3] * 2


def sums_of_some_ranks(comm: Communicator) -> list[bool]:
    """Return for each call whether this rank got the sums of all; rank 1 announces no second."""
    found = []
    for turn in range(3):
        report, _ = sums_of_plan(comm, 100_003, sums=turn != 1 or comm.rank != 1)
        found.append(report is not None and report[3] is not None)
    return found


@pytest.mark.skipif(native.chosen.extension is None, reason="the native core is not in use")
def test_sums_of_an_earlier_call_do_not_count_as_announced() -> None:
    assert run_ranks(3, sums_of_some_ranks, backend="shm") == [[True, False, True]] * 3


class _Changed:
    """Plan of C whose announced words are changed."""

    def __init__(self, plan: Any, change: Callable[[Any], None]) -> None:
        self._plan = plan
        self._change = change

    def __call__(self, *args: Any) -> None:
        self._plan(*args)

    def summed(self, *args: Any) -> Any:
        *sums, announced = self._plan.summed(*args)
        words = np.frombuffer(announced, np.uint64).reshape(-1, 3).copy()
        self._change(words)
        return (*sums, words.tobytes())


def other_sums(words: Any) -> None:
    words[1] += np.array([4, 0, 0], np.uint64)
    words[1, 2] = ~(words[1, 0] ^ words[1, 1])


def damaged_sums(words: Any) -> None:
    words[1, 0] ^= 1 << 40


def with_changed_words(comm: Communicator, ranks: list[int], change: Any) -> tuple[Any, str] | None:
    backend: Any = comm.inner.transport
    plan = backend.plan
    if comm.rank not in ranks:
        with contextlib.suppress(PeerFailedError):  # a failure may overtake the end of the call
            comm.all_reduce(np.ones(30_000))
        return None
    backend.plan = lambda request: (
        _Changed(plan(request), change) if request.operation == "all_reduce" else plan(request)
    )
    return error_of(lambda: comm.all_reduce(np.ones(30_000)))


@pytest.mark.skipif(native.chosen.extension is None, reason="the native core is not in use")
def test_other_announced_sums_name_rank() -> None:
    outcomes = run_ranks(3, with_changed_words, [0, 1, 2], other_sums, backend="shm",
                         check="results")  # fmt: skip
    for outcome in outcomes:
        assert outcome is not None
        ranks, text = outcome
        assert ranks == (1,)
        assert text.startswith("all_reduce: rank 1 has another result than ranks 0, 2, in call 1, ")


@pytest.mark.skipif(native.chosen.extension is None, reason="the native core is not in use")
def test_damaged_announced_sums_raise_on_their_reader() -> None:
    first, outcome, third = run_ranks(3, with_changed_words, [1], damaged_sums, backend="shm",
                                      check="results")  # fmt: skip
    assert (first, third) == (None, None)
    assert outcome is not None
    ranks, text = outcome
    assert ranks == (1,)
    assert "the checksums of rank 1 for call 1 arrived damaged [rank 1 of 3]" in text


def other_checksum(comm: Communicator, count: int) -> tuple[Any, str, Any]:
    """Make calls in C, of which rank 1 computes a wrong checksum in Python."""
    x = comm.empty(count, np.float32)
    x[:] = 1
    comm.all_reduce(x, out=x)
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            patch.setattr("collective.communicator.results.checksum", Mock(return_value=3))
        ranks, text = error_of(lambda: comm.all_reduce(x, out=x))
    return ranks, text, comm.all_reduce(x, out=x)[0]


# A short call, and a call in symmetric memory: C announces the sums of neither.
@pytest.mark.parametrize("count", [500, 30_000])
def test_call_in_c_whose_sums_are_not_announced_is_compared(count: int) -> None:
    outcomes = run_ranks(3, other_checksum, count, backend="shm", check="results")
    for number, (ranks, text, after) in enumerate(outcomes):
        assert ranks == (1,)
        assert re.match(
            rf"all_reduce: rank 1 has another result than ranks 0, 2, in call \d+, "
            rf"all_reduce\(float32\[{count}\], op=sum\) at \S*test_results.py:\d+ in <lambda> "
            rf"\[rank {number} of 3\]",
            text,
        )
        assert after == 27


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 1000, 65_536, 65_543, 500_001])
def test_numpys_checksum_is_that_of_c(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_c = native.sums()
    if in_c is None:
        pytest.skip("the native core is not in use")
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes + 3, np.uint8)[3:]
    monkeypatch.setattr(native.chosen, "extension", None)
    assert sums_of(data) == in_c(data)


@pytest.mark.parametrize("first", [0, 8, 80, 65_536, 1 << 20])
@pytest.mark.parametrize("second", [16, 520, 32_768, 131_072 + 64])
def test_checksum_differs_after_exchange_of_signs(first: int, second: int) -> None:
    data = np.ones((1 << 21) // 8)
    before = data.copy()
    before[first // 8], data[second // 8] = -1, -1
    assert checksum(before) != checksum(data)

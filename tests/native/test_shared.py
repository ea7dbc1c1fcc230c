"""The collectives over shared memory in C, by ranks that are threads: C's and Python's."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collective.algorithms import arithmetic
from collective.memory.dtypes import BY_NAME
from collective.ops import as_op

core = pytest.importorskip("collective.native._core", reason="the native core is not built")

Array = np.ndarray[Any, Any]

AREA_BYTES = 4096
FLOAT32 = BY_NAME["float32"].code


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_the_sanitizers_find_nothing(sanitizer: str) -> None:
    # As make sanitize does, but shorter.
    few = ["--calls", "150", "--ranks", "2", "3", "5", "--areas", "1024", "4096"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.native.threads", *few, "--sanitizers", sanitizer],
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
        check=False,
    )
    if "there is no compiler" in done.stdout:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("150 calls of") == 6


class Ranks:
    """Ranks that are threads, over one piece of memory."""

    def __init__(self, size: int, wait: Callable[[int, int, int], None] | None = None) -> None:
        self.size = size
        stride = 4 * 64 + 2 * AREA_BYTES
        self.memory = bytearray(size * stride)
        self.words = memoryview(self.memory).cast("Q")
        counters, areas = (0, 64, 128, 192), (256, 256 + AREA_BYTES)
        self.places = [
            tuple(rank * stride + at for at in (*counters, *areas)) for rank in range(size)
        ]
        self._pool = ThreadPoolExecutor(size)
        self.each = [
            core.Shared(self.memory, rank, self.places, AREA_BYTES, 20, wait or self.wait)
            for rank in range(size)
        ]

    def wait(self, rank: int, offset: int, value: int) -> None:
        while self.words[offset // 8] < value:
            time.sleep(0)

    def run(self, function: Callable[[Any, int], Any]) -> list[Any]:
        """Return what the function returns on each rank."""
        return [*self._pool.map(function, self.each, range(self.size))]


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return Ranks(request.param)


def drawn(dtype: str, count: int, size: int) -> list[Array]:
    random = np.random.default_rng(count)
    numbers = [random.normal(size=count) * 100 for _ in range(size)]
    if dtype == "bfloat16":
        return [arithmetic.float32_to_bfloat16(each.astype(np.float32)) for each in numbers]
    return [each.astype(dtype) for each in numbers]


def in_order(name: str, dtype: str, values: list[Array]) -> Array:
    total = values[0].copy()
    for value in values[1:]:
        arithmetic.reference(name, BY_NAME[dtype])(total, value, out=total)
    return total


# In elements of four bytes: none, one, and around a small call, one block, and many.
COUNTS = [0, 1, 63, 64, 65, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 5000]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("count", COUNTS)
def test_all_reduce_of_any_length(ranks: Ranks, count: int, in_place: bool) -> None:
    values = drawn("float32", count, ranks.size)
    wanted = in_order("sum", "float32", values).tobytes()

    def call(shared: Any, rank: int) -> bytes:
        src = values[rank].copy()
        dst = src if in_place else np.empty_like(src)
        shared.all_reduce(src, dst, "sum", FLOAT32, False)
        return dst.tobytes()

    assert ranks.run(call) == [wanted] * ranks.size


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("prod", "int8"), ("sum", "float16"), ("sum", "bfloat16"), ("max", "float64"),
     ("sum", "complex128"), ("bxor", "uint16"), ("lor", "bool")],
)  # fmt: skip
def test_all_reduce_folds_every_type_in_rank_order(ranks: Ranks, name: str, dtype: str) -> None:
    values = drawn(dtype, 3001, ranks.size)
    wanted = in_order(name, dtype, values).tobytes()

    def call(shared: Any, rank: int) -> bytes:
        dst = np.empty_like(values[rank])
        shared.all_reduce(values[rank], dst, name, BY_NAME[dtype].code, False)
        return dst.tobytes()

    assert ranks.run(call) == [wanted] * ranks.size


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "complex64"])
def test_the_mean_is_that_of_the_reference(ranks: Ranks, dtype: str) -> None:
    kind = BY_NAME[dtype]
    values = drawn(dtype, 3001, ranks.size)
    for value in values:
        value[::100] = 0x7F80 if dtype == "bfloat16" else np.inf
    with np.errstate(all="ignore"):
        wanted = in_order("sum", dtype, values)
        divide = arithmetic.post(as_op("avg"), kind, ranks.size)
        assert divide is not None
        divide(wanted, wanted)

    def call(shared: Any, rank: int) -> bytes:
        dst = np.empty_like(values[rank])
        shared.all_reduce(values[rank], dst, "sum", kind.code, True)
        return dst.tobytes()

    assert ranks.run(call) == [wanted.tobytes()] * ranks.size


@pytest.mark.parametrize("count", COUNTS)
def test_broadcast_and_all_gather_of_any_length(ranks: Ranks, count: int) -> None:
    values = drawn("int32", count, ranks.size)
    root = ranks.size - 1

    def call(shared: Any, rank: int) -> tuple[bytes, bytes, bytes]:
        sent = values[rank].copy()
        shared.broadcast(sent, root)
        every = np.empty(count * ranks.size, np.int32)
        shared.all_gather(values[rank], every)
        again = np.zeros_like(every)
        own = again[rank * count : (rank + 1) * count]
        own[:] = values[rank]
        shared.all_gather(own, again)
        return sent.tobytes(), every.tobytes(), again.tobytes()

    together = np.concatenate(values).tobytes()
    assert ranks.run(call) == [(values[root].tobytes(), together, together)] * ranks.size


@pytest.mark.parametrize("size", [2, 3])
def test_small_calls_follow_each_other_in_their_areas(size: int) -> None:
    ranks = Ranks(size)
    counts = [0, 1, 7, AREA_BYTES // 4 - 1, AREA_BYTES // 4, 300] * 5

    def call(shared: Any, rank: int) -> list[bytes]:
        found = []
        for step, count in enumerate(counts, 1):
            x = np.arange(count, dtype=np.float32) * step + rank
            assert shared.small_all_reduce(x, x, "sum", FLOAT32, step, 1000 + step)
            found.append(x.tobytes())
        return found

    wanted = [
        in_order(
            "sum", "float32", [np.arange(count, dtype=np.float32) * step + r for r in range(size)]
        ).tobytes()
        for step, count in enumerate(counts, 1)
    ]
    assert ranks.run(call) == [wanted] * size


def test_ranks_that_do_different_things_all_find_out_and_write_nothing() -> None:
    ranks = Ranks(3)

    def call(shared: Any, rank: int) -> tuple[bool, bool, bool, list[float]]:
        x = np.full(5, rank, np.float32)
        small = shared.small_all_reduce(x, x, "sum", FLOAT32, 1, 7 + (rank == 1))
        arrived = shared.arrive(2, rank)
        untouched = bool((x == rank).all())
        assert shared.small_all_reduce(x, x, "sum", FLOAT32, 3, 7)
        return small, arrived, untouched, x.tolist()

    assert ranks.run(call) == [(False, False, True, [3.0] * 5)] * 3


def test_python_is_asked_to_wait_and_what_it_raises_ends_the_call() -> None:
    asked = []

    def wait(rank: int, offset: int, value: int) -> None:
        asked.append((rank, offset, value))
        raise TimeoutError("late")

    ranks = Ranks(2, wait)
    x = np.ones(5000, np.float32)
    with pytest.raises(TimeoutError, match="late"):
        ranks.each[0].arrive(1, 0)
    with pytest.raises(TimeoutError, match="late"):
        ranks.each[0].all_reduce(x, x, "sum", FLOAT32, False)
    stride = ranks.places[1][0]
    assert asked == [(1, stride, 1), (1, stride + 64, 1)]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((np.ones(8, np.float32), np.ones(7, np.float32)), id="length"),
        pytest.param((np.ones(8, np.float32)[::2], np.ones(4, np.float32)), id="strides"),
        pytest.param((np.ones(33, np.uint8)[1:], np.ones(32, np.uint8)), id="alignment"),
        pytest.param((np.ones(8, np.float32), b"read-only" * 4), id="read-only"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(arguments: tuple[Any, Any]) -> None:
    ranks = Ranks(2)
    with pytest.raises((ValueError, BufferError)):
        ranks.each[0].all_reduce(*arguments, "sum", FLOAT32, False)


def test_a_part_of_the_output_cannot_be_the_input() -> None:
    x = np.ones(9, np.float32)
    with pytest.raises(ValueError, match="do not fit"):
        Ranks(2).each[0].all_reduce(x[:8], x[1:], "sum", FLOAT32, False)


@pytest.mark.parametrize("place", [-8, 4, 1 << 20])
def test_places_outside_of_the_segment_are_refused(place: int) -> None:
    places = [(0, 64, 128, 192, 256, 512), (0, 64, 128, 192, 256, place)]
    with pytest.raises(ValueError, match="is not in the segment"):
        core.Shared(bytearray(1024), 0, places, 64, 20, print)

"""Recorded calls, replayed by ranks in threads.

The results must have the bits that the algorithms give over the same messages. Where a fold is in
rank order, they must have the bits of that fold.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

from collective.algorithms import arithmetic, pieces, schedules
from collective.algorithms.folds import Folding
from collective.algorithms.messages import COLLECTIVE_TAG
from collective.algorithms.schedules import COPY, DIVIDE, EXCHANGE, FOLD, Schedule, record
from collective.contract.backend import Backend
from collective.deadline import Deadline
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME, DType
from collective.ops import ReduceOp, as_op, premul_sum
from collective.request import Disagreement, Request
from tests.support.algorithm_cases import (
    COMPOSE,
    FLOAT32,
    INT64,
    SUBTRACT,
    TIMEOUT,
    Array,
    Output,
    in_regime,
    maps,
)
from tests.support.loopback import Loopback, run
from tests.support.selection import in_whole

pytestmark = pytest.mark.quick

UINT8 = BY_NAME["uint8"]
SUM = as_op("sum")
SIZES = range(1, 7)
#: Operators, each with a dtype for which it is special.
FOLDS = [
    ("sum", "float32"), ("sum", "float16"), ("sum", "bfloat16"), ("sum", "complex64"),
    ("prod", "float64"), ("min", "float32"), ("max", "bfloat16"), ("min", "bool"),
    ("avg", "float16"), ("avg", "float32"), ("avg", "bfloat16"), ("avg", "complex128"),
    ("premul_sum", "float32"), ("premul_sum", "bfloat16"), ("band", "uint8"), ("bxor", "bool"),
    ("land", "float32"), ("lor", "int32"), ("land", "bool"), ("compose", "int64"),
]  # fmt: skip

#: Lengths of arrays, whether folds are in rank order, and whether the call is in place.
CASES = [
    (0, False, False), (1, False, True), (1, True, False), (33, False, False), (33, False, True),
    (33, True, True),
]  # fmt: skip


class Marked(Loopback):
    """Loopback with marks.

    Attributes:
        frames: number of marked messages that this rank has sent, and of other messages.
    """

    frames: tuple[int, int] = (0, 0)

    def _count(self, marked: int, others: int) -> None:
        self.frames = self.frames[0] + marked, self.frames[1] + others

    def send(self, src: Buffer, dst: int, tag: int, deadline: Deadline) -> None:
        self._count(0, 1)
        super().send(src, dst, tag, deadline)

    def exchange_marked(
        self, src: Array | None, to: int, dst: Array | None, source: int, mark: int,
        deadline: Deadline,
    ) -> int:  # fmt: skip
        self._count(1, 0)
        nbytes = 0 if src is None else src.nbytes
        head = Buffer(np.array([nbytes, mark], np.int64), INT64)
        super().send(head, to, COLLECTIVE_TAG, deadline)
        if src is not None and nbytes:
            super().send(Buffer(src, UINT8), to, COLLECTIVE_TAG, deadline)
        self.recv(head, source, COLLECTIVE_TAG, deadline)
        nbytes, received = head.array.tolist()
        payload = Buffer.empty(nbytes, UINT8)
        if nbytes:
            self.recv(payload, source, COLLECTIVE_TAG, deadline)
        if received == mark:
            assert (0 if dst is None else dst.nbytes) == nbytes
            if dst is not None:
                dst[:] = payload.array
        return int(received)


class Call(NamedTuple):
    """One call of all ranks.

    Attributes:
        requests: the request of each rank.
        dtype: element type of the arrays.
        elements: number of elements of each array, where all ranks' arrays are alike.
        inputs: input of each rank; None for ranks without one.
        lengths: number of elements of each rank's output; None for ranks without one.
        in_place: for each rank, where the input begins in the output, in elements; or where the
            output begins in the input, if the input is longer.
    """

    requests: Sequence[Request]
    dtype: DType
    elements: int
    inputs: Sequence[Array | None]
    lengths: Sequence[int | None]
    in_place: Sequence[int] | None = None

    def arrays(self, rank: int) -> tuple[Buffer | None, Buffer | None, Output | None]:
        """Return input and output of a rank, and the guarded memory that has the output."""
        mine, length = self.inputs[rank], self.lengths[rank]
        if mine is None or length is None or self.in_place is None:
            out = None if length is None else Output(length, self.dtype)
            src = None if mine is None else Buffer(mine.copy(), self.dtype)
            return src, None if out is None else out.buffer, out
        start = self.in_place[rank]
        out = Output(max(len(mine), length), self.dtype)
        src = out.buffer if len(mine) >= length else out.buffer.part(start, start + len(mine))
        dst = out.buffer if length >= len(mine) else out.buffer.part(start, start + length)
        src.array[:] = mine
        return src, dst, out


def check(call: Call) -> list[Schedule]:
    """Check the call's replay against the algorithms, and folds in rank order against a fold."""

    def body(backend: Backend) -> Schedule:
        assert isinstance(backend, Marked)
        rank, size = backend.rank, backend.size
        request = call.requests[rank]
        schedule = record(request, rank, size, call.dtype, call.elements)
        results = []
        for replays in (False, True):
            src, dst, out = call.arrays(rank)
            if request.operation == "broadcast":
                dst = src = src or dst
                if rank == request.root and src is not None:
                    src.array.flags.writeable = False
            if replays:
                schedule.run(backend, src, dst, Deadline(TIMEOUT))
            else:
                backend.plan(request)(src, dst, Deadline(TIMEOUT))
            if src is not None and call.in_place is None and src is not dst:
                np.testing.assert_array_equal(src.array, call.inputs[rank], "changed its input")
            if out is not None:
                out.checked()
            results.append(None if dst is None else dst.array.tobytes())
        gathered = sum(schedule.pieces) > 0
        if request.op is not None and results[1] is not None and (gathered or request.ordered):
            results[0] = in_rank_order(call, rank).tobytes()
        assert results[1] == results[0]
        return schedule

    return run(len(call.requests), body, Marked)


@np.errstate(all="ignore")
def in_rank_order(call: Call, rank: int) -> Array:
    """Return a rank's result of a reduction, folded in rank order."""
    size, request = len(call.requests), call.requests[rank]
    folded = rank + 1 if request.operation == "scan" else size
    values = []
    for other in range(folded):
        mine = call.inputs[other]
        assert mine is not None
        folding = Folding(call.requests[other].op, call.dtype, folded)
        values.append(folding.enter(Buffer(mine.copy(), call.dtype)))
    out, room = (Buffer.empty(values[0].count, call.dtype) for _ in "ab")
    folding.in_order(values, room, out)
    folding.leave(out)
    if request.operation != "reduce_scatter":
        return out.array
    limits = pieces.limits(request.elements)
    return out.array[limits[rank] : limits[rank + 1]]


# -- calls -----------------------------------------------------------------------------------------


def values(dtype: DType, count: int, rank: int, rng: np.random.Generator) -> Array:
    """Return random elements, whose sums depend on the order."""
    if dtype.kind == "b":
        return rng.integers(0, 2, count).astype(bool)
    if dtype.kind in "iu":
        return rng.integers(0, 100, count).astype(dtype.storage)
    numbers = rng.standard_normal(count) * (rng.random(count) < 0.9)  # zeros are false
    if dtype.name == "bfloat16":
        return arithmetic.float32_to_bfloat16(numbers.astype(np.float32))
    if dtype.kind == "c":
        return (numbers + 1j * rng.standard_normal(count)).astype(dtype.storage)
    return numbers.astype(dtype.storage)


def operator(name: str, rank: int) -> ReduceOp:
    if name == "compose":
        return COMPOSE
    return premul_sum(0.5 + rank / 3) if name == "premul_sum" else as_op(name)


def reduction(
    operation: str,
    name: str,
    dtype: DType,
    counts: list[int],
    rng: np.random.Generator,
    *,
    ordered: bool = False,
    root: int = 0,
    in_place: bool = False,
) -> Call:
    """Return a reduction of ``sum(counts)`` elements of each rank."""
    size, count = len(counts), sum(counts)
    scatters, rooted = operation == "reduce_scatter", operation == "reduce"
    requests = [
        Request(
            operation, dtype, (count,), op=operator(name, rank), ordered=ordered,
            root=root if rooted else None, elements=counts if scatters else None,
        )
        for rank in range(size)
    ]  # fmt: skip
    inputs = [
        maps(count, rank) if name == "compose" else values(dtype, count, rank, rng)
        for rank in range(size)
    ]
    lengths = [
        counts[rank] if scatters else None if rooted and rank != root else count
        for rank in range(size)
    ]
    starts = pieces.limits(counts)[:-1] if scatters else [0] * size
    return Call(requests, dtype, count, inputs, lengths, starts if in_place else None)


def move(
    operation: str,
    dtype: DType,
    counts: list[int],
    rng: np.random.Generator,
    *,
    root: int = 0,
    in_place: bool = False,
    alike: bool = True,
) -> Call:
    """Return an operation that moves pieces of ``counts`` elements.

    An ``all_to_all`` that is not ``alike`` cuts another array on each rank.
    """
    size, total = len(counts), sum(counts)
    ranks, starts = range(size), pieces.limits(counts)[:-1]
    options: dict[str, Any] = {"root": root}
    every: Sequence[int | None] = counts
    if operation == "broadcast":
        ins: Sequence[int | None] = [total if rank == root else None for rank in ranks]
        outs: Sequence[int | None] = [None if rank == root else total for rank in ranks]
    elif operation == "scatter":
        ins, outs = [total if rank == root else None for rank in ranks], every
    elif operation == "gather":
        ins, outs = every, [total if rank == root else None for rank in ranks]
    elif operation == "all_gather":
        ins, outs, options = every, [total] * size, {}
    else:
        table = [[n if alike else (n + i) % 5 for n in counts] for i in ranks]
        requests = [
            Request(
                operation, dtype, (total,) if alike else None, alike=alike, elements=row,
                incoming=[table[other][rank] for other in ranks],
            )
            for rank, row in enumerate(table)
        ]  # fmt: skip
        inputs = [values(dtype, sum(row), rank, rng) for rank, row in enumerate(table)]
        lengths = [sum(request.incoming) for request in requests]
        return Call(requests, dtype, total, inputs, lengths)
    request = Request(operation, dtype, (total,), elements=counts, **options)
    arrays = [None if n is None else values(dtype, n, rank, rng) for rank, n in enumerate(ins)]
    return Call([request] * size, dtype, total, arrays, outs, starts if in_place else None)


@contextlib.contextmanager
def lengths_of(regime: str) -> Iterator[None]:
    """Choose the algorithms of short calls, or those of long calls with few rounds or few bytes."""
    if regime == "short":
        yield
        return
    with in_regime(regime), mock.patch.object(schedules, "SHORT_BYTES", 0):
        yield


regimes = pytest.mark.parametrize("regime", ["short", "rounds", "bytes"])
sizes = pytest.mark.parametrize("size", [1, 2, 3, in_whole(4), in_whole(5), in_whole(6)])


def uneven(size: int, count: int) -> list[int]:
    """Return lengths around ``count``; that of rank 1 is 0."""
    return [max(0, count + 2 * rank - 3) * (rank != 1) for rank in range(size)]


@regimes
@sizes
@pytest.mark.parametrize(
    ("operation", "name", "dtype"),
    [
        (operation, *fold)
        for operation in ("all_reduce", "reduce", "reduce_scatter", "scan")
        for fold in FOLDS
        if (operation, fold[0]) != ("scan", "avg")  # a scan has no mean
    ],
)
def test_replayed_reduction_has_bits_of_algorithms(
    operation: str, name: str, dtype: str, size: int, regime: str
) -> None:
    rng = np.random.default_rng(size)
    with lengths_of(regime):
        for count, ordered, in_place in CASES:
            call = reduction(
                operation, name, BY_NAME[dtype], uneven(size, count), rng, ordered=ordered,
                root=size - 1, in_place=in_place,
            )  # fmt: skip
            check(call)


@regimes
@sizes
@pytest.mark.parametrize(
    "operation", ["broadcast", "scatter", "gather", "all_gather", "all_to_all"]
)
def test_replayed_move_has_bits_of_algorithms(operation: str, size: int, regime: str) -> None:
    rng = np.random.default_rng(size)
    with lengths_of(regime):
        for count in (0, 1, 33):
            for root in {0, size // 2, size - 1}:
                for option in (False, True):
                    counts, dtype = uneven(size, count), BY_NAME["float8_e5m2" if root else "int16"]
                    if operation == "all_to_all":
                        check(move(operation, UINT8, counts, rng, alike=option))
                    else:
                        check(move(operation, dtype, counts, rng, root=root, in_place=option))


@pytest.mark.parametrize("operation", ["all_reduce", "reduce", "reduce_scatter", "scan"])
@pytest.mark.parametrize("ordered", [False, True], ids=["any_order", "ordered"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_replayed_reduction_of_any_length_has_bits_of_algorithms(
    operation: str, ordered: bool, size: int
) -> None:
    rng = np.random.default_rng(size)
    for count in (1 << 8, 1 << 12, 1 << 16, (1 << 19) + 3):
        counts = pieces.even(count, size)
        check(reduction(operation, "avg" if operation != "scan" else "sum", FLOAT32, counts, rng,
                        ordered=ordered, root=1))  # fmt: skip


@pytest.mark.parametrize(
    "operation", ["broadcast", "scatter", "gather", "all_gather", "all_to_all"]
)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_replayed_move_of_any_length_has_bits_of_algorithms(operation: str, size: int) -> None:
    rng = np.random.default_rng(size)
    for count in (1 << 8, 1 << 12, 1 << 16, (1 << 20) + 3):
        check(move(operation, FLOAT32, pieces.even(count, size), rng, root=1))


@pytest.mark.parametrize("seed", [*range(4), *map(in_whole, range(4, 20))])
def test_random_calls_one_after_the_other_have_bits_of_algorithms(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(15):
        size = int(rng.integers(1, 7))
        counts = rng.integers(0, int(rng.choice([3, 50, 2000, 20000])), size).tolist()
        root, flags = int(rng.integers(size)), rng.integers(0, 2, 3).astype(bool).tolist()
        with lengths_of(
            str(rng.choice(["short", "rounds", "bytes"])) if max(counts) < 99 else "short"
        ):
            if flags[0]:
                name, dtype = FOLDS[rng.integers(len(FOLDS))]
                kinds = ["all_reduce", "reduce", "reduce_scatter"] + ["scan"] * (name != "avg")
                call = reduction(
                    str(rng.choice(kinds)), name, BY_NAME[dtype], counts, rng, ordered=flags[1],
                    root=root, in_place=flags[2],
                )  # fmt: skip
            else:
                operation = str(rng.choice(["broadcast", "scatter", "gather", "all_gather",
                                            "all_to_all"]))  # fmt: skip
                call = move(operation, FLOAT32, counts, rng, root=root, in_place=flags[1],
                            alike=flags[2])  # fmt: skip
            check(call)


@sizes
def test_replayed_barrier_returns_after_last_rank_has_entered(size: int) -> None:
    inside: list[int] = []

    def body(backend: Backend) -> int:
        assert isinstance(backend, Marked)
        inside.append(backend.rank)
        barrier = record(Request("barrier"), backend.rank, size)
        barrier.run(backend, None, None, Deadline(TIMEOUT))
        return len(inside)

    assert run(size, body, Marked) == [size] * size


def test_fold_that_is_not_associative_is_in_rank_order_if_ordered() -> None:
    for size in (2, 3, 5):
        for count in (7, 1 << 14, 1 << 17):
            inputs = [np.arange(count, dtype=np.int64) * (rank + 1) for rank in range(size)]
            request = Request("all_reduce", INT64, (count,), op=SUBTRACT, ordered=True)
            check(Call([request] * size, INT64, count, inputs, [count] * size))


# -- calls that differ -----------------------------------------------------------------------------

LONG = 1 << 18
DIFFERENT = {
    "operation": (Request("all_reduce", FLOAT32, (9,), op=SUM), Request("barrier")),
    "operator": (
        Request("all_reduce", FLOAT32, (9,), op=SUM),
        Request("all_reduce", FLOAT32, (9,), op=as_op("max")),
    ),
    "length": (
        Request("all_reduce", FLOAT32, (9,), op=SUM),
        Request("all_reduce", FLOAT32, (800,), op=SUM),
    ),
    "short and long": (
        Request("all_reduce", FLOAT32, (9,), op=SUM),
        Request("all_reduce", FLOAT32, (LONG,), op=SUM),
    ),
    "root": (
        Request("broadcast", FLOAT32, (9,), root=0),
        Request("broadcast", FLOAT32, (9,), root=1),
    ),
    "both long": (
        Request("broadcast", FLOAT32, (LONG,), root=0),
        Request("all_reduce", FLOAT32, (LONG,), op=SUM),
    ),
}


@pytest.mark.parametrize("size", [2, 3, in_whole(4), in_whole(5), in_whole(6)])
@pytest.mark.parametrize("name", DIFFERENT)
def test_different_calls_give_every_rank_all_headers_and_change_nothing(
    name: str, size: int
) -> None:
    for odd in range(size):
        usual, unusual = DIFFERENT[name]
        calls = [unusual if rank == odd else usual for rank in range(size)]

        def body(backend: Backend, calls: list[Request] = calls) -> list[str]:
            assert isinstance(backend, Marked)
            request = calls[backend.rank]
            src, dst = (Buffer(np.full(LONG, value, np.float32), FLOAT32) for value in (1, 2))
            with pytest.raises(Disagreement) as caught:
                record(request, backend.rank, size).run(backend, src, dst, Deadline(TIMEOUT))
            assert (dst.array == 2).all()
            # The transport is ready for the next call.
            x, total = Buffer(np.ones(3, np.int64), INT64), Buffer.empty(3, INT64)
            adding = Request("all_reduce", INT64, (3,), op=SUM)
            record(adding, backend.rank, size).run(backend, x, total, Deadline(TIMEOUT))
            assert (total.array == size).all()
            return [header["operation"] for header in caught.value.headers]

        expected = [request.operation for request in calls]
        assert run(size, body, Marked) == [expected] * size


# -- what is recorded ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_short_calls_are_over_after_the_comparison(size: int) -> None:
    rounds = (size - 1).bit_length()

    def body(backend: Backend) -> tuple[int, int]:
        assert isinstance(backend, Marked)
        x, y = Buffer(np.ones(9, np.float32), FLOAT32), Buffer.empty(9, FLOAT32)
        request = Request("all_reduce", FLOAT32, (9,), op=SUM)
        record(request, backend.rank, size).run(backend, x, y, Deadline(TIMEOUT))
        assert (y.array == size).all()
        return backend.frames

    assert run(size, body, Marked) == [(rounds, 0)] * size


@pytest.mark.parametrize(
    ("operation", "size", "longest"),
    [
        ("all_reduce", 2, 64 << 10),
        ("all_reduce", 4, 32 << 10),
        ("all_gather", 4, 128 << 10),
        ("broadcast", 4, 64 << 10),
    ],
)
def test_calls_are_short_up_to_limits(operation: str, size: int, longest: int) -> None:
    op = SUM if operation == "all_reduce" else None
    for nbytes in (longest, longest + size):
        request = Request(
            operation, UINT8, (nbytes,), op=op, root=0, elements=pieces.even(nbytes, size)
        )
        for rank in range(size):
            schedule = record(request, rank, size)
            exchanges = [step for step in schedule.steps if step.kind == EXCHANGE]
            assert bool(exchanges) == (nbytes > longest)
            assert (sum(schedule.pieces) > 0) == (nbytes == longest)


@pytest.mark.parametrize(("operation", "parts"), [("all_reduce", 2), ("reduce", 1)])
def test_long_reductions_of_two_ranks_fold_in_chunks(operation: str, parts: int) -> None:
    count = parts * (3 * pieces.CHUNK_BYTES // 4 + 1)
    request = Request(operation, FLOAT32, (count,), op=SUM, root=0)
    schedule = record(request, 0, 2)
    folds = [step.nleft for step in schedule.steps if step.kind == FOLD]
    assert folds == [pieces.CHUNK_BYTES] * 3 + [4]
    assert schedule.scratch <= 2 * pieces.CHUNK_BYTES


def test_recording_takes_no_memory_for_arrays() -> None:
    count = 1 << 45
    gather = Request("gather", FLOAT32, (count,), root=0, elements=[count] * 2)
    schedule = record(gather, 0, 2)
    assert [step.kind for step in schedule.steps] == [COPY, EXCHANGE]
    assert schedule.steps[1].out == 1 << 56 | 4 * count
    assert (schedule.nsrc, schedule.ndst, schedule.scratch) == (4 * count, 8 * count, 0)


def test_wire_has_eight_numbers_of_64_bits_a_step() -> None:
    mean = record(Request("all_reduce", FLOAT32, (3,), op=as_op("avg")), 1, 2)
    wire = mean.wire()
    assert wire is not None
    scratch, result = 2 << 56, 1 << 56
    # The own piece comes first in scratch memory. The lower rank is on the left.
    assert [*struct.iter_unpack("<8q", wire)] == [
        (FOLD, -1, -1, scratch + 12, scratch, result, 12, 0),
        (DIVIDE, -1, -1, 0, 0, result, 12, 2),
    ]
    assert (mean.pieces, mean.start, mean.scratch, mean.fold) == ([12, 12], 0, 24, "sum")
    assert record(Request("all_reduce", INT64, (3,), op=COMPOSE), 0, 2).wire() is None
    assert record(Request("all_reduce", INT64, (3,), op=COMPOSE), 0, 1).wire() is not None


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_to_all", "scatter"])
def test_two_ranks_send_each_other_only_part_for_peer(operation: str) -> None:
    op = SUM if operation == "reduce_scatter" else None
    request = Request(
        operation, FLOAT32, (9,), op=op, elements=[4, 5], incoming=[4, 4], root=0, alike=True
    )
    schedule = record(request, 0, 2)
    assert schedule.start == 16
    assert schedule.pieces == ([20, 0] if operation == "scatter" else [20, 16])

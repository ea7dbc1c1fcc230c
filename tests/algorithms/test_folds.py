"""The default algorithms that fold, over a transport that has only send and recv.

``tests.support.algorithm_cases`` has the regimes, the guards around outputs and the references.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collective.algorithms import arithmetic, costs, pieces
from collective.contract.backend import Backend
from collective.deadline import Deadline
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME, DType
from collective.ops import ReduceOp, as_op, premul_sum
from collective.request import Request
from tests.support.algorithm_cases import (
    COMPOSE,
    FLOAT32,
    INT64,
    REGIMES,
    ROOTS,
    SUBTRACT,
    TIMEOUT,
    Array,
    Output,
    compose,
    in_regime,
    kinds,
    maps,
    orders,
    places,
    regimes,
    same,
    sample,
    sizes,
)
from tests.support.loopback import Loopback, Rendezvous, run


def fold_in_order(op: ReduceOp, dtype: DType, values: list[Array]) -> Array:
    """Fold with NumPy, one rank after the other, in rank order."""
    join = arithmetic.fold(op, dtype)

    def step(a: Array, b: Array) -> Array:
        out = np.empty_like(a)
        join(a, b, out=out)
        return out

    return functools.reduce(step, values)


def check_reduction(
    kind: type[Backend],
    operation: str,
    inputs: list[Array],
    dtype: DType,
    op: ReduceOp | Callable[[int], ReduceOp],
    expected: Array,
    *,
    ordered: bool = False,
    in_place: bool = False,
    root: int = 0,
    counts: list[int] | None = None,
    compare: Callable[[Array, Array], None] = same,
) -> None:
    """Check one reduction on every rank.

    Args:
        op: the operator, or a function from the rank to the rank's operator.
        expected: the total of all inputs; for ``reduce_scatter`` each rank's part is a slice of it.
    """
    size, count = len(inputs), len(inputs[0])
    parts = counts if counts is not None else pieces.even(count, size)
    limits = pieces.limits(parts)

    def body(backend: Backend) -> Array | None:
        rank = backend.rank
        mine = op(rank) if callable(op) else op
        start, stop = limits[rank], limits[rank + 1]
        out: Output | None = Output(count, dtype)
        src = Buffer(inputs[rank].copy(), dtype)
        if operation == "reduce" and rank != root:
            out = None
        if in_place and out is not None:
            out.buffer.array[:] = inputs[rank]
            src = out.buffer
        if operation == "reduce":
            reducing = Request(operation, op=mine, root=root, ordered=ordered)
            backend.plan(reducing)(src, None if out is None else out.buffer, Deadline(TIMEOUT))
        elif operation == "all_reduce":
            assert out is not None
            request = Request(operation, op=mine, ordered=ordered)
            backend.plan(request)(src, out.buffer, Deadline(TIMEOUT))
        else:
            if not in_place:
                out = Output(stop - start, dtype)
            assert out is not None
            dst = out.buffer.part(start, stop) if in_place else out.buffer
            request = Request(operation, op=mine, ordered=ordered, elements=parts)
            backend.plan(request)(src, dst, Deadline(TIMEOUT))
        if not in_place or out is None:
            np.testing.assert_array_equal(src.array, inputs[rank], "changed its input")
        if out is None:
            return None
        result = out.checked()
        return result[start:stop] if operation == "reduce_scatter" and in_place else result

    for rank, result in enumerate(run(size, body, kind)):
        if result is None:
            assert (operation, rank == root) == ("reduce", False)
        elif operation == "reduce_scatter":
            compare(result, expected[limits[rank] : limits[rank + 1]])
        else:
            compare(result, expected)


reductions = pytest.mark.parametrize("operation", ["reduce", "all_reduce", "reduce_scatter"])


@kinds
@regimes
@reductions
@orders
@places
@pytest.mark.parametrize("count", [1, 33])
@sizes
def test_fold_with_noncommutative_op_keeps_rank_order(
    kind: type[Backend],
    regime: str,
    operation: str,
    ordered: bool,
    in_place: bool,
    count: int,
    size: int,
) -> None:
    inputs = [maps(count, rank) for rank in range(size)]
    expected = functools.reduce(compose, inputs)
    with in_regime(regime):
        check_reduction(
            kind, operation, inputs, INT64, COMPOSE, expected,
            ordered=ordered, in_place=in_place, root=size - 1,
        )  # fmt: skip


@kinds
@regimes
@orders
@pytest.mark.parametrize("op", ["sum", "user"])
@pytest.mark.parametrize(("size", "root"), ROOTS)
def test_reduce_to_every_root_matches_numpy(
    kind: type[Backend], regime: str, ordered: bool, op: str, size: int, root: int
) -> None:
    inputs = [maps(33, rank) for rank in range(size)]
    operator, join = (as_op("sum"), np.add) if op == "sum" else (COMPOSE, compose)
    expected = functools.reduce(join, inputs)
    with in_regime(regime):
        check_reduction(
            kind, "reduce", inputs, INT64, operator, expected, ordered=ordered, root=root
        )


@kinds
@regimes
@reductions
@sizes
@pytest.mark.parametrize("op", [as_op("sum"), SUBTRACT], ids=["sum", "subtract"])
def test_ordered_fold_has_bits_of_sequential_fold(
    kind: type[Backend], regime: str, operation: str, size: int, op: ReduceOp
) -> None:
    rng = np.random.default_rng(5)
    inputs = [rng.standard_normal(101).astype(np.float32) for _ in range(size)]
    expected = fold_in_order(op, FLOAT32, inputs)
    with in_regime(regime):
        check_reduction(kind, operation, inputs, FLOAT32, op, expected, ordered=True)


@reductions
@pytest.mark.parametrize("size", [4, 16])
def test_ordered_fold_of_middle_length_has_bits_of_sequential_fold(
    operation: str, size: int
) -> None:
    rng = np.random.default_rng(6)
    inputs = [rng.standard_normal(101).astype(np.float32) for _ in range(size)]
    expected = fold_in_order(SUBTRACT, FLOAT32, inputs)
    with mock.patch.object(costs, "START_BYTES", 256):  # a rank's array has 404 bytes
        check_reduction(Rendezvous, operation, inputs, FLOAT32, SUBTRACT, expected, ordered=True)


def expected_of(name: str, dtype: DType, inputs: list[Array]) -> Array:
    """Return the average, or the sum with a factor for each rank, as float64 or complex128."""
    wide = [arithmetic.bfloat16_to_float32(x) if dtype.name == "bfloat16" else x for x in inputs]
    factors = [1 / len(inputs) if name == "avg" else 2.0**rank for rank in range(len(inputs))]
    kind = np.complex128 if dtype.kind == "c" else np.float64
    return np.sum([x.astype(kind) * factor for x, factor in zip(wide, factors)], axis=0)


def close(dtype: DType) -> Callable[[Array, Array], None]:
    def compare(result: Array, expected: Array) -> None:
        wide = arithmetic.bfloat16_to_float32(result) if dtype.name == "bfloat16" else result
        tolerance = {"bfloat16": 1e-2, "float16": 2e-3}.get(dtype.name, 1e-6)
        np.testing.assert_allclose(wide, expected, rtol=tolerance, atol=tolerance)

    return compare


@regimes
@reductions
@orders
@places
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("name", ["avg", "premul_sum"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "complex64"])
def test_reductions_apply_scaling_once(
    regime: str, operation: str, ordered: bool, in_place: bool, size: int, name: str, dtype: str
) -> None:
    kind = BY_NAME[dtype]

    def op(rank: int) -> ReduceOp:
        return premul_sum(2.0**rank) if name == "premul_sum" else as_op("avg")

    inputs = [sample(kind, 40, rank) for rank in range(size)]
    with in_regime(regime):
        check_reduction(
            Rendezvous, operation, inputs, kind, op, expected_of(name, kind, inputs),
            ordered=ordered, in_place=in_place, root=size // 2, compare=close(kind),
        )  # fmt: skip


@kinds
@regimes
@places
@pytest.mark.parametrize("count", [0, 33])
@sizes
@pytest.mark.parametrize("name", ["sum", "compose", "subtract", "premul_sum", "lor"])
def test_scan_matches_prefixes_of_numpy(
    kind: type[Backend], regime: str, in_place: bool, count: int, size: int, name: str
) -> None:
    ops = {"compose": COMPOSE, "subtract": SUBTRACT, "lor": as_op("lor")}
    dtype = BY_NAME["float64"] if name == "premul_sum" else INT64
    inputs = [maps(count, rank).astype(dtype.storage) for rank in range(size)]

    def body(backend: Backend) -> Array:
        rank = backend.rank
        out = Output(count, dtype)
        src = out.buffer if in_place else Buffer(inputs[rank].copy(), dtype)
        src.array[:] = inputs[rank]
        op = premul_sum(0.5**rank) if name == "premul_sum" else ops.get(name, as_op("sum"))
        backend.plan(Request("scan", op=op))(src, out.buffer, Deadline(TIMEOUT))
        if not in_place:
            same(src.array, inputs[rank])
        return out.checked()

    with in_regime(regime):
        results = run(size, body, kind)
    op = ops.get(name, as_op("sum"))
    scaled = [x * 0.5**r if name == "premul_sum" else x for r, x in enumerate(inputs)]
    prefixes = [fold_in_order(op, dtype, scaled[: rank + 1]) for rank in range(size)]
    if name == "lor":
        prefixes[0] = (prefixes[0] != 0).astype(np.int64)
    same(np.stack(results), np.stack(prefixes))


@reductions
@orders
def test_reductions_of_overflow_and_nan_emit_no_warnings(operation: str, ordered: bool) -> None:
    inputs = [
        np.array([3e38, np.inf, np.nan, 1.0] * 3, np.float32) * (-1) ** (r == 2) for r in range(3)
    ]
    with np.errstate(all="ignore"):
        expected = fold_in_order(as_op("sum"), FLOAT32, inputs)
    check_reduction(Loopback, operation, inputs, FLOAT32, as_op("sum"), expected, ordered=True)


@regimes
@orders
def test_all_reduce_gives_same_bits_on_all_ranks(regime: str, ordered: bool) -> None:
    def body(backend: Backend) -> bytes:
        x = np.random.default_rng(backend.rank).standard_normal(1001).astype(np.float32)
        dst = Buffer.empty(1001, FLOAT32)
        request = Request("all_reduce", op=as_op("sum"), ordered=ordered)
        backend.plan(request)(Buffer(x, FLOAT32), dst, Deadline(TIMEOUT))
        return dst.array.tobytes()

    with in_regime(regime):
        assert len(set(run(5, body))) == 1


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([Loopback, Rendezvous]),
    st.sampled_from(sorted(REGIMES)),
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.booleans(),
    st.booleans(),
)
def test_reduce_scatter_with_uneven_counts_matches_numpy(
    kind: type[Backend], regime: str, counts: list[int], ordered: bool, commutes: bool
) -> None:
    inputs = [maps(sum(counts), rank) for rank in range(len(counts))]
    op, join = (as_op("sum"), np.add) if commutes else (COMPOSE, compose)
    expected = functools.reduce(join, inputs)
    with in_regime(regime):
        check_reduction(
            kind, "reduce_scatter", inputs, INT64, op, expected, ordered=ordered, counts=counts
        )

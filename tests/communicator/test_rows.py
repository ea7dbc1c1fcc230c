"""Cutting an array into one piece for each rank, and joining the pieces."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collective.algorithms.pieces import check_counts, split_sizes
from collective.communicator.calls.views import Leaf, View
from collective.errors import AllocationError, MismatchError, ShapeError
from collective.memory import dtypes
from collective.memory.arrays import adapter_of
from collective.testing import run_ranks
from tests.support.selection import in_whole

pytestmark = pytest.mark.quick

SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple)


def rows_of(what: str, x: Any, axis: Any) -> Leaf:
    return Leaf(what, View(adapter_of(x), x, dtypes.from_numpy(x.dtype)), axis)


@given(st.integers(0, 40), st.integers(1, 9))
def test_split_sizes_match_numpy_array_split(length, size):
    sizes = split_sizes("scatter", length, size, None)
    assert sizes == [piece.size for piece in np.array_split(np.arange(length), size)]


@given(SHAPES, st.integers(-4, 3), st.integers(1, 5))
def test_rows_restore_pieces_of_array(shape, axis, size):
    if not -len(shape) <= axis < len(shape):
        axis = 0
    x = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    rows = rows_of("scatter", x, axis)
    assert rows.length == shape[axis]
    assert rows.shape_with(rows.length) == shape
    sizes = split_sizes("scatter", rows.length, size, None)
    for rank, expected in enumerate(np.array_split(x, size, axis)):
        flat = np.full(expected.size, -1)
        rows.restore(rows.piece(sizes, rank), flat, sizes[rank])
        np.testing.assert_array_equal(flat.reshape(expected.shape), expected)
        assert rows.shape_with(sizes[rank]) == expected.shape


def test_rows_of_first_axis_share_memory_of_contiguous_array():
    x = np.arange(12.0).reshape(4, 3)
    rows = rows_of("scatter", x, 0)
    assert np.shares_memory(rows.array, x)
    assert np.shares_memory(rows.piece([1, 3], 1), x)
    flat = np.empty(6)
    assert rows.target(flat) is flat
    assert rows.inner == 3


def test_rows_treat_array_without_dimensions_as_one_row():
    rows = rows_of("gather", np.array(5), 0)
    assert (rows.length, rows.inner, rows.axis) == (1, 1, 0)
    assert rows.shape_with(3) == (3,)
    assert rows.array.tolist() == [5]


@pytest.mark.parametrize("axis", [2, -3, 1.0, "0", None])
def test_rows_with_invalid_axis_raise_shape_error(axis):
    with pytest.raises(ShapeError, match=r"all_gather: no axis .* in an array of 2 dimensions"):
        rows_of("all_gather", np.zeros((2, 2)), axis)


@pytest.mark.parametrize("counts", [[2, 1], (2, 1), np.array([2, 1]), [2.0, 1], iter([2, 1])])
def test_split_sizes_accept_integers_of_any_class(counts):
    if not hasattr(counts, "__len__"):
        counts = list(counts)
    assert split_sizes("scatter", 3, 2, counts) == [2, 1]
    assert all(type(count) is int for count in check_counts("scatter", counts, 2))


@pytest.mark.parametrize(
    "counts", [[1], [1, 2, 0], [-1, 4], [1.5, 1.5], ["a", "b"], 3, [None, 3], []], ids=str
)
def test_split_sizes_with_invalid_counts_raise_shape_error(counts):
    with pytest.raises(ShapeError, match="one non-negative integer for each of 2 ranks"):
        split_sizes("scatter", 3, 2, counts)


def test_split_sizes_with_wrong_total_name_both_sums():
    with pytest.raises(ShapeError, match=r"counts \[2, 2\] add up to 4; the axis has 3"):
        split_sizes("scatter", 3, 2, [2, 2])


def _counts_on_one_rank(comm: Any) -> None:
    x, even = np.arange(4.0), [2, 2]
    comm.reduce_scatter(x, axis=-1)  # makes the plan of calls without counts
    with pytest.raises(MismatchError, match=r"rank 0: reduce_scatter\(float64\[4\], [^)]*counts"):
        comm.reduce_scatter(x, counts=even if comm.rank == 0 else None, axis=-1)


def test_reduce_scatter_with_counts_on_one_rank_raises_after_equal_calls() -> None:
    run_ranks(2, _counts_on_one_rank)


class _Kept:
    """Object whose collection a weak reference can observe."""


def _uneven(comm: Any, operation: str) -> bool:
    """Make a call with uneven lengths; return whether the caller's frame stays alive after it."""
    x = np.ones(2 + 2 * comm.rank, np.float32)
    calls = {
        "gather": lambda: comm.gather(x, root=0),
        "all_gather": lambda: comm.all_gather(x),
        "all_to_all": lambda: comm.all_to_all([x[:1], x[1:]]),
        "broadcast": lambda: comm.broadcast(None if comm.rank else x, root=0),
    }

    def caller() -> weakref.ref[_Kept]:
        local = _Kept()
        calls[operation]()
        return weakref.ref(local)

    gc.disable()  # otherwise the collector could free a cycle before the check
    try:
        return caller()() is not None
    finally:
        gc.enable()


@pytest.mark.parametrize("operation", ["gather", "all_gather", "all_to_all", "broadcast"])
def test_uneven_call_does_not_keep_frame_alive(operation: str) -> None:
    assert run_ranks(2, _uneven, operation, backend="shm") == [False, False]


def _attempt(call: Any) -> str:
    try:
        return str(call())
    except ShapeError as error:
        return str(error)


def _more_rows_than_an_array_has(comm: Any) -> list[str]:
    # Together the two ranks have 2^63 rows of no elements.
    x, root_only = np.zeros((1 << 62, 0), np.int8), np.zeros((0, 1 << 62), np.int8)
    calls = [
        lambda: comm.all_gather(x), lambda: comm.gather(x, root=1),
        lambda: comm.all_gather(x, counts=[1 << 62] * 2), lambda: comm.all_gather([x, x]),
        lambda: comm.all_gather(root_only, axis=1),
    ]  # fmt: skip
    # The ranks refuse each call before they have sent anything, so the next call is right.
    return [_attempt(call) + str(comm.all_reduce(1)) for call in calls]


@pytest.mark.parametrize("backend", ["threads", "shm", in_whole("gloo")])
def test_more_rows_than_an_array_can_have_are_refused_on_all_ranks(backend: str) -> None:
    for texts in run_ranks(2, _more_rows_than_an_array_has, backend=backend):
        assert len(texts) == 5
        assert all("would have 9223372036854775808 rows" in text for text in texts), texts
        assert all(text.endswith("2") for text in texts)


def _most_rows(comm: Any) -> list[Any]:
    x = np.zeros((1 << 62, 0), np.int8)
    return [comm.all_to_all(x).shape, comm.all_reduce(x).shape, comm.reduce_scatter(x).shape]


@pytest.mark.parametrize("backend", ["threads", "shm"])
def test_array_of_most_rows_and_no_elements_travels(backend: str) -> None:
    for shapes in run_ranks(2, _most_rows, backend=backend):
        assert shapes == [(1 << 62, 0), (1 << 62, 0), (1 << 61, 0)]


def test_memory_of_more_bytes_than_a_word_counts_is_refused() -> None:
    def empty(comm: Any) -> None:
        with pytest.raises(AllocationError, match="36893488147419103232 bytes"):
            comm.empty((1 << 62, 8), "int8")

    run_ranks(2, empty)

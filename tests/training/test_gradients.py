"""The gradient engine on NumPy arrays, without a framework."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import collective
from collective.testing import run_ranks
from collective.training.gradients import Gradients, Parameter
from tests.support.on_ranks import on_ranks, ranks_of

pytestmark = pytest.mark.quick

_DTYPES = ["float32", "float64", "float16"]
two = ranks_of(("threads", 2))


def parameters_of(shapes: list[tuple[tuple[int, ...], str]]) -> list[Parameter]:
    return [Parameter(f"p{i}", shape, dtype) for i, (shape, dtype) in enumerate(shapes)]


# -- layout ---------------------------------------------------------------------------------------

_shapes = st.lists(
    st.tuples(st.lists(st.integers(0, 7), max_size=3).map(tuple), st.sampled_from(_DTYPES)),
    max_size=12,
)


# A former defect: with two dtypes the second bucket got the size limit of the first bucket.
@example(
    shapes=[((), dtype) for dtype in ("float32", "float32", "float64", "float64", "float32")],
    first=128, limit=1, data=None,
)  # fmt: skip
@settings(max_examples=80, deadline=None)
@given(shapes=_shapes, first=st.integers(1, 400), limit=st.integers(1, 2000), data=st.data())
def test_buckets_contain_each_gradient_once_within_limits(
    shapes: Any, first: int, limit: int, data: Any
) -> None:
    """Check that each gradient has memory of its own in one bucket, in any order of arrival."""
    with collective.init("threads") as comm:
        engine = Gradients(
            comm, parameters_of(shapes), like="numpy", first_bytes=first, bucket_bytes=limit
        )
        values = [np.full(shape, i + 1, dtype) for i, (shape, dtype) in enumerate(shapes)]
        numbers = range(len(shapes))
        orders = [numbers, numbers]
        if data is not None:
            orders = [data.draw(st.permutations(numbers)) for _ in orders]
        for order in orders:
            for number in order:
                assert engine.views[number].shape == shapes[number][0]
                engine.views[number][...] = values[number]
            for number in order:
                engine.ready(number)
            engine.finish()
            for view, value in zip(engine.views, values, strict=True):
                np.testing.assert_array_equal(view, value)
            members = [number for bucket in engine.buckets for number in bucket.members]
            assert sorted(members) == list(range(len(shapes)))
        for bucket in engine.buckets:
            assert len({shapes[number][1] for number in bucket.members}) == 1
            total = sum(-(-engine.views[n].nbytes // 64) * 64 for n in bucket.members)
            assert bucket.array.nbytes == total
            filled = [view for view in bucket.views if view.size]
            allowed = limit if bucket.index else min(first, limit)
            assert total <= allowed or len(filled) == 1
            assert all(np.shares_memory(v, bucket.array) for v in bucket.views if v.size)
            used = sum(int((bucket.array == n + 1).sum()) for n in bucket.members)
            assert used == sum(engine.views[n].size for n in bucket.members)


# -- passes ---------------------------------------------------------------------------------------


@on_ranks("two")
def test_buckets_are_reduced_in_same_order_on_all_ranks(comm: Any) -> None:
    shapes = [((40,), "float32")] * 6
    launched: list[int] = []

    def reduce(bucket: Any) -> Any:
        launched.append(bucket.index)
        return engine.average(bucket)

    engine = Gradients(
        comm, parameters_of(shapes), like="numpy", first_bytes=1, bucket_bytes=1, reduce=reduce
    )
    for step in range(3):
        order = np.random.default_rng((step, comm.rank)).permutation(6)
        launched.clear()
        for number in order:
            engine.views[number][...] = comm.rank + number
            engine.ready(int(number))
        assert engine.begun
        engine.finish()
        assert not engine.begun
        assert launched == list(range(6))
        for number, view in enumerate(engine.views):
            assert (view == number + 0.5).all()


@on_ranks("two")
def test_buckets_follow_order_of_rank_0_after_first_pass(comm: Any) -> None:
    engine = Gradients(
        comm, parameters_of([((3,), "float64")] * 3), like="numpy", first_bytes=1, bucket_bytes=1
    )
    moves: list[int] = []
    engine.moved = lambda: moves.append(1)
    for number in (2, 0, 1) if comm.rank == 0 else (0, 1, 2):
        engine.views[number][...] = number
        engine.ready(number)
    engine.finish()
    assert [bucket.members for bucket in engine.buckets] == [[2], [0], [1]]
    assert [view.tolist() for view in engine.views] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
    assert moves == [1]
    for number in (0, 1, 2):
        engine.ready(number)
    engine.finish()
    assert moves == [1]


@on_ranks("two")
def test_missing_or_repeated_gradients_raise_gradient_error(comm: Any) -> None:
    engine = Gradients(comm, parameters_of([((3,), "float32")] * 14), like="numpy")
    engine.ready(1)
    with pytest.raises(collective.GradientError, match="p1 was ready twice"):
        engine.ready(1)
    assert engine.missing() == [0, *range(2, 14)]
    with pytest.raises(collective.GradientError, match=r"p0, p2, .*p10 and 3 more \[rank"):
        engine.finish()
    for _ in range(2):  # the engine is usable after the errors
        for number in range(14):
            engine.views[number][...] = comm.rank
            engine.ready(number)
        engine.finish()
        assert all((view == 0.5).all() for view in engine.views)


@pytest.mark.parametrize("name", ["bucket_bytes", "first_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_gradients_with_bad_limit_raise_invalid_argument(name: str, value: Any) -> None:
    with (
        collective.init("threads") as comm,
        pytest.raises(collective.InvalidArgumentError, match=name),
    ):
        Gradients(comm, [], like="numpy", **{name: value})


@on_ranks("two")
def test_failed_reduction_ends_pass(comm: Any) -> None:
    def reduce(bucket: Any) -> Any:
        raise ValueError("cannot")

    engine = Gradients(comm, parameters_of([((3,), "float32")]), like="numpy", reduce=reduce)
    engine.ready(0)
    with pytest.raises(ValueError, match="cannot"):
        engine.finish()
    assert not engine.begun


@pytest.mark.parametrize(("cores", "buckets"), [(4, 2), (3, 1)])
def test_first_bucket_is_separate_if_ranks_have_idle_cores(
    cores: int, buckets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))

    def count(comm: Any) -> int:
        two = parameters_of([((1 << 18,), "float32")] * 2)
        return len(Gradients(comm, two).buckets)

    assert run_ranks(2, count) == [buckets] * 2


def test_first_bucket_is_separate_if_bound_ranks_have_two_cores_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cores of a rank are its own, and the number of all cores counts."""
    own = threading.get_native_id
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2 * own(), 2 * own() + 1})

    def count(comm: Any) -> int:
        return len(Gradients(comm, parameters_of([((1 << 18,), "float32")] * 2)).buckets)

    assert run_ranks(2, count) == [2, 2]

"""Prepared calls: ``comm.plan(operation, …)``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import collective
from collective import Communicator
from collective.errors import (
    CommunicatorClosedError,
    InvalidArgumentError,
    MismatchError,
    ShapeError,
)
from tests.on_ranks import on_ranks, ranks_of

pair, each = ranks_of(("threads", 2)), ranks_of(("threads", 2), ("shm", 2))

CALLS: dict[str, dict[str, Any]] = {
    "all_reduce": {"op": "max"},
    "reduce": {"root": 1},
    "reduce_scatter": {},
    "scan": {},
    "broadcast": {"root": 1},
    "gather": {"root": 0},
    "all_gather": {},
    "scatter": {"root": 1},
    "all_to_all": {},
}
TURNS = 3


def numbers(rank: int, turn: int) -> np.ndarray[Any, Any]:
    return np.arange(8.0) * (rank + 1) + 100 * turn


@pytest.mark.parametrize("operation", CALLS)
@on_ranks("each")
def test_it_does_what_the_call_does_on_what_is_there_by_then(
    comm: Communicator, operation: str
) -> None:
    x = numbers(comm.rank, 0)
    step = comm.plan(operation, x, **CALLS[operation])
    for turn in range(TURNS):
        x[:] = numbers(comm.rank, turn)
        planned = step()
        plain = getattr(comm, operation)(numbers(comm.rank, turn), **CALLS[operation])
        np.testing.assert_array_equal(planned, plain)


@on_ranks("pair")
def test_ranks_with_and_without_a_plan_meet(comm: Communicator) -> None:
    x = np.ones(3)
    step = comm.plan("all_reduce", x, out=x)
    for _ in range(TURNS):
        if comm.rank:
            comm.all_reduce(x, out=x)
        else:
            assert step() is x
    comm.plan("barrier")()
    assert x.tolist() == [2.0**TURNS] * 3


@on_ranks("pair")
def test_in_the_background_it_has_its_turn(comm: Communicator) -> None:
    x, y = np.full(2, comm.rank + 1.0), np.empty(2)
    step = comm.plan("all_reduce", x, out=y)
    first = step(async_op=True)
    second = step(async_op=True)
    assert first.wait() is y
    assert second.wait() is y
    assert y.tolist() == [3.0, 3.0]


@on_ranks("pair")
def test_planning_sends_nothing_and_differences_are_found_by_the_call(comm: Communicator) -> None:
    step = comm.plan("all_reduce", np.ones(2 + comm.rank))
    with pytest.raises(MismatchError, match=r"float64\[2\]"):
        step()


X = np.ones(4)
REFUSED: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    (("all_reduce", {"a": X}), {}, "of a structure; one array"),
    (("all_reduce", np.ones((4, 4))[:, ::2]), {}, "x has strides"),
    (("all_gathers", X), {}, "operation 'all_gathers'; one of all_reduce"),
    (("all_reduce", X), {"out": X[::-1]}, "out has strides"),
    (("all_reduce", X), {"async_op": True}, "given when the call is made"),
    (("all_reduce", X[:2]), {"out": X[1:3]}, "out overlaps x"),
    (("all_gather", np.ones((2, 2))), {"axis": 1}, "axis 1; the first one"),
    *(
        (("all_reduce", number), {"op": "max"}, f"x is the number {number}; an array")
        for number in (3, 2.5, True, np.float32(3))
    ),
]


@pytest.mark.parametrize(("arguments", "options", "says"), REFUSED)
def test_what_would_be_of_one_moment_is_refused(arguments: Any, options: Any, says: str) -> None:
    with collective.init() as comm, pytest.raises(InvalidArgumentError, match=says):
        comm.plan(*arguments, **options)


def test_a_tensor_that_is_looked_at_through_a_copy_is_refused() -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(3, dtype=torch.complex64).conj()
    with collective.init() as comm, pytest.raises(InvalidArgumentError, match="x has no memory"):
        comm.plan("all_reduce", x)


def test_an_array_of_no_dimensions_is_one() -> None:
    with collective.init() as comm:
        assert comm.plan("all_reduce", np.array(3), op="max")() == 3


@on_ranks("pair")
def test_a_closed_communicator_says_so(comm: Communicator) -> None:
    mine = comm.dup()
    step = mine.plan("all_reduce", np.ones(2))
    mine.close()
    with pytest.raises(CommunicatorClosedError, match="all_reduce"):
        step()


@pytest.mark.parametrize("counts", [3, [[1], [2]], ["a", "b"]])
@on_ranks("pair")
def test_lengths_that_are_none_are_refused_in_words(comm: Communicator, counts: Any) -> None:
    with pytest.raises(ShapeError, match="one non-negative integer for each of 2 ranks"):
        comm.all_gather(np.ones(2), counts=counts)

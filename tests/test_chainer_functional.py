"""Chainer's differentiable collectives: derivatives of all ranks' results by all ranks' inputs.

The rows of the Jacobian come from backward passes, each from one element of one rank's result;
its columns from central differences, one element of one rank's input moved at a time.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import numpy as np
import pytest

# First, as it is what makes Chainer's import work.
C = pytest.importorskip("collective.adapters.chainer.functional")

import chainer  # noqa: E402
import chainer.functions as F  # noqa: E402

from collective import ANY_SOURCE  # noqa: E402
from collective.errors import (  # noqa: E402
    DtypeError,
    InvalidArgumentError,
    RankError,
    ShapeError,
)
from collective.testing import run_ranks  # noqa: E402
from collective.training import differentiable  # noqa: E402
from tests.shm_ranks import shm  # noqa: E402, F401

OPS = ("sum", "avg", "prod", "min", "max")
STEP = 1e-6
Variable = chainer.Variable


def ring(comm: Any, x: Any) -> Any:
    if comm.size == 1:
        return x * x
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.rank == 0:
        sent = C.send(x * x, after, comm, tag=3)
        return C.recv(comm, before, tag=3, after=sent)
    got = C.recv(comm, before, tag=3, after=x)
    return got + C.send(x * x, after, comm, tag=3)


def pipeline(comm: Any, x: Any) -> Any:
    got = x if comm.rank == 0 else C.recv(comm, comm.rank - 1, after=x) * x
    return got if comm.rank == comm.size - 1 else C.send(got, comm.rank + 1, comm)


def at_the_root_only(function: Any, comm: Any, x: Any) -> Any:
    root = comm.size - 1
    return x + F.sum(function(x if comm.rank == root else None, comm, root))


def two_in_a_row(comm: Any, x: Any) -> Any:
    total = C.all_reduce(x * x, comm)
    return C.reduce_scatter(C.all_gather(total * x, comm, axis=1), comm, "avg")


def in_different_orders(comm: Any, x: Any) -> Any:
    parts = [
        C.all_reduce(x * x, comm),
        F.sin(C.broadcast(x, comm)),
        F.broadcast_to(F.sum(C.all_gather(x, comm)), x.shape),
    ]
    a, b, c = parts if comm.rank % 2 else parts[::-1]
    return a + b + c


def square(comm: Any) -> tuple[int, ...]:
    return (2, 2)


def uneven(comm: Any) -> tuple[int, ...]:
    return (comm.rank if comm.size > 1 else 1, 2)


def wide(comm: Any) -> tuple[int, ...]:
    return (2, comm.rank + 1)


CASES: dict[str, tuple[Any, Any]] = {
    **{f"all_reduce {op}": (square, lambda c, x, op=op: C.all_reduce(x, c, op)) for op in OPS},
    **{f"reduce {op}": (square, lambda c, x, op=op: C.reduce(x, c, c.size - 1, op)) for op in OPS},
    **{
        f"reduce_scatter {op}": (
            lambda c: (2, 4),
            lambda c, x, op=op: C.reduce_scatter(x, c, op, 1),
        )
        for op in OPS
    },
    "all_reduce of 0-d": (lambda c: (), lambda c, x: C.all_reduce(x, c, "max") * x),
    "reduce_scatter of 0-d": (lambda c: (), lambda c, x: C.reduce_scatter(x, c, "prod")),
    "reduce_scatter counts": (
        lambda c: (2, 5),
        lambda c, x: C.reduce_scatter(x, c, "max", -1, counts=[5] + [0] * (c.size - 1)),
    ),
    "broadcast": (square, lambda c, x: C.broadcast(x, c, c.size - 1)),
    "all_gather": (uneven, lambda c, x: C.all_gather(x, c)),
    "all_gather axis 1": (wide, lambda c, x: C.all_gather(x, c, -1)),
    "all_gather counts": (
        uneven,
        lambda c, x: C.all_gather(x, c, counts=range(c.size) if c.size > 1 else [1]),
    ),
    "all_gather of 0-d": (lambda c: (), lambda c, x: C.all_gather(x, c)),
    "gather": (wide, lambda c, x: C.gather(x, c, c.size - 1, 1)),
    "scatter": (lambda c: (5,), lambda c, x: C.scatter(x, c, c.size - 1)),
    "scatter counts": (
        lambda c: (2, 3),
        lambda c, x: C.scatter(x, c, axis=1, counts=[0] * (c.size - 1) + [3]),
    ),
    "all_to_all": (lambda c: (5, 2), lambda c, x: C.all_to_all(x, c)),
    "all_to_all counts": (
        lambda c: (2, c.size + 2),
        lambda c, x: C.all_to_all(x, c, 1, counts=[3 if r == c.rank else 1 for r in range(c.size)]),
    ),
    "ring": (square, ring),
    "pipeline": (square, pipeline),
    "two in a row": (square, two_in_a_row),
    "in different orders": (square, in_different_orders),
}
FIRST_ONLY: dict[str, tuple[Any, Any]] = {
    # Differences of what Chainer has been told is zero would tell nothing of the second order.
    "prod with zeros": (square, lambda c, x: C.all_reduce(x, c, "prod")),
    "broadcast of None": (square, partial(at_the_root_only, C.broadcast)),
    "scatter of None": (square, partial(at_the_root_only, C.scatter)),
}


def drawn(rank: int, shape: Any) -> Any:
    return np.random.RandomState(rank).uniform(0.5, 1.5, shape)


def gradient(function: Any, comm: Any, x: Any) -> Any:
    """Return ``∂L/∂x`` for a loss of which no derivative up to the third vanishes."""
    loss = F.sum(function(comm, x) ** 3) + 0.1 * F.sum(x**3)
    return chainer.grad([loss], [x], enable_double_backprop=True)[0]


def case(comm: Any, name: str, order: int) -> tuple[Any, Any]:
    """Return a point, and the function whose derivative there is of that order."""
    shape, function = {**CASES, **FIRST_ONLY}[name]
    x = np.asarray(drawn(comm.rank, shape(comm)))
    if name == "prod with zeros":
        # One rank's first element, and all ranks' second.
        x[0, 0] *= comm.rank != 0
        x[0, 1] = 0
    for _ in range(order - 1):
        function = partial(gradient, function)
    return x, function


def jacobians(comm: Any, name: str, order: int) -> tuple[Any, Any]:
    """Return all results by all inputs, by backward passes and by differences."""
    x, function = case(comm, name, order)

    def value(x: Any) -> Any:
        return function(comm, Variable(np.array(x))).array.reshape(-1)

    rows = []
    for rank, length in enumerate(comm.all_gather_object(value(x).size)):
        for element in range(length):
            leaf = Variable(x.copy())
            y = function(comm, leaf)
            y.grad = np.zeros_like(y.array)
            if comm.rank == rank:
                y.grad.reshape(-1)[element] = 1
            y.backward()
            rows.append((np.zeros_like(x) if leaf.grad is None else leaf.grad).reshape(-1))
    columns = []
    for rank, length in enumerate(comm.all_gather_object(x.size)):
        for element in range(length):
            move = np.zeros_like(x)
            if comm.rank == rank:
                move.reshape(-1)[element] = STEP
            columns.append((value(x + move) - value(x - move)) / (2 * STEP))
    by_backward = comm.all_gather(np.stack(rows), axis=1)
    return by_backward, comm.all_gather(np.stack(columns, 1))


def check_one_direction(comm: Any, name: str, order: int) -> None:
    """Compare one derivative of one weighted sum of all results: a few calls instead of many."""
    x, function = case(comm, name, order)
    leaf = Variable(x.copy())
    y = function(comm, leaf)
    weights, direction = drawn(comm.rank + 10, y.shape), drawn(comm.rank + 20, x.shape)
    y.grad = np.asarray(weights)
    y.backward()
    assert leaf.grad is not None or x.size == 0 or name.endswith("None")
    along = 0.0 if leaf.grad is None else (leaf.grad * direction).sum()
    loss = [
        (function(comm, Variable(np.asarray(x + step * direction))).array * weights).sum()
        for step in (STEP, -STEP)
    ]
    sums = comm.all_reduce(np.array([along, (loss[0] - loss[1]) / (2 * STEP)]))
    np.testing.assert_allclose(sums[0], sums[1], 1e-5, 1e-5, err_msg=name)


def check_directions(comm: Any) -> None:
    for name in [*CASES, *FIRST_ONLY]:
        check_one_direction(comm, name, 1)
    for name in CASES:
        check_one_direction(comm, name, 2)


def check_jacobians(comm: Any, name: str, order: int) -> None:
    by_backward, by_differences = jacobians(comm, name, order)
    np.testing.assert_allclose(by_backward, by_differences, 1e-5, 1e-5, err_msg=name)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", [*CASES, *FIRST_ONLY])
def test_the_gradient_is_that_of_all_results_by_all_inputs(name: str, size: int) -> None:
    run_ranks(size, check_jacobians, name, 1)


@pytest.mark.parametrize("size", [2, 3])
def test_the_gradient_of_the_gradient_is_right_along_a_direction(size: int) -> None:
    run_ranks(size, check_directions)


@pytest.mark.parametrize(
    "name", ["all_reduce prod", "reduce max", "ring", "broadcast", "scatter", "all_gather"]
)
def test_the_gradient_of_the_gradient_is_right(name: str) -> None:
    run_ranks(2, check_jacobians, name, 2)


@pytest.mark.parametrize("name", ["all_reduce prod", "ring"])
def test_third_derivatives_are_right(name: str) -> None:
    run_ranks(2, check_jacobians, name, 3)


def test_first_and_second_derivatives_between_processes(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("shm")(2, check_directions)


def test_the_jacobian_shows_a_wrong_adjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    right = differentiable.reduce_scatter
    monkeypatch.setattr(differentiable, "reduce_scatter", lambda *given: 2 * right(*given))
    by_backward, by_differences = run_ranks(2, jacobians, "all_gather", 1)[0]
    assert not np.allclose(by_backward, by_differences)


def check_by_chainer(comm: Any, name: str, moved: int) -> None:
    """All ranks check at once, of which one is moved and the others see no change."""
    # Not within pytest: Chainer's tools for tests want markers of their own.
    gradient_check = importlib.import_module("chainer.gradient_check")
    shape, function = CASES[name]
    at = np.asarray(drawn(comm.rank, shape(comm)))

    def total(x: Any) -> Any:
        mine = x if comm.rank == moved else at + 0.0 * x
        return C.all_reduce(F.sum(function(comm, mine) ** 2), comm) * float(comm.rank == moved)

    close = {"dtype": np.float64, "atol": 1e-4, "rtol": 1e-4}
    gradient_check.check_backward(total, at, None, **close)
    gradient_check.check_double_backward(total, at, np.ones(()), np.ones_like(at), **close)


CHECKED = (
    "all_reduce avg",
    "reduce_scatter prod",
    "all_gather axis 1",
    "gather",
    "scatter",
    "ring",
)


def check_all_by_chainer(comm: Any) -> None:
    for name in CHECKED:
        for moved in range(comm.size):
            check_by_chainer(comm, name, moved)


@pytest.mark.parametrize("size", [2, 3])
def test_chainers_own_checks_agree(size: int, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("shm")(size, check_all_by_chainer)


# -- what a rank has to do for the others ---------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_ties_and_all_ops_are_as_chainer_has_them_on_stacked_arrays(op: str) -> None:
    rows = np.array([[1.0, 2.0, 0.0], [1.0, 3.0, 0.0], [0.5, 3.5, 4.0]])
    folds = {
        "sum": lambda x: F.sum(x, 0),
        "avg": lambda x: F.mean(x, 0),
        "prod": lambda x: F.prod(x, 0),
        "min": lambda x: F.min(x, 0),
        "max": lambda x: F.max(x, 0),
    }
    joined = Variable(rows.copy())
    F.sum(folds[op](joined) * np.array([6.0, 12.0, 18.0])).backward()
    expected = joined.grad
    if op in ("min", "max"):  # where several hold it, Chainer gives each all of it
        expected = expected / (rows == folds[op](rows).array).sum(0)

    def program(comm: Any) -> Any:
        x = Variable(rows[comm.rank].copy())
        F.sum(C.all_reduce(x, comm, op) * np.array([1.0, 2, 3]) * (comm.rank + 1)).backward()
        return x.grad

    np.testing.assert_allclose(np.stack(run_ranks(3, program)), expected)


def test_a_rank_whose_array_is_frozen_takes_part_in_the_others_backward() -> None:
    def program(comm: Any) -> Any:
        x = Variable(np.full((2,), comm.rank + 1.0), requires_grad=comm.rank == 0)
        x.cleargrad()
        for call in (C.all_reduce, C.all_gather, C.reduce, C.all_to_all, C.broadcast, C.gather):
            F.sum(call(x if comm.rank == 0 else x.array, comm) * (comm.rank + 1.0)).backward()
        return x.grad

    gradients = run_ranks(2, program, call_timeout=5)
    # all_reduce 1+2, all_gather 1+2, reduce 1, all_to_all (1, 2), broadcast 1+2, gather 1
    np.testing.assert_array_equal(gradients[0], [12, 13])
    assert gradients[1] is None


def test_off_the_root_and_for_the_sender_there_is_a_delegate_that_carries_the_graph() -> None:
    def program(comm: Any) -> Any:
        x = Variable(np.ones(3, np.float16))
        found = [C.reduce(x, comm), C.gather(x, comm)]
        found.append(C.send(x, 0, comm) if comm.rank else C.recv(comm, 1))
        return [(y.shape, y.dtype, y.requires_grad, y.creator is None) for y in found]

    delegate = ((), np.float16, True, False)
    root, other = run_ranks(2, program)
    assert other == [delegate] * 3
    assert [shape for shape, *_ in root] == [(3,), (6,), (3,)]


def test_without_gradients_nothing_is_recorded() -> None:
    def program(comm: Any) -> list[bool]:
        x = Variable(np.ones(2))
        with chainer.no_backprop_mode():
            found = [C.all_reduce(x, comm), C.all_reduce(x, comm, "max"), C.broadcast(x, comm)]
        found.append(C.all_reduce(np.arange(3), comm))
        found.append(C.all_gather(Variable(np.arange(3)), comm))
        return [y.creator is not None for y in found]

    assert run_ranks(2, program) == [[False] * 5] * 2


def test_results_are_new_arrays_even_at_the_root_and_alone() -> None:
    def program(comm: Any) -> None:
        x = Variable(np.ones(2))
        for call in (C.all_reduce, C.reduce, C.broadcast, C.all_gather, C.gather, C.scatter):
            call(x, comm).array[...] += 1
            assert (x.array == 1).all(), call

    run_ranks(1, program)
    run_ranks(2, program)


class Spy:
    """A communicator that notes what is called."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._comm, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            self.called.append(name)
            return found(*args, **options)

        return call


def test_backward_calls_run_in_the_reverse_order_of_creation_on_every_rank() -> None:
    def program(comm: Any) -> list[str]:
        spy: Any = Spy(comm)
        x = Variable(np.ones(4))
        a = C.all_reduce(x, spy)
        b = C.all_gather(x * 2, spy, counts=[4] * comm.size)
        c = C.scatter(x * 3, spy)
        d = C.all_to_all(b, spy, recv_counts=[4] * comm.size)
        # The same loss; the ranks come to it by different ways, and at different depths.
        parts = [F.sum(a), F.sum(b), F.sum(c * 1.0 * 1.0 * 1.0), F.sum(d)]
        loss = parts[2] + parts[0] + parts[3] + parts[1] if comm.rank else sum(parts)
        spy.called.clear()
        loss.backward()
        return spy.called

    expected = ["all_to_all", "gather", "reduce_scatter", "all_reduce"]
    assert run_ranks(2, program, call_timeout=5) == [expected] * 2


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_gradients_have_the_dtype_and_shape_of_the_input(dtype: Any) -> None:
    def program(comm: Any) -> Any:
        x = Variable(np.ones((3, 2), dtype).T)
        F.sum(C.all_gather(C.all_reduce(x, comm, "avg"), comm, 1) ** 2).backward()
        return x.grad

    for found in run_ranks(2, program):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, np.full((2, 3), 4, dtype))


def test_a_model_in_two_halves_learns_as_one_does() -> None:
    """The ranks hold one layer each, and the second computes the loss."""
    x = drawn(1, (8, 4)).astype(np.float32)
    layers = [chainer.links.Linear(4, 5), chainer.links.Linear(5, 1)]
    whole = chainer.Sequential(layers[0].copy(mode="copy"), F.tanh, layers[1].copy(mode="copy"))
    whole.cleargrads()
    F.sum(whole(x) ** 2).backward()
    expected = [whole[0].W.grad, whole[2].W.grad]

    def program(comm: Any) -> Any:
        mine = layers[comm.rank].copy(mode="copy")
        mine.cleargrads()
        if comm.rank == 0:
            C.send(F.tanh(mine(x)), 1, comm).backward()
        else:
            F.sum(mine(C.recv(comm, 0)) ** 2).backward()
        return mine.W.grad

    for found, wanted in zip(run_ranks(2, program), expected):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


# -- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (InvalidArgumentError, lambda c: C.all_reduce(1.0, c)),
        (InvalidArgumentError, lambda c: C.all_reduce([np.ones(2)], c)),
        (InvalidArgumentError, lambda c: C.all_reduce(np.ones(2), c, "bxor")),
        (InvalidArgumentError, lambda c: C.all_reduce(chainer.Parameter(name="W"), c)),
        (InvalidArgumentError, lambda c: C.broadcast(None, c, c.rank)),
        (InvalidArgumentError, lambda c: C.recv(c, 1 - c.rank, after=1)),
        (DtypeError, lambda c: C.all_reduce(np.arange(3), c, "avg")),
        (DtypeError, lambda c: C.all_reduce(np.ones(3, np.complex64), c)),
        (ShapeError, lambda c: C.all_gather(np.ones(2), c, 1)),
        (ShapeError, lambda c: C.reduce_scatter(np.ones(2), c, axis=2)),
        (ShapeError, lambda c: C.reduce_scatter(np.ones(2), c, counts=[1, 2])),
        (ShapeError, lambda c: C.all_to_all(np.ones(2), c, counts=[1])),
        (RankError, lambda c: C.send(np.ones(2), c.rank, c)),
        (RankError, lambda c: C.recv(c, ANY_SOURCE)),
        (RankError, lambda c: C.reduce(np.ones(2), c, 2)),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_sent(error: Any, call: Any) -> None:
    def program(comm: Any) -> Any:
        with pytest.raises(error):
            call(comm)
        return float(C.all_reduce(np.ones(()), comm).array)

    assert run_ranks(2, program, call_timeout=5) == [2, 2]

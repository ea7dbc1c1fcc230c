"""Chainer's differentiable collectives."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

# This import must come first: it makes Chainer importable.
C = pytest.importorskip("collective.adapters.chainer.functional")

import chainer  # noqa: E402
import chainer.functions as F  # noqa: E402

from collective import ANY_SOURCE  # noqa: E402
from collective.errors import DtypeError, InvalidArgumentError, RankError, ShapeError  # noqa: E402
from collective.testing import run_ranks  # noqa: E402
from collective.training import differentiable  # noqa: E402
from tests.support.chainer_ranks import on  # noqa: E402
from tests.support.derivatives import CASES, FIRST_ONLY, OPS, Spy, Tape, drawn  # noqa: E402

Variable = chainer.Variable


class Chainer(Tape):
    """Chainer's graph as a tape."""

    calls = C

    def variable(self, x: Any) -> Any:
        return Variable(np.array(x))

    def array(self, y: Any) -> Any:
        return y.array

    def total(self, y: Any) -> Any:
        return F.sum(y)

    def sine(self, y: Any) -> Any:
        return F.sin(y)

    def spread(self, y: Any, shape: Any) -> Any:
        return F.broadcast_to(y, shape)

    def backward(self, y: Any, seed: Any) -> None:
        y.grad = seed
        y.backward()

    def derivative(self, loss: Any, x: Any) -> Any:
        return chainer.grad([loss], [x], enable_double_backprop=True)[0]


TAPE = Chainer()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", [*CASES, *FIRST_ONLY])
def test_collective_jacobian_equals_finite_differences(name: str, size: int) -> None:
    run_ranks(size, TAPE.check_jacobians, name, 1)


@on("threads-2", "threads-3", "shm-2")
def test_collective_second_derivative_along_direction_is_right(comm: Any) -> None:
    TAPE.check_directions(comm)


@pytest.mark.parametrize(
    "name", ["all_reduce prod", "reduce max", "ring", "broadcast", "scatter", "all_gather"]
)
def test_collective_second_derivative_equals_finite_differences(name: str) -> None:
    run_ranks(2, TAPE.check_jacobians, name, 2)


@pytest.mark.parametrize("name", ["all_reduce prod", "ring"])
def test_collective_third_derivative_equals_finite_differences(name: str) -> None:
    run_ranks(2, TAPE.check_jacobians, name, 3)


def test_jacobian_check_detects_wrong_adjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = differentiable.Differentiable
    right = kind.reduce_scatter
    monkeypatch.setattr(kind, "reduce_scatter", lambda *args, **kwds: 2 * right(*args, **kwds))
    by_backward, by_differences = run_ranks(2, TAPE.jacobians, "all_gather", 1)[0]
    assert not np.allclose(by_backward, by_differences)


def check_by_chainer(comm: Any, name: str, moved: int) -> None:
    """Run Chainer's gradient checks on all ranks at once, while only rank ``moved`` is perturbed.

    The other ranks' arrays do not change.
    """
    # Only the ranks' processes import this: under pytest, Chainer's test tools require markers.
    gradient_check = importlib.import_module("chainer.gradient_check")
    at, function = TAPE.case(comm, name, 1)

    def total(x: Any) -> Any:
        mine = x if comm.rank == moved else at + 0.0 * x
        return C.all_reduce(F.sum(function(comm, mine) ** 2), comm) * float(comm.rank == moved)

    close = {"dtype": np.float64, "atol": 1e-4, "rtol": 1e-4}
    gradient_check.check_backward(total, at, None, **close)
    gradient_check.check_double_backward(total, at, np.ones(()), np.ones_like(at), **close)


CHECKED = (
    "all_reduce avg", "reduce_scatter prod", "all_gather axis 1", "gather", "scatter", "ring"
)  # fmt: skip


@on("shm-2", "shm-3")
def test_chainer_gradient_check_accepts_collectives(comm: Any) -> None:
    for name in CHECKED:
        for moved in range(comm.size):
            check_by_chainer(comm, name, moved)


# -- backward passes on ranks that need no gradient -----------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_all_reduce_gradient_equals_chainer_on_stacked_arrays(op: str) -> None:
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
    if op in ("min", "max"):  # Chainer gives the whole gradient to each of several equal extrema
        expected = expected / (rows == folds[op](rows).array).sum(0)

    def program(comm: Any) -> Any:
        x = Variable(rows[comm.rank].copy())
        F.sum(C.all_reduce(x, comm, op) * np.array([1.0, 2, 3]) * (comm.rank + 1)).backward()
        return x.grad

    np.testing.assert_allclose(np.stack(run_ranks(3, program)), expected)


@on("threads-2")
def test_backward_with_frozen_array_on_rank_completes(comm: Any) -> None:
    x = Variable(np.full((2,), comm.rank + 1.0), requires_grad=comm.rank == 0)
    x.cleargrad()
    for call in (C.all_reduce, C.all_gather, C.reduce, C.all_to_all, C.broadcast, C.gather):
        F.sum(call(x if comm.rank == 0 else x.array, comm) * (comm.rank + 1.0)).backward()
    if comm.rank:
        assert x.grad is None
    else:
        # all_reduce 1+2, all_gather 1+2, reduce 1, all_to_all (1, 2), broadcast 1+2, gather 1
        assert x.grad.tolist() == [12, 13]


@on("threads-2")
def test_delegate_off_root_and_from_send_carries_graph(
    comm: Any,
) -> None:
    x = Variable(np.ones(3, np.float16))
    results = [C.reduce(x, comm), C.gather(x, comm)]
    results.append(C.send(x, 0, comm) if comm.rank else C.recv(comm, 1))
    assert [y.shape for y in results] == ([()] * 3 if comm.rank else [(3,), (6,), (3,)])
    assert {(y.dtype.name, y.requires_grad, y.creator is None) for y in results} == {
        ("float16", True, False)
    }


@on("threads-2")
def test_collective_without_gradients_records_no_graph(comm: Any) -> None:
    x = Variable(np.ones(2))
    with chainer.no_backprop_mode():
        results = [C.all_reduce(x, comm), C.all_reduce(x, comm, "max"), C.broadcast(x, comm)]
    results.append(C.all_reduce(np.arange(3), comm))
    results.append(C.all_gather(Variable(np.arange(3)), comm))
    assert [y.creator for y in results] == [None] * 5


@on("threads-1", "threads-2")
def test_collective_result_never_aliases_input(comm: Any) -> None:
    x = Variable(np.ones(2))
    for call in (C.all_reduce, C.reduce, C.broadcast, C.all_gather, C.gather, C.scatter):
        call(x, comm).array[...] += 1
        assert (x.array == 1).all(), call


@on("threads-2")
def test_backward_calls_run_in_reverse_order_on_every_rank(comm: Any) -> None:
    spy: Any = Spy(comm)
    x = Variable(np.ones(4))
    a = C.all_reduce(x, spy)
    b = C.all_gather(x * 2, spy, counts=[4] * comm.size)
    c = C.scatter(x * 3, spy)
    d = C.all_to_all(b, spy, recv_counts=[4] * comm.size)
    # The loss is the same, but the ranks add its parts in different orders and at different depths.
    parts = [F.sum(a), F.sum(b), F.sum(c * 1.0 * 1.0 * 1.0), F.sum(d)]
    loss = parts[2] + parts[0] + parts[3] + parts[1] if comm.rank else sum(parts)
    spy.called.clear()
    loss.backward()
    assert spy.called == ["all_to_all", "gather", "reduce_scatter", "all_reduce"]


@on("threads-2")
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_gradient_has_dtype_and_shape_of_input(comm: Any, dtype: Any) -> None:
    x = Variable(np.ones((3, 2), dtype).T)
    F.sum(C.all_gather(C.all_reduce(x, comm, "avg"), comm, 1) ** 2).backward()
    assert x.grad.dtype == dtype
    np.testing.assert_array_equal(x.grad, np.full((2, 3), 4, dtype))


def test_model_split_over_two_ranks_has_gradients_of_whole() -> None:
    """Each rank holds one layer, and the second rank computes the loss."""
    x = drawn(1, (8, 4)).astype(np.float32)
    layers = [chainer.links.Linear(4, 5), chainer.links.Linear(5, 1)]
    whole = chainer.Sequential(layers[0].copy(mode="copy"), F.tanh, layers[1].copy(mode="copy"))
    whole.cleargrads()
    F.sum(whole(x) ** 2).backward()
    expected = [whole[0].W.grad, whole[2].W.grad]

    def program(comm: Any) -> Any:
        layer = layers[comm.rank].copy(mode="copy")
        layer.cleargrads()
        if comm.rank == 0:
            C.send(F.tanh(layer(x)), 1, comm).backward()
        else:
            F.sum(layer(C.recv(comm, 0)) ** 2).backward()
        return layer.W.grad

    for gradient, reference in zip(run_ranks(2, program), expected):
        np.testing.assert_allclose(gradient, reference, rtol=1e-5)


# -- errors ---------------------------------------------------------------------------------


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
@on("threads-2")
def test_bad_arguments_raise_before_communication(comm: Any, error: Any, call: Any) -> None:
    with pytest.raises(error):
        call(comm)
    assert C.all_reduce(np.ones(()), comm).array == 2

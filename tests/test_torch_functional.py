"""Differentiable collectives: derivatives of the whole, of all ranks' results by all ranks' inputs.

The rows of the Jacobian come from backward passes, each from one element of one rank's result;
its columns from central differences, one element of one rank's input moved at a time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from collective import ANY_SOURCE  # noqa: E402
from collective.adapters.torch import functional as F  # noqa: E402
from collective.errors import (  # noqa: E402
    DtypeError,
    InvalidArgumentError,
    RankError,
    ShapeError,
)
from collective.testing import run_ranks  # noqa: E402
from collective.training import differentiable  # noqa: E402
from tests.gloo_ranks import gloo  # noqa: E402, F401
from tests.shm_ranks import shm  # noqa: E402, F401

OPS = ("sum", "avg", "prod", "min", "max")
STEP = 1e-6


def ring(comm: Any, x: Any) -> Any:
    if comm.size == 1:
        return x * x
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.rank == 0:
        sent = F.send(x * x, after, comm, tag=3)
        return F.recv(comm, before, tag=3, after=sent)
    got = F.recv(comm, before, tag=3, after=x)
    return got + F.send(x * x, after, comm, tag=3)


def pipeline(comm: Any, x: Any) -> Any:
    got = x if comm.rank == 0 else F.recv(comm, comm.rank - 1, after=x) * x
    return got if comm.rank == comm.size - 1 else F.send(got, comm.rank + 1, comm)


def at_the_root_only(function: Any, comm: Any, x: Any) -> Any:
    root = comm.size - 1
    return x + function(x if comm.rank == root else None, comm, root).sum()


def two_in_a_row(comm: Any, x: Any) -> Any:
    total = F.all_reduce(x * x, comm)
    return F.reduce_scatter(F.all_gather(total * x, comm, axis=1), comm, "avg")


def in_different_orders(comm: Any, x: Any) -> Any:
    parts = [F.all_reduce(x * x, comm), F.broadcast(x, comm).sin(), F.all_gather(x, comm).sum()]
    return sum(parts if comm.rank % 2 else parts[::-1])


def square(comm: Any) -> tuple[int, ...]:
    return (2, 2)


def low(comm: Any) -> tuple[int, ...]:
    return (2, 4)


def uneven(comm: Any) -> tuple[int, ...]:
    return (comm.rank if comm.size > 1 else 1, 2)


def wide(comm: Any) -> tuple[int, ...]:
    return (2, comm.rank + 1)


def zeros(comm: Any, x: Any) -> Any:
    """Put a zero in one rank's first element, and in all ranks' second."""
    kept = torch.ones_like(x)
    kept[0, 0] = float(comm.rank != 0)
    kept[0, 1] = 0
    return x * kept


CASES: dict[str, tuple[Any, Any]] = {
    **{f"all_reduce {op}": (square, lambda c, x, op=op: F.all_reduce(x, c, op)) for op in OPS},
    **{f"reduce {op}": (square, lambda c, x, op=op: F.reduce(x, c, c.size - 1, op)) for op in OPS},
    **{
        f"reduce_scatter {op}": (
            lambda c: (2, 4),
            lambda c, x, op=op: F.reduce_scatter(x, c, op, 1),
        )
        for op in OPS
    },
    "all_reduce of 0-d": (lambda c: (), lambda c, x: F.all_reduce(x, c, "max") * x),
    "reduce_scatter of 0-d": (lambda c: (), lambda c, x: F.reduce_scatter(x, c, "prod")),
    "reduce_scatter counts": (
        lambda c: (2, 5),
        lambda c, x: F.reduce_scatter(x, c, "max", -1, counts=[5] + [0] * (c.size - 1)),
    ),
    "broadcast": (square, lambda c, x: F.broadcast(x, c, c.size - 1)),
    "all_gather": (uneven, lambda c, x: F.all_gather(x, c)),
    "all_gather axis 1": (wide, lambda c, x: F.all_gather(x, c, -1)),
    "all_gather counts": (
        uneven,
        lambda c, x: F.all_gather(x, c, counts=range(c.size) if c.size > 1 else [1]),
    ),
    "all_gather of 0-d": (lambda c: (), lambda c, x: F.all_gather(x, c)),
    "gather": (wide, lambda c, x: F.gather(x, c, c.size - 1, 1)),
    "scatter": (lambda c: (5,), lambda c, x: F.scatter(x, c, c.size - 1)),
    "scatter counts": (
        lambda c: (2, 3),
        lambda c, x: F.scatter(x, c, axis=1, counts=[0] * (c.size - 1) + [3]),
    ),
    "all_to_all": (lambda c: (5, 2), lambda c, x: F.all_to_all(x, c)),
    "all_to_all counts": (
        lambda c: (2, c.size + 2),
        lambda c, x: F.all_to_all(x, c, 1, counts=[3 if r == c.rank else 1 for r in range(c.size)]),
    ),
    "ring": (square, ring),
    "pipeline": (square, pipeline),
    "two in a row": (square, two_in_a_row),
    "in different orders": (square, in_different_orders),
}
FIRST_ONLY: dict[str, tuple[Any, Any]] = {
    # Differences of what autograd has been told is zero would tell nothing of the second order.
    "prod with zeros": (square, lambda c, x: F.all_reduce(x, c, "prod")),
    "broadcast of None": (square, partial(at_the_root_only, F.broadcast)),
    "scatter of None": (square, partial(at_the_root_only, F.scatter)),
}


def gradient(function: Any, comm: Any, x: Any) -> Any:
    """Return ``∂L/∂x`` for a loss of which no derivative up to the third vanishes."""
    loss = (function(comm, x) ** 3).sum() + 0.1 * (x**3).sum()
    return torch.autograd.grad(loss, x, create_graph=True)[0]


def case(comm: Any, name: str, order: int) -> tuple[Any, Any]:
    """Return a point, and the function whose derivative there is of that order."""
    shape, function = {**CASES, **FIRST_ONLY}[name]
    generator = torch.Generator().manual_seed(comm.rank)
    x = torch.rand(shape(comm), generator=generator, dtype=torch.float64) + 0.5
    if name == "prod with zeros":
        x = zeros(comm, x)
    for _ in range(order - 1):
        function = partial(gradient, function)
    return x, function


def jacobians(comm: Any, name: str, order: int) -> tuple[Any, Any]:
    """Return all results by all inputs, by backward passes and by differences."""
    x, function = case(comm, name, order)

    def value(x: Any) -> Any:
        return function(comm, x.clone().requires_grad_()).detach().reshape(-1)

    rows = []
    for rank, length in enumerate(comm.all_gather_object(value(x).numel())):
        for element in range(length):
            leaf = x.clone().requires_grad_()
            y = function(comm, leaf)
            seed = torch.zeros_like(y)
            if comm.rank == rank:
                seed.view(-1)[element] = 1
            y.backward(seed)
            rows.append((torch.zeros_like(x) if leaf.grad is None else leaf.grad).reshape(-1))
    columns = []
    for rank, length in enumerate(comm.all_gather_object(x.numel())):
        for element in range(length):
            move = torch.zeros_like(x)
            if comm.rank == rank:
                move.view(-1)[element] = STEP
            columns.append((value(x + move) - value(x - move)) / (2 * STEP))
    by_backward = comm.all_gather(torch.stack(rows), axis=1)
    return by_backward, comm.all_gather(torch.stack(columns, 1))


def check_one_direction(comm: Any, name: str, order: int) -> None:
    """Compare one derivative of one weighted sum of all results: a few calls instead of many."""
    x, function = case(comm, name, order)
    generator = torch.Generator().manual_seed(comm.rank + 10)
    leaf = x.clone().requires_grad_()
    y = function(comm, leaf)
    weights = torch.rand(y.shape, generator=generator, dtype=torch.float64)
    direction = torch.rand(x.shape, generator=generator, dtype=torch.float64)
    y.backward(weights)
    assert leaf.grad is not None or x.numel() == 0 or name.endswith("None")
    along = torch.zeros(()) if leaf.grad is None else (leaf.grad * direction).sum()
    loss = []
    for step in (STEP, -STEP):
        moved = (x + step * direction).requires_grad_()
        loss.append((function(comm, moved).detach() * weights).sum())
    sums = comm.all_reduce(torch.stack([along.double(), (loss[0] - loss[1]) / (2 * STEP)]))
    np.testing.assert_allclose(sums[0], sums[1], 1e-5, 1e-5, err_msg=name)


def check_directions(comm: Any) -> None:
    for name in [*CASES, *FIRST_ONLY]:
        check_one_direction(comm, name, 1)
    for name in CASES:
        check_one_direction(comm, name, 2)


def check_jacobians(comm: Any, names: list[str], order: int) -> None:
    for name in names:
        by_backward, by_differences = jacobians(comm, name, order)
        np.testing.assert_allclose(by_backward, by_differences, 1e-5, 1e-5, err_msg=name)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", [*CASES, *FIRST_ONLY])
def test_the_gradient_is_that_of_all_results_by_all_inputs(name: str, size: int) -> None:
    run_ranks(size, check_jacobians, [name], 1)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_of_the_gradient_is_right_as_well(name: str, size: int) -> None:
    run_ranks(size, check_jacobians, [name], 2)


@pytest.mark.parametrize("name", ["all_reduce prod", "reduce prod", "ring", "broadcast"])
def test_third_derivatives_are_right(name: str) -> None:
    run_ranks(2, check_jacobians, [name], 3)


@pytest.mark.parametrize(("transport", "size"), [("shm", 2), ("gloo", 2)])
def test_first_and_second_derivatives_between_processes(
    transport: str, size: int, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(transport)(size, check_directions)


def test_the_jacobian_shows_a_wrong_adjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    right = differentiable.reduce_scatter
    monkeypatch.setattr(differentiable, "reduce_scatter", lambda *given: 2 * right(*given))
    by_backward, by_differences = run_ranks(2, jacobians, "all_gather", 1)[0]
    assert not np.allclose(by_backward, by_differences)


@pytest.mark.parametrize("name", CASES)
def test_alone_torchs_own_checks_agree(name: str) -> None:
    def check(comm: Any) -> None:
        shape, function = CASES[name]
        generator = torch.Generator().manual_seed(1)
        x = torch.rand(shape(comm), generator=generator, dtype=torch.float64, requires_grad=True)
        inputs = (x,)
        assert torch.autograd.gradcheck(partial(function, comm), inputs)
        assert torch.autograd.gradgradcheck(partial(function, comm), inputs)

    run_ranks(1, check)


# -- what a rank has to do for the others ---------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_ties_and_all_ops_are_as_torch_has_them_on_stacked_tensors(op: str) -> None:
    rows = torch.tensor([[1.0, 2.0, 0.0], [1.0, 3.0, 0.0], [0.5, 3.0, 4.0]])
    folds = {
        "sum": lambda x: x.sum(0),
        "avg": lambda x: x.mean(0),
        "prod": lambda x: x.prod(0),
        "min": lambda x: x.amin(0),
        "max": lambda x: x.amax(0),
    }
    joined = rows.clone().requires_grad_()
    (folds[op](joined) * torch.tensor([6.0, 12.0, 18.0])).sum().backward()

    def program(comm: Any) -> Any:
        x = rows[comm.rank].clone().requires_grad_()
        (F.all_reduce(x, comm, op) * torch.tensor([1.0, 2, 3]) * (comm.rank + 1)).sum().backward()
        return x.grad

    torch.testing.assert_close(torch.stack(run_ranks(3, program)), joined.grad)


def test_a_rank_whose_tensor_is_frozen_takes_part_in_the_others_backward() -> None:
    def program(comm: Any) -> Any:
        x = torch.full((2,), comm.rank + 1.0, requires_grad=comm.rank == 0)
        for call in (F.all_reduce, F.all_gather, F.reduce, F.all_to_all, F.broadcast, F.gather):
            (call(x, comm) * (comm.rank + 1)).sum().backward()
        return x.grad

    gradients = run_ranks(2, program, call_timeout=5)
    # all_reduce 1+2, all_gather 1+2, reduce 1, all_to_all (1, 2), broadcast 1+2, gather 1
    torch.testing.assert_close(gradients[0], torch.tensor([12.0, 13.0]))
    assert gradients[1] is None


def test_off_the_root_and_for_the_sender_there_is_a_delegate_that_carries_the_graph() -> None:
    def program(comm: Any) -> Any:
        x = torch.ones(3, dtype=torch.float16, requires_grad=True)
        found = [F.reduce(x, comm), F.gather(x, comm)]
        found.append(F.send(x, 0, comm) if comm.rank else F.recv(comm, 1))
        return [(y.shape, y.dtype, y.requires_grad, y.is_leaf) for y in found]

    delegate = ((), torch.float16, True, False)
    root, other = run_ranks(2, program)
    assert other == [delegate] * 3
    assert [shape for shape, *_ in root] == [(3,), (6,), (3,)]


def test_without_gradients_nothing_is_recorded() -> None:
    def program(comm: Any) -> list[bool]:
        x = torch.ones(2, requires_grad=True)
        with torch.no_grad():
            found = [F.all_reduce(x, comm), F.all_reduce(x, comm, "max"), F.broadcast(x, comm)]
        with torch.inference_mode():
            found.append(F.all_gather(x, comm))
        found.append(F.all_reduce(torch.arange(3), comm))
        found.append(F.all_gather(torch.arange(3), comm))
        return [y.requires_grad for y in found]

    assert run_ranks(2, program) == [[False] * 6] * 2


def test_results_are_new_tensors_even_at_the_root_and_alone() -> None:
    def program(comm: Any) -> None:
        x = torch.ones(2)
        for call in (F.all_reduce, F.reduce, F.broadcast, F.all_gather, F.gather, F.scatter):
            with torch.no_grad():
                call(x, comm).add_(1)
            assert torch.equal(x, torch.ones(2)), call

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
        x = torch.ones(4, requires_grad=True)
        a = F.all_reduce(x, spy)
        b = F.all_gather(x * 2, spy, counts=[4] * comm.size)
        c = F.scatter(x * 3, spy)
        d = F.all_to_all(b, spy, recv_counts=[4] * comm.size)
        # The same loss; the ranks come to it by different ways, and at different depths.
        parts = [a.sum(), b.sum(), (c * 1 * 1 * 1).sum(), d.sum()]
        loss = parts[2] + parts[0] + parts[3] + parts[1] if comm.rank else sum(parts)
        spy.called.clear()
        loss.backward()
        return spy.called

    expected = ["all_to_all", "gather", "reduce_scatter", "all_reduce"]
    assert run_ranks(2, program, call_timeout=5) == [expected] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_gradients_have_the_dtype_and_layout_of_the_input(dtype: Any) -> None:
    def program(comm: Any) -> Any:
        x = torch.ones(3, 2, dtype=dtype).t().requires_grad_()
        y = F.all_gather(F.all_reduce(x, comm, "avg"), comm, 1)
        (y.abs() ** 2).sum().backward()
        return x.grad

    for found in run_ranks(2, program):
        assert found.dtype == dtype
        torch.testing.assert_close(found, torch.full((2, 3), 4, dtype=dtype))


# -- what is refused ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (InvalidArgumentError, lambda c: F.all_reduce(np.ones(2), c)),
        (InvalidArgumentError, lambda c: F.all_reduce([torch.ones(2)], c)),
        (InvalidArgumentError, lambda c: F.all_reduce(torch.ones(2), c, "bxor")),
        (InvalidArgumentError, lambda c: F.broadcast(None, c, c.rank)),
        (InvalidArgumentError, lambda c: F.recv(c, 1 - c.rank, after=1)),
        (DtypeError, lambda c: F.all_reduce(torch.arange(3), c, "avg")),
        (ShapeError, lambda c: F.all_gather(torch.ones(2), c, 1)),
        (ShapeError, lambda c: F.reduce_scatter(torch.ones(2), c, axis=2)),
        (ShapeError, lambda c: F.reduce_scatter(torch.ones(2), c, counts=[1, 2])),
        (ShapeError, lambda c: F.all_to_all(torch.ones(2), c, counts=[1])),
        (RankError, lambda c: F.send(torch.ones(2), c.rank, c)),
        (RankError, lambda c: F.recv(c, ANY_SOURCE)),
        (RankError, lambda c: F.reduce(torch.ones(2), c, 2)),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_sent(error: Any, call: Any) -> None:
    def program(comm: Any) -> Any:
        with pytest.raises(error):
            call(comm)
        return F.all_reduce(torch.ones(()), comm).item()

    assert run_ranks(2, program, call_timeout=5) == [2, 2]

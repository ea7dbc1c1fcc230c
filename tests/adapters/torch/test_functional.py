"""Differentiable collectives of the PyTorch adapter."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from collective import ANY_SOURCE, NULL  # noqa: E402
from collective.adapters.torch import functional as F  # noqa: E402
from collective.errors import (  # noqa: E402
    DtypeError,
    InvalidArgumentError,
    RankError,
    ShapeError,
)
from collective.testing import run_ranks  # noqa: E402
from collective.training import differentiable  # noqa: E402
from tests.support.derivatives import CASES, FIRST_ONLY, OPS, Spy, Tape  # noqa: E402
from tests.support.on_ranks import on_ranks, ranks_of  # noqa: E402

pytestmark = pytest.mark.quick

two = ranks_of(("threads", 2))
three = ranks_of(("threads", 3))


class Torch(Tape):
    """PyTorch's autograd as a tape."""

    calls = F

    def variable(self, x: Any) -> Any:
        return torch.from_numpy(np.array(x)).requires_grad_()

    def array(self, y: Any) -> Any:
        return y.detach().numpy()

    def total(self, y: Any) -> Any:
        return y.sum()

    def sine(self, y: Any) -> Any:
        return y.sin()

    def spread(self, y: Any, shape: Any) -> Any:
        return y.expand(shape)

    def backward(self, y: Any, seed: Any) -> None:
        y.backward(torch.from_numpy(seed))

    def derivative(self, loss: Any, x: Any) -> Any:
        return torch.autograd.grad(loss, x, create_graph=True)[0]


TAPE = Torch()


# For one rank, torch's own gradcheck does this below.
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", [*CASES, *FIRST_ONLY])
def test_collective_jacobian_equals_finite_differences(name: str, size: int) -> None:
    run_ranks(size, TAPE.check_jacobians, name, 1)


@pytest.mark.parametrize("name", CASES)
def test_collective_second_derivative_equals_finite_differences(name: str) -> None:
    run_ranks(2, TAPE.check_jacobians, name, 2)


@on_ranks("three")
def test_collective_second_derivative_along_direction_is_right(comm: Any) -> None:
    TAPE.check_directions(comm)


@pytest.mark.parametrize("name", ["all_reduce prod", "reduce prod", "ring", "broadcast"])
def test_collective_third_derivative_equals_finite_differences(name: str) -> None:
    run_ranks(2, TAPE.check_jacobians, name, 3)


def test_jacobian_check_detects_wrong_adjoint(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = differentiable.Differentiable
    right = kind.reduce_scatter
    monkeypatch.setattr(kind, "reduce_scatter", lambda *args, **kwds: 2 * right(*args, **kwds))
    by_backward, by_differences = run_ranks(2, TAPE.jacobians, "all_gather", 1)[0]
    assert not np.allclose(by_backward, by_differences)


@pytest.mark.parametrize("name", CASES)
def test_torch_gradcheck_accepts_collectives_on_one_rank(name: str) -> None:
    def check(comm: Any) -> None:
        x, function = TAPE.case(comm, name, 1)
        inputs = (TAPE.variable(x),)
        assert torch.autograd.gradcheck(partial(function, comm), inputs)
        assert torch.autograd.gradgradcheck(partial(function, comm), inputs)

    run_ranks(1, check)


# -- backward passes on ranks that need no gradient -----------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_all_reduce_gradient_equals_torch_on_stacked_tensors(op: str) -> None:
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


@on_ranks("two", call_timeout=5)
def test_backward_with_frozen_tensor_on_rank_completes(comm: Any) -> None:
    x = torch.full((2,), comm.rank + 1.0, requires_grad=comm.rank == 0)
    for call in (F.all_reduce, F.all_gather, F.reduce, F.all_to_all, F.broadcast, F.gather):
        (call(x, comm) * (comm.rank + 1)).sum().backward()
    if comm.rank:
        assert x.grad is None
    else:
        # all_reduce 1+2, all_gather 1+2, reduce 1, all_to_all (1, 2), broadcast 1+2, gather 1
        assert x.grad.tolist() == [12, 13]


@on_ranks("two")
def test_delegate_off_root_and_from_send_carries_graph(
    comm: Any,
) -> None:
    x = torch.ones(3, dtype=torch.float16, requires_grad=True)
    results = [F.reduce(x, comm), F.gather(x, comm)]
    results.append(F.send(x, 0, comm) if comm.rank else F.recv(comm, 1))
    assert [tuple(y.shape) for y in results] == ([()] * 3 if comm.rank else [(3,), (6,), (3,)])
    assert {(y.dtype, y.requires_grad, y.is_leaf) for y in results} == {
        (torch.float16, True, False)
    }


@on_ranks("two")
def test_collective_without_gradients_records_no_graph(comm: Any) -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        results = [F.all_reduce(x, comm), F.all_reduce(x, comm, "max"), F.broadcast(x, comm)]
    with torch.inference_mode():
        results.append(F.all_gather(x, comm))
    results.append(F.all_reduce(torch.arange(3), comm))
    results.append(F.all_gather(torch.arange(3), comm))
    assert [y.requires_grad for y in results] == [False] * 6


def test_collective_result_never_aliases_input() -> None:
    def program(comm: Any) -> None:
        x = torch.ones(2)
        for call in (F.all_reduce, F.reduce, F.broadcast, F.all_gather, F.gather, F.scatter):
            with torch.no_grad():
                call(x, comm).add_(1)
            assert torch.equal(x, torch.ones(2)), call

    run_ranks(1, program)
    run_ranks(2, program)


@on_ranks("two", call_timeout=5)
def test_backward_calls_run_in_reverse_order_on_every_rank(comm: Any) -> None:
    spy: Any = Spy(comm)
    x = torch.ones(4, requires_grad=True)
    a = F.all_reduce(x, spy)
    b = F.all_gather(x * 2, spy, counts=[4] * comm.size)
    c = F.scatter(x * 3, spy)
    d = F.all_to_all(b, spy, recv_counts=[4] * comm.size)
    # The loss is the same, but the ranks add its parts in different orders and at different depths.
    parts = [a.sum(), b.sum(), (c * 1 * 1 * 1).sum(), d.sum()]
    loss = parts[2] + parts[0] + parts[3] + parts[1] if comm.rank else sum(parts)
    spy.called.clear()
    loss.backward()
    assert spy.called == ["all_to_all", "gather", "reduce_scatter", "all_reduce"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@on_ranks("two")
def test_gradient_has_dtype_and_shape_of_input(comm: Any, dtype: Any) -> None:
    x = torch.ones(3, 2, dtype=dtype).t().requires_grad_()
    y = F.all_gather(F.all_reduce(x, comm, "avg"), comm, 1)
    (y.abs() ** 2).sum().backward()
    assert x.grad.dtype == dtype
    torch.testing.assert_close(x.grad, torch.full((2, 3), 4, dtype=dtype))


# -- errors ---------------------------------------------------------------------------------


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
        (RankError, lambda c: F.recv(c, NULL)),
        (RankError, lambda c: F.send(torch.ones(2), NULL, c)),
        (RankError, lambda c: F.reduce(torch.ones(2), c, 2)),
    ],
)
@on_ranks("two", call_timeout=5)
def test_bad_arguments_raise_before_communication(comm: Any, error: Any, call: Any) -> None:
    with pytest.raises(error):
        call(comm)
    assert F.all_reduce(torch.ones(()), comm).item() == 2

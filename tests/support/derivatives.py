"""Derivatives of all ranks' results by all ranks' inputs, for any framework that differentiates.

Derive a class from :class:`Tape` for a framework, and call its checks on ranks. Each row of the
Jacobian comes from a backward pass, which starts at one element of one rank's result. Each column
comes from central differences, which move one element of one rank's input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

__all__ = ["CASES", "FIRST_ONLY", "OPS", "Spy", "Tape", "drawn"]

OPS = ("sum", "avg", "prod", "min", "max")
STEP = 1e-6

Array = np.ndarray[Any, Any]


class Tape:
    """A framework, and the differentiable collectives of its adapter.

    Attributes:
        calls: module with the collectives.
    """

    calls: Any

    def variable(self, x: Array) -> Any:
        """Return a copy of ``x`` as a variable, by which a result can be differentiated."""

    def array(self, y: Any) -> Array:
        """Return the values of a result."""

    def total(self, y: Any) -> Any:
        """Return the sum of all elements."""

    def sine(self, y: Any) -> Any:
        """Return the sine of each element."""
        raise NotImplementedError

    def spread(self, y: Any, shape: Any) -> Any:
        """Repeat a scalar in an array of ``shape``."""

    def backward(self, y: Any, seed: Array) -> None:
        """Make a backward pass from ``y``, whose gradient is ``seed``."""

    def derivative(self, loss: Any, x: Any) -> Any:
        """Return ``∂loss/∂x``, which can be differentiated again."""

    # -- functions and checks -------------------------------------------------------------------

    def gradient(self, function: Any, comm: Any, x: Any) -> Any:
        """Return ``∂L/∂x`` for a loss whose derivatives up to the third do not vanish."""
        loss = self.total(function(comm, x) ** 3) + 0.1 * self.total(x**3)
        return self.derivative(loss, x)

    def case(self, comm: Any, name: str, order: int) -> tuple[Array, Any]:
        """Return a point, and a function whose gradient there is the derivative of ``order``."""
        shape, calls = {**CASES, **FIRST_ONLY}[name]
        x = np.asarray(drawn(comm.rank, shape(comm)))
        if name == "prod with zeros":
            # The first element is zero on one rank, the second element on all ranks.
            x[0, 0] *= comm.rank != 0
            x[0, 1] = 0
        function = partial(calls, self)
        for _ in range(order - 1):
            function = partial(self.gradient, function)
        return x, function

    def jacobians(self, comm: Any, name: str, order: int) -> tuple[Array, Array]:
        """Return the Jacobian of all results by all inputs: from passes and from differences."""
        x, function = self.case(comm, name, order)

        def value(x: Array) -> Array:
            return self.array(function(comm, self.variable(x))).reshape(-1)

        rows = []
        for element in elements(comm, value(x).size):
            leaf = self.variable(x)
            y = function(comm, leaf)
            seed = np.zeros_like(self.array(y))
            if element is not None:
                seed.reshape(-1)[element] = 1
            self.backward(y, seed)
            rows.append(
                np.zeros(x.size) if leaf.grad is None else np.asarray(leaf.grad).reshape(-1)
            )
        columns = []
        for element in elements(comm, x.size):
            move = np.zeros_like(x)
            if element is not None:
                move.reshape(-1)[element] = STEP
            columns.append((value(x + move) - value(x - move)) / (2 * STEP))
        by_backward = comm.all_gather(np.stack(rows), axis=1)
        return by_backward, comm.all_gather(np.stack(columns, 1))

    def check_jacobians(self, comm: Any, name: str, order: int) -> None:
        """Check that the Jacobians of backward passes and of differences agree."""
        by_backward, by_differences = self.jacobians(comm, name, order)
        np.testing.assert_allclose(by_backward, by_differences, 1e-5, 1e-5, err_msg=name)

    def check_one_direction(self, comm: Any, name: str, order: int) -> None:
        """Check one derivative of one weighted sum of all results, which needs only a few calls."""
        x, function = self.case(comm, name, order)
        leaf = self.variable(x)
        y = function(comm, leaf)
        weights, direction = drawn(comm.rank + 10, y.shape), drawn(comm.rank + 20, x.shape)
        self.backward(y, np.asarray(weights))
        assert leaf.grad is not None or x.size == 0 or name.endswith("None")
        along = 0.0 if leaf.grad is None else (np.asarray(leaf.grad) * direction).sum()
        loss = [
            (self.array(function(comm, self.variable(x + step * direction))) * weights).sum()
            for step in (STEP, -STEP)
        ]
        sums = comm.all_reduce(np.array([along, (loss[0] - loss[1]) / (2 * STEP)]))
        np.testing.assert_allclose(sums[0], sums[1], 1e-5, 1e-5, err_msg=name)

    def check_directions(self, comm: Any) -> None:
        """Check one direction of every case, up to the second order where possible."""
        for name in [*CASES, *FIRST_ONLY]:
            self.check_one_direction(comm, name, 1)
        for name in CASES:
            self.check_one_direction(comm, name, 2)


def elements(comm: Any, size: int) -> Iterator[int | None]:
    """Yield for each element of every rank its number, if it is this rank's, or else None."""
    for rank, length in enumerate(comm.all_gather_object(size)):
        for element in range(length):
            yield element if comm.rank == rank else None


def drawn(rank: int, shape: Any) -> Any:
    """Return random numbers that depend only on ``rank``."""
    return np.random.RandomState(rank).uniform(0.5, 1.5, shape)


class Spy:
    """A communicator that records the names of its calls."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._comm, name)
        if not callable(attribute):
            return attribute

        def call(*args: Any, **options: Any) -> Any:
            self.called.append(name)
            return attribute(*args, **options)

        return call


# -- the cases --------------------------------------------------------------------------------


def ring(t: Tape, comm: Any, x: Any) -> Any:
    """Send to the next rank and receive from the previous rank."""
    if comm.size == 1:
        return x * x
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.rank == 0:
        sent = t.calls.send(x * x, after, comm, tag=3)
        return t.calls.recv(comm, before, tag=3, after=sent)
    got = t.calls.recv(comm, before, tag=3, after=x)
    return got + t.calls.send(x * x, after, comm, tag=3)


def pipeline(t: Tape, comm: Any, x: Any) -> Any:
    """Receive from the previous rank, multiply, and send to the next rank."""
    got = x if comm.rank == 0 else t.calls.recv(comm, comm.rank - 1, after=x) * x
    return got if comm.rank == comm.size - 1 else t.calls.send(got, comm.rank + 1, comm)


def at_the_root_only(call: str, t: Tape, comm: Any, x: Any) -> Any:
    """Make a call to which only the root passes an array."""
    root = comm.size - 1
    got = getattr(t.calls, call)(x if comm.rank == root else None, comm, root)
    return x + t.spread(t.total(got), x.shape)


def two_in_a_row(t: Tape, comm: Any, x: Any) -> Any:
    """Chain calls, each on the result of the one before."""
    total = t.calls.all_reduce(x * x, comm)
    return t.calls.reduce_scatter(t.calls.all_gather(total * x, comm, axis=1), comm, "avg")


def in_different_orders(t: Tape, comm: Any, x: Any) -> Any:
    """Add results of three calls, in an order that differs between even and odd ranks."""
    parts = [
        t.calls.all_reduce(x * x, comm),
        t.sine(t.calls.broadcast(x, comm)),
        t.spread(t.total(t.calls.all_gather(x, comm)), x.shape),
    ]
    a, b, c = parts if comm.rank % 2 else parts[::-1]
    return a + b + c


def square(comm: Any) -> tuple[int, ...]:
    """Return the shape of a small square."""
    return (2, 2)


def low(comm: Any) -> tuple[int, ...]:
    """Return a shape with more columns than rows."""
    return (2, 4)


def scalar(comm: Any) -> tuple[int, ...]:
    """Return the shape of a scalar."""
    return ()


def uneven(comm: Any) -> tuple[int, ...]:
    """Return a shape whose number of rows is the rank, so that rank 0 has no rows."""
    return (comm.rank if comm.size > 1 else 1, 2)


def wide(comm: Any) -> tuple[int, ...]:
    """Return a shape whose number of columns depends on the rank."""
    return (2, comm.rank + 1)


Case = tuple[Callable[[Any], tuple[int, ...]], Callable[[Tape, Any, Any], Any]]

#: Name -> the shape of a rank's input, and the function to differentiate.
CASES: dict[str, Case] = {
    **{
        f"all_reduce {op}": (square, lambda t, c, x, op=op: t.calls.all_reduce(x, c, op))
        for op in OPS
    },
    **{
        f"reduce {op}": (square, lambda t, c, x, op=op: t.calls.reduce(x, c, c.size - 1, op))
        for op in OPS
    },
    **{
        f"reduce_scatter {op}": (low, lambda t, c, x, op=op: t.calls.reduce_scatter(x, c, op, 1))
        for op in OPS
    },
    "all_reduce of 0-d": (scalar, lambda t, c, x: t.calls.all_reduce(x, c, "max") * x),
    "reduce_scatter of 0-d": (scalar, lambda t, c, x: t.calls.reduce_scatter(x, c, "prod")),
    "reduce_scatter counts": (
        lambda c: (2, 5),
        lambda t, c, x: t.calls.reduce_scatter(x, c, "max", -1, counts=[5] + [0] * (c.size - 1)),
    ),
    "broadcast": (square, lambda t, c, x: t.calls.broadcast(x, c, c.size - 1)),
    "all_gather": (uneven, lambda t, c, x: t.calls.all_gather(x, c)),
    "all_gather axis 1": (wide, lambda t, c, x: t.calls.all_gather(x, c, -1)),
    "all_gather counts": (
        uneven,
        lambda t, c, x: t.calls.all_gather(x, c, counts=range(c.size) if c.size > 1 else [1]),
    ),
    "all_gather of 0-d": (scalar, lambda t, c, x: t.calls.all_gather(x, c)),
    "gather": (wide, lambda t, c, x: t.calls.gather(x, c, c.size - 1, 1)),
    "scatter": (lambda c: (5,), lambda t, c, x: t.calls.scatter(x, c, c.size - 1)),
    "scatter counts": (
        lambda c: (2, 3),
        lambda t, c, x: t.calls.scatter(x, c, axis=1, counts=[0] * (c.size - 1) + [3]),
    ),
    "all_to_all": (lambda c: (5, 2), lambda t, c, x: t.calls.all_to_all(x, c)),
    "all_to_all counts": (
        lambda c: (2, c.size + 2),
        lambda t, c, x: t.calls.all_to_all(
            x, c, 1, counts=[3 if r == c.rank else 1 for r in range(c.size)]
        ),
    ),
    "ring": (square, ring),
    "pipeline": (square, pipeline),
    "two in a row": (square, two_in_a_row),
    "in different orders": (square, in_different_orders),
}
#: Cases for the first order only: in the second order the tape has a zero, and differences show
#: nothing.
FIRST_ONLY: dict[str, Case] = {
    "prod with zeros": (square, lambda t, c, x: t.calls.all_reduce(x, c, "prod")),
    "broadcast of None": (square, partial(at_the_root_only, "broadcast")),
    "scatter of None": (square, partial(at_the_root_only, "scatter")),
}

"""Differentiable collectives of every framework, built on the tape that the framework offers.

The adapters' ``functional`` modules are thin layers over these functions. Their docstrings say
what each function computes: shapes, gradients, errors. Every backward pass calls these same
functions, and so it is differentiable too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from collective.algorithms.pieces import split_sizes
from collective.communicator import NULL, Communicator
from collective.contract.backend import ANY_SOURCE
from collective.errors import InvalidArgumentError, RankError

__all__ = [
    "CollectiveStep", "Tape", "all_gather", "all_reduce", "all_to_all", "broadcast", "check_op",
    "gather", "recv", "reduce", "reduce_scatter", "scatter", "send",
]  # fmt: skip

#: Ops whose derivatives do not depend on the arrays, and ops whose derivatives do.
LINEAR, FOLDS = ("sum", "avg"), ("prod", "min", "max")

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


@dataclass(frozen=True)
class CollectiveStep:
    """One call, as a node of a framework's graph.

    Attributes:
        forward: function from array to array, or from array to None where there is no result.
        backward: function ``g -> gradient``, from and to values that the framework
            differentiates. Where the derivative depends on the arrays, the function is
            ``(g, x, y) -> gradient``, where ``y`` is an array.
        linked: whether some rank's result depends on this rank's ``x``. If not, backward returns
            a delegate.
        keeps: whether backward takes the arrays, so that they must be kept for it.
    """

    forward: Callable[[Any], Any]
    backward: Callable[..., Any]
    linked: bool = True
    keeps: bool = False


class Tape(Protocol[T_co]):
    """Operations that a framework offers: nodes of its graph, and the arithmetic of backwards."""

    def check(self, what: str, x: Any, op: str = "sum") -> None:
        """Refuse a value that is not the framework's, or that cannot be differentiated."""

    def record(self, step: CollectiveStep, x: Any, near: Any = None) -> T_co:
        """Run a step as a node of the graph; if ``x`` is None, ``near`` gives its kind."""

    def bare(self, x: Any) -> Any:
        """Return the array behind a differentiable value; return any other value unchanged."""

    def room(self, x: Any, shape: Sequence[int]) -> Callable[[], Any]:
        """Return a function that makes an array like ``x``, without keeping ``x`` alive.

        The array has the given shape, and the dtype and the device of ``x``.
        """

    def integers(self, x: Any) -> Callable[[Sequence[int]], Any]:
        """Return a function that makes integer arrays on ``x``'s device, without keeping ``x``."""

    def copy(self, array: Any) -> Any:
        """Return a copy of an array."""

    def stack(self, g: Any, array: Any) -> Any:
        """Join the differentiable ``g`` and an array along a new first axis."""

    def product_of_others(self, pieces: Any, rank: int) -> Any:
        """Multiply all pieces along the first axis except number ``rank``.

        A complex product is conjugated.
        """

    def equal(self, x: Any, y: Any) -> Any:
        """Compare two arrays elementwise; return ones and zeros of the dtype of ``y``."""


def check_op(what: str, op: str) -> None:
    """Refuse an op that has no derivative here.

    Raises:
        InvalidArgumentError: the op is in neither :data:`LINEAR` nor :data:`FOLDS`.
    """
    if op not in LINEAR + FOLDS:
        raise InvalidArgumentError(
            f"{what}: op {op!r} is not differentiable (expected one of "
            f"{', '.join(LINEAR + FOLDS)}). Use the communicator's own call for other ops, "
            "without a gradient."
        )


# -- folds ------------------------------------------------------------------------------------


def all_reduce(tape: Tape[T], x: Any, comm: Communicator, op: str) -> T:
    """Fold the ranks' arrays; the backward pass all-reduces."""
    tape.check("all_reduce", x, op)

    def forward(x: Any) -> Any:
        return comm.all_reduce(x, op=op)

    def adjoint(g: Any) -> Any:
        return all_reduce(tape, g, comm, op)

    def backward(g: Any, x: Any, y: Any) -> Any:
        return all_reduce(tape, g, comm, "sum") * _partial(tape, x, y, comm, op)

    if op in LINEAR:
        return tape.record(CollectiveStep(forward, adjoint), x)
    return tape.record(CollectiveStep(forward, backward, keeps=True), x)


def reduce(tape: Tape[T], x: Any, comm: Communicator, root: int, op: str) -> T:
    """Fold the ranks' arrays at ``root``; the backward pass broadcasts."""
    tape.check("reduce", x, op)
    room = tape.room(x, x.shape)

    def forward(x: Any) -> Any:
        return comm.reduce(x, root=root, op=op)

    def adjoint(g: Any) -> Any:
        spread = _spread(tape, g, comm, root, room)
        return spread / comm.size if op == "avg" else spread

    def backward(g: Any, x: Any, y: Any) -> Any:
        # Off the root, y is a delegate. The root sends the folded array with the gradient.
        both = tape.stack(g, y) if comm.rank == root else g
        both = _spread(tape, both, comm, root, tape.room(x, (2, *x.shape)))
        return both[0] * _partial(tape, x, tape.bare(both[1]), comm, op)

    if op in LINEAR:
        return tape.record(CollectiveStep(forward, adjoint), x)
    return tape.record(CollectiveStep(forward, backward, keeps=True), x)


def reduce_scatter(
    tape: Tape[T], x: Any, comm: Communicator, op: str, axis: int, counts: Sequence[int] | None
) -> T:
    """Fold the ranks' arrays and give each rank a piece; the backward pass all-gathers."""
    tape.check("reduce_scatter", x, op)
    sizes = split_sizes("reduce_scatter", _length(x, axis), comm.size, counts)

    def forward(x: Any) -> Any:
        return comm.reduce_scatter(x, op=op, axis=axis, counts=sizes)

    def adjoint(g: Any) -> Any:
        joined: Any = all_gather(tape, g, comm, axis, sizes)
        return joined / comm.size if op == "avg" else joined

    def backward(g: Any, x: Any, y: Any) -> Any:
        # Stacking adds a new first axis. A negative axis counts from the end, so it does not move.
        at = axis + 1 if axis >= 0 else axis
        both: Any = all_gather(tape, tape.stack(g, y), comm, at, sizes)
        folded = tape.bare(both[1]).reshape(x.shape)
        return both[0].reshape(x.shape) * _partial(tape, x, folded, comm, op)

    if op in LINEAR:
        return tape.record(CollectiveStep(forward, adjoint), x)
    return tape.record(CollectiveStep(forward, backward, keeps=True), x)


def _partial(tape: Tape[Any], x: Any, y: Any, comm: Communicator, op: str) -> Any:
    """Return ``∂y/∂x`` of this rank's ``x``, elementwise; ``y`` is the fold of all arrays."""
    if op == "prod":
        pieces = all_gather(tape, x.reshape((1, *x.shape)), comm, 0, [1] * comm.size)
        return tape.product_of_others(pieces, comm.rank)
        # Ranks that hold the same extreme share its derivative equally. This is one of the
        # subgradients, and it does not depend on the order of the ranks.
    holds = tape.equal(tape.bare(x), y)
    return holds / comm.all_reduce(holds)


# -- whole arrays and pieces --------------------------------------------------------------------


def broadcast(tape: Tape[T], x: Any, comm: Communicator, root: int, like: Any) -> T:
    """Give all ranks the root's array; the backward pass reduces."""
    if x is not None or comm.rank == root:
        tape.check("broadcast", x)
    return _broadcast(tape, x, comm, root, x, like)


def _broadcast(tape: Tape[T], template: Any, comm: Communicator, root: int, x: Any, like: Any) -> T:
    """Broadcast from the root.

    Off the root, ``template`` describes the array to receive, and ``x`` gets the zero gradient.
    """
    expected = None if comm.rank == root else tape.bare(template)
    near = tape.bare(like)

    def forward(x: Any) -> Any:
        if comm.rank == root:
            return tape.copy(comm.broadcast(x, root=root))
        return comm.broadcast(expected, root=root, like=near)

    def adjoint(g: Any) -> Any:
        return reduce(tape, g, comm, root, "sum")

    return tape.record(CollectiveStep(forward, adjoint, comm.rank == root), x, near)


def _spread(tape: Tape[Any], g: Any, comm: Communicator, root: int, room: Callable[[], Any]) -> Any:
    """Broadcast the root's ``g``; on other ranks fill ``room``.

    On other ranks ``g`` only ties the call to the graph. Because ``room`` gives shape and dtype,
    the root does not have to announce them, which would cost a message on some transports.
    """
    return _broadcast(tape, None if comm.rank == root else room(), comm, root, g, None)


def all_gather(
    tape: Tape[T], x: Any, comm: Communicator, axis: int, counts: Sequence[int] | None
) -> T:
    """Join the ranks' arrays at all ranks; the backward pass reduce-scatters."""
    tape.check("all_gather", x)
    lengths = _Lengths(tape, x, comm, axis, counts)

    def forward(x: Any) -> Any:
        return comm.all_gather(x, axis=axis, counts=counts)

    def adjoint(g: Any) -> Any:
        return reduce_scatter(tape, g, comm, "sum", axis, lengths())

    return tape.record(CollectiveStep(forward, adjoint), x)


def gather(
    tape: Tape[T], x: Any, comm: Communicator, root: int, axis: int, counts: Sequence[int] | None
) -> T:
    """Join the ranks' arrays at ``root``; the backward pass scatters."""
    tape.check("gather", x)
    lengths = _Lengths(tape, x, comm, axis, counts)

    def forward(x: Any) -> Any:
        return comm.gather(x, root=root, axis=axis, counts=counts)

    def adjoint(g: Any) -> Any:
        # Off the root, g only ties the scatter to the graph and names the device.
        return scatter(tape, g, comm, root, axis, lengths(), None)

    return tape.record(CollectiveStep(forward, adjoint), x)


def scatter(
    tape: Tape[T],
    x: Any,
    comm: Communicator,
    root: int,
    axis: int,
    counts: Sequence[int] | None,
    like: Any,
) -> T:
    """Give each rank a piece of the root's array; the backward pass gathers."""
    if x is not None or comm.rank == root:
        tape.check("scatter", x)
    near = tape.bare(like)

    def forward(x: Any) -> Any:
        source = x if comm.rank == root else None
        return comm.scatter(
            source, root=root, counts=counts, axis=axis, like=near if x is None else x
        )

    def adjoint(g: Any) -> Any:
        return gather(tape, g, comm, root, axis, None)

    return tape.record(CollectiveStep(forward, adjoint, comm.rank == root), x, near)


def all_to_all(
    tape: Tape[T],
    x: Any,
    comm: Communicator,
    axis: int,
    counts: Sequence[int] | None,
    recv_counts: Sequence[int] | None,
) -> T:
    """Exchange pieces; the backward pass returns them."""
    tape.check("all_to_all", x)
    sends = split_sizes("all_to_all", _length(x, axis), comm.size, counts)
    receives = [] if recv_counts is None else list(recv_counts)
    integers = tape.integers(x)

    def forward(x: Any) -> Any:
        return comm.all_to_all(x, counts=sends, axis=axis)

    def adjoint(g: Any) -> Any:
        if not receives:
            receives.extend(comm.all_to_all(integers(sends)).tolist())
        return all_to_all(tape, g, comm, axis, receives, sends)

    return tape.record(CollectiveStep(forward, adjoint), x)


class _Lengths:
    """Lengths of all ranks' arrays along an axis, exchanged when they are first needed."""

    def __init__(
        self, tape: Tape[Any], x: Any, comm: Communicator, axis: int, known: Sequence[int] | None
    ) -> None:
        self._shape, self._axis, self._comm = (x.shape or (1,)), axis, comm
        self._integers = tape.integers(x)
        self._known = None if known is None else list(known)

    def __call__(self) -> list[int]:
        if self._known is None:
            length: Any = self._integers([self._shape[self._axis]])
            self._known = self._comm.all_gather(length, counts=[1] * self._comm.size).tolist()
        return self._known


def _length(x: Any, axis: int) -> int:
    """Return the length of an axis; 0 for an axis that does not exist, which the call refuses."""
    shape = tuple(x.shape) or (1,)
    return shape[axis] if -len(shape) <= axis < len(shape) else 0


# -- messages -----------------------------------------------------------------------------------


def send(tape: Tape[T], x: Any, dst: int, comm: Communicator, tag: int) -> T:
    """Send an array; the backward pass receives its gradient.

    Raises:
        RankError: ``dst`` is ``NULL``, so no rank could send the gradient back.
    """
    _refuse_null("send", "dst", dst, comm)
    tape.check("send", x)

    def forward(x: Any) -> Any:
        return comm.send(x, dst, tag=tag)

    def adjoint(g: Any) -> Any:
        return recv(tape, comm, dst, tag, g, g)

    return tape.record(CollectiveStep(forward, adjoint), x)


def recv(tape: Tape[T], comm: Communicator, src: int, tag: int, like: Any, after: Any) -> T:
    """Receive an array; the backward pass sends its gradient.

    Raises:
        RankError: ``src`` is ``ANY_SOURCE`` or ``NULL``, so there is no rank to send the gradient
            to.
    """
    _refuse_null("recv", "src", src, comm)
    if src == ANY_SOURCE:
        raise RankError(
            "recv: src is ANY_SOURCE, which is not differentiable: the gradient has to be sent to "
            f"one known rank [rank {comm.rank} of {comm.size}]. Name the source rank, or receive "
            "with comm.recv, without a gradient."
        )
    if after is not None:
        tape.check("recv", after)
    near = tape.bare(like)

    def forward(after: Any) -> Any:
        message = comm.recv(None, src, tag=tag, like=near)
        tape.check("recv", message)
        return message

    def adjoint(g: Any) -> Any:
        return send(tape, g, src, comm, tag)

    return tape.record(CollectiveStep(forward, adjoint, False), after, near)


def _refuse_null(what: str, name: str, rank: int, comm: Communicator) -> None:
    if rank == NULL:
        raise RankError(
            f"{what}: {name} is NULL, which is not differentiable: the gradient has to be "
            f"exchanged with a rank [rank {comm.rank} of {comm.size}]. Leave the call out at the "
            f"edge, or use comm.{what}, without a gradient."
        )

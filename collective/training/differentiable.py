"""The differentiable collectives of every framework, over what its tape offers.

The adapters' ``functional`` modules are skins of these, and say what each computes: shapes,
gradients, errors. Every backward is made of these same functions, and so is differentiable too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from collective.communicator import NULL, Communicator
from collective.communicator.rows import split_sizes
from collective.contract.backend import ANY_SOURCE
from collective.errors import InvalidArgumentError, RankError
from collective.ops import Op

__all__ = [
    "CollectiveStep", "Tape", "all_gather", "all_reduce", "all_to_all", "broadcast", "check_op",
    "gather", "recv", "reduce", "reduce_scatter", "scatter", "send",
]  # fmt: skip

#: The ops whose derivatives do not depend on the arrays, and those whose do.
LINEAR, FOLDS = ("sum", "avg"), ("prod", "min", "max")

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


@dataclass(frozen=True)
class CollectiveStep:
    """One call.

    Attributes:
        forward: from array to array, or to None where there is no result.
        backward: from what the framework differentiates to the same, ``g -> gradient``; where
            the derivative depends on the arrays ``(g, x, y) -> gradient``, ``y`` an array.
        linked: whether some rank's result depends on this rank's ``x``. If not, backward gives
            a delegate.
        keeps: whether backward takes the arrays, which have to be kept for it.
    """

    forward: Callable[[Any], Any]
    backward: Callable[..., Any]
    linked: bool = True
    keeps: bool = False


class Tape(Protocol[T_co]):
    """What a framework offers: nodes of its graph, and the little arithmetic of backwards."""

    def check(self, what: str, x: Any, op: Op = "sum") -> None:
        """Refuse what is none of the framework's, or not differentiated."""

    def record(self, step: CollectiveStep, x: Any, near: Any = None) -> T_co:
        """Run a step as a node; ``near`` says of what kind it is where ``x`` is None."""

    def bare(self, x: Any) -> Any:
        """Return the array of what may be differentiated; anything else as it is."""

    def room(self, x: Any, shape: Sequence[int]) -> Callable[[], Any]:
        """Return what makes an array of ``x``'s dtype and device, without keeping ``x``."""

    def integers(self, x: Any) -> Callable[[Sequence[int]], Any]:
        """Return what makes an array of integers where ``x`` is, without keeping ``x``."""

    def copy(self, array: Any) -> Any:
        """Return a copy of an array."""

    def stack(self, g: Any, array: Any) -> Any:
        """Join ``g``, differentiated, and an array along a new first axis."""

    def product_of_others(self, pieces: Any, rank: int) -> Any:
        """Multiply all along the first axis but number ``rank``; conjugated, if complex."""

    def equal(self, x: Any, y: Any) -> Any:
        """Compare two arrays: ones and zeros of the dtype of ``y``."""


def check_op(what: str, op: Op) -> None:
    """Refuse an op that is not differentiated.

    Raises:
        InvalidArgumentError: it is none of :data:`LINEAR` and :data:`FOLDS`.
    """
    if op not in LINEAR + FOLDS:
        raise InvalidArgumentError(
            f"{what}: op {op!r}; one of {', '.join(LINEAR + FOLDS)}, which can be "
            "differentiated. The communicator's own calls take the others."
        )


# -- folds ------------------------------------------------------------------------------------


def all_reduce(tape: Tape[T], x: Any, comm: Communicator, op: Op) -> T:
    """Fold; backward all-reduces."""
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


def reduce(tape: Tape[T], x: Any, comm: Communicator, root: int, op: Op) -> T:
    """Fold at ``root``; backward broadcasts."""
    tape.check("reduce", x, op)
    room = tape.room(x, x.shape)

    def forward(x: Any) -> Any:
        return comm.reduce(x, root=root, op=op)

    def adjoint(g: Any) -> Any:
        spread = _spread(tape, g, comm, root, room)
        return spread / comm.size if op == "avg" else spread

    def backward(g: Any, x: Any, y: Any) -> Any:
        # Off the root y is a delegate: what was folded comes with the gradient.
        both = tape.stack(g, y) if comm.rank == root else g
        both = _spread(tape, both, comm, root, tape.room(x, (2, *x.shape)))
        return both[0] * _partial(tape, x, tape.bare(both[1]), comm, op)

    if op in LINEAR:
        return tape.record(CollectiveStep(forward, adjoint), x)
    return tape.record(CollectiveStep(forward, backward, keeps=True), x)


def reduce_scatter(
    tape: Tape[T], x: Any, comm: Communicator, op: Op, axis: int, counts: Sequence[int] | None
) -> T:
    """Fold, a piece a rank; backward all-gathers."""
    tape.check("reduce_scatter", x, op)
    sizes = split_sizes("reduce_scatter", _length(x, axis), comm.size, counts)

    def forward(x: Any) -> Any:
        return comm.reduce_scatter(x, op=op, axis=axis, counts=sizes)

    def adjoint(g: Any) -> Any:
        joined: Any = all_gather(tape, g, comm, axis, sizes)
        return joined / comm.size if op == "avg" else joined

    def backward(g: Any, x: Any, y: Any) -> Any:
        # With a new first axis: one from the end is where it was.
        at = axis + 1 if axis >= 0 else axis
        both: Any = all_gather(tape, tape.stack(g, y), comm, at, sizes)
        folded = tape.bare(both[1]).reshape(x.shape)
        return both[0].reshape(x.shape) * _partial(tape, x, folded, comm, op)

    if op in LINEAR:
        return tape.record(CollectiveStep(forward, adjoint), x)
    return tape.record(CollectiveStep(forward, backward, keeps=True), x)


def _partial(tape: Tape[Any], x: Any, y: Any, comm: Communicator, op: Op) -> Any:
    """Return ``∂y/∂x`` of this rank's ``x``, elementwise, for the array ``y`` folded of all."""
    if op == "prod":
        pieces = all_gather(tape, x.reshape((1, *x.shape)), comm, 0, [1] * comm.size)
        return tape.product_of_others(pieces, comm.rank)
    # Ranks that hold one extreme share its derivative: one of the subgradients, and the same
    # whichever of them is first.
    holds = tape.equal(tape.bare(x), y)
    return holds / comm.all_reduce(holds)


# -- whole arrays and pieces --------------------------------------------------------------------


def broadcast(tape: Tape[T], x: Any, comm: Communicator, root: int, like: Any) -> T:
    """Give all ranks the root's; backward reduces."""
    if x is not None or comm.rank == root:
        tape.check("broadcast", x)
    return _broadcast(tape, x, comm, root, x, like)


def _broadcast(tape: Tape[T], template: Any, comm: Communicator, root: int, x: Any, like: Any) -> T:
    """Broadcast; off the root ``template`` says what comes and ``x`` gets the zero gradient."""
    given = None if comm.rank == root else tape.bare(template)
    near = tape.bare(like)

    def forward(x: Any) -> Any:
        if comm.rank == root:
            return tape.copy(comm.broadcast(x, root=root))
        return comm.broadcast(given, root=root, like=near)

    def adjoint(g: Any) -> Any:
        return reduce(tape, g, comm, root, "sum")

    return tape.record(CollectiveStep(forward, adjoint, comm.rank == root), x, near)


def _spread(tape: Tape[Any], g: Any, comm: Communicator, root: int, room: Callable[[], Any]) -> Any:
    """Broadcast the root's ``g``; elsewhere it ties the call to the graph, and ``room`` is filled.

    Nobody has to say what is coming then, which costs a message on some transports.
    """
    return _broadcast(tape, None if comm.rank == root else room(), comm, root, g, None)


def all_gather(
    tape: Tape[T], x: Any, comm: Communicator, axis: int, counts: Sequence[int] | None
) -> T:
    """Join at all ranks; backward reduce-scatters."""
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
    """Join at ``root``; backward scatters."""
    tape.check("gather", x)
    lengths = _Lengths(tape, x, comm, axis, counts)

    def forward(x: Any) -> Any:
        return comm.gather(x, root=root, axis=axis, counts=counts)

    def adjoint(g: Any) -> Any:
        # Off the root g only ties the scatter to the graph, and says on which device.
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
    """Give each rank a piece of the root's; backward gathers."""
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
    """Exchange pieces; backward takes them back."""
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
    """The ranks' lengths along an axis, exchanged when they are first needed."""

    def __init__(
        self, tape: Tape[Any], x: Any, comm: Communicator, axis: int, known: Sequence[int] | None
    ) -> None:
        self._shape, self._axis, self._comm = (x.shape or (1,)), axis, comm
        self._integers = tape.integers(x)
        self._known = None if known is None else list(known)

    def __call__(self) -> list[int]:
        if self._known is None:
            mine: Any = self._integers([self._shape[self._axis]])
            self._known = self._comm.all_gather(mine, counts=[1] * self._comm.size).tolist()
        return self._known


def _length(x: Any, axis: int) -> int:
    """Return the length of an axis, 0 for one that is not there, which the call refuses."""
    shape = tuple(x.shape) or (1,)
    return shape[axis] if -len(shape) <= axis < len(shape) else 0


# -- messages -----------------------------------------------------------------------------------


def send(tape: Tape[T], x: Any, dst: int, comm: Communicator, tag: int) -> T:
    """Send; backward receives.

    Raises:
        RankError: ``dst`` is ``NULL``, from whom no gradient would be received.
    """
    _refuse_null("send", "dst", dst, comm)
    tape.check("send", x)

    def forward(x: Any) -> Any:
        return comm.send(x, dst, tag=tag)

    def adjoint(g: Any) -> Any:
        return recv(tape, comm, dst, tag, g, g)

    return tape.record(CollectiveStep(forward, adjoint), x)


def recv(tape: Tape[T], comm: Communicator, src: int, tag: int, like: Any, after: Any) -> T:
    """Receive; backward sends.

    Raises:
        RankError: ``src`` is ``ANY_SOURCE`` or ``NULL``, to whom no gradient could be sent.
    """
    _refuse_null("recv", "src", src, comm)
    if src == ANY_SOURCE:
        raise RankError(
            f"recv: ANY_SOURCE; a rank, to which the gradient is sent [rank {comm.rank} of "
            f"{comm.size}]. Name the source, or receive with comm.recv, without a gradient."
        )
    if after is not None:
        tape.check("recv", after)
    near = tape.bare(like)

    def forward(after: Any) -> Any:
        found = comm.recv(None, src, tag=tag, like=near)
        tape.check("recv", found)
        return found

    def adjoint(g: Any) -> Any:
        return send(tape, g, src, comm, tag)

    return tape.record(CollectiveStep(forward, adjoint, False), after, near)


def _refuse_null(what: str, name: str, rank: int, comm: Communicator) -> None:
    if rank == NULL:
        raise RankError(
            f"{what}: {name} NULL; a rank, with which the gradient is exchanged [rank {comm.rank} "
            f"of {comm.size}]. Leave the call out at the edge, or use comm.{what}."
        )

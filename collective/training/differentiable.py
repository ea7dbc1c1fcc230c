"""Differentiable collectives of PyTorch and Chainer, built on the tape that the framework offers.

A framework adds the operations on its graph, in a subclass of :class:`Differentiable`. The modules
``functional`` of the adapters offer the calls of one such object as functions.

``x_r``, ``y_r`` and ``L_r`` are the input, result and loss of rank ``r``. The framework
differentiates ``L = Σ_r L_r``, and ``g_r = ∂L/∂y_r``. Each docstring gives ``∂L/∂x_r``. Every
backward pass makes these same calls, and so it is differentiable, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from collective.algorithms.pieces import split_sizes
from collective.communicator import NULL, Communicator
from collective.contract.backend import ANY_SOURCE
from collective.errors import InvalidArgumentError, RankError
from collective.ops import Op, as_op
from collective.start.session import comm_or_current

__all__ = ["CollectiveStep", "Differentiable", "check_op"]

#: Ops whose derivatives do not depend on the arrays, and ops whose derivatives do.
LINEAR, FOLDS = ("sum", "avg"), ("prod", "min", "max")

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


def check_op(what: str, op: Op) -> None:
    """Refuse an op that has no derivative here.

    Raises:
        InvalidArgumentError: the op is in neither :data:`LINEAR` nor :data:`FOLDS`.
    """
    as_op(op)  # explains a name of another library
    if op not in LINEAR + FOLDS:
        raise InvalidArgumentError(
            f"{what}: op {op!r} is not differentiable (expected one of "
            f"{', '.join(LINEAR + FOLDS)}). Use the communicator's own call for other ops, "
            "without a gradient."
        )


class Differentiable(ABC, Generic[T]):
    """Differentiable collectives of a framework, whose arrays are of type ``T``.

    Attributes:
        like: default of ``like``.
    """

    like: ClassVar[str]

    # -- operations of the framework: nodes of its graph, and the arithmetic of backwards -----

    @abstractmethod
    def check(self, what: str, x: Any, op: Op = "sum") -> None:
        """Refuse a value that is not the framework's, or that cannot be differentiated."""

    @abstractmethod
    def record(self, step: CollectiveStep, x: Any, near: Any = None) -> T:
        """Run a step as a node of the graph; if ``x`` is None, ``near`` gives its kind."""

    @abstractmethod
    def bare(self, x: Any) -> Any:
        """Return the array behind a differentiable value; return any other value unchanged."""

    @abstractmethod
    def room(self, x: Any, shape: Sequence[int]) -> Callable[[], Any]:
        """Return a function that makes an array like ``x``, without keeping ``x`` alive.

        The array has the given shape, and the dtype and the device of ``x``.
        """

    @abstractmethod
    def integers(self, x: Any) -> Callable[[Sequence[int]], Any]:
        """Return a function that makes integer arrays on ``x``'s device, without keeping ``x``."""

    @abstractmethod
    def copy(self, array: Any) -> Any:
        """Return a copy of an array."""

    @abstractmethod
    def stack(self, g: Any, array: Any) -> Any:
        """Join the differentiable ``g`` and an array along a new first axis."""

    @abstractmethod
    def product_of_others(self, pieces: Any, rank: int) -> Any:
        """Multiply all pieces along the first axis except number ``rank``.

        A complex product is conjugated.
        """

    @abstractmethod
    def equal(self, x: Any, y: Any) -> Any:
        """Compare two arrays elementwise; return ones and zeros of the dtype of ``y``."""

    # -- folds ----------------------------------------------------------------------------

    def all_reduce(self, x: T, comm: Communicator | None = None, op: Op = "sum") -> T:
        """Fold the ranks' arrays elementwise and give every rank the result.

        With ``G = Σ_r g_r``, which is itself an all-reduce, the gradient is for

        - ``sum``: ``G``; ``avg``: ``G / size``;
        - ``min``, ``max``: ``G`` where ``x_r`` is the extreme, divided by the number of ranks that
          hold it, as ``torch.amax`` divides it; zero elsewhere;
        - ``prod``: ``G · Π_{s≠r} x̄_s``, correct even if factors are zero. The backward pass
          gathers all ranks' ``x`` for it, and so needs ``size`` times the memory of ``x``.

        Collective: every rank calls it, with the same op, shape and dtype.

        Args:
            x: array of any shape and strides. It is differentiated if it is floating point, or
                complex in PyTorch.
            comm: ranks that take part; None: those of the current communicator.
            op: ``"sum"``, ``"avg"``, ``"prod"``, ``"min"`` or ``"max"``.

        Returns:
            A new array like ``x``; in Chainer a new variable, as from all these calls.

        Raises:
            InvalidArgumentError: the op is another one, ``x`` is no array of the framework, or a
                parameter of Chainer that has no array yet.
            DtypeError: ``avg`` of integers, or a type that Chainer does not differentiate. Other
                errors are those of :meth:`Communicator.all_reduce`, in this call and in the
                backward pass.
        """
        comm = comm_or_current(comm, "all_reduce")
        self.check("all_reduce", x, op)

        def forward(x: Any) -> Any:
            return comm.all_reduce(x, op=op)

        def adjoint(g: Any) -> Any:
            return self.all_reduce(g, comm, op)

        def backward(g: Any, x: Any, y: Any) -> Any:
            return self.all_reduce(g, comm) * self._partial(x, y, comm, op)

        if op in LINEAR:
            return self.record(CollectiveStep(forward, adjoint), x)
        return self.record(CollectiveStep(forward, backward, keeps=True), x)

    def reduce(self, x: T, comm: Communicator | None = None, root: int = 0, op: Op = "sum") -> T:
        """Fold the ranks' arrays elementwise and give the result to ``root``.

        The gradient is that of :meth:`all_reduce` with ``G = g_root``, a broadcast.

        Collective: every rank calls it, with the same root, op, shape and dtype.

        Args:
            x, comm, op: as in :meth:`all_reduce`.
            root: rank that gets the result.

        Returns:
            At the root a new array like ``x``; on other ranks a delegate, of the dtype of ``x``.

        Raises:
            As :meth:`all_reduce`.
        """
        comm = comm_or_current(comm, "reduce")
        self.check("reduce", x, op)
        value: Any = x
        room = self.room(value, value.shape)

        def forward(x: Any) -> Any:
            return comm.reduce(x, root=root, op=op)

        def adjoint(g: Any) -> Any:
            spread = self._spread(g, comm, root, room)
            return spread / comm.size if op == "avg" else spread

        def backward(g: Any, x: Any, y: Any) -> Any:
            # Off the root, y is a delegate. The root sends the folded array with the gradient.
            both = self.stack(g, y) if comm.rank == root else g
            both = self._spread(both, comm, root, self.room(x, (2, *x.shape)))
            return both[0] * self._partial(x, self.bare(both[1]), comm, op)

        if op in LINEAR:
            return self.record(CollectiveStep(forward, adjoint), x)
        return self.record(CollectiveStep(forward, backward, keeps=True), x)

    def reduce_scatter(
        self,
        x: T,
        comm: Communicator | None = None,
        op: Op = "sum",
        axis: int = 0,
        *,
        counts: Sequence[int] | None = None,
    ) -> T:
        """Fold the ranks' arrays elementwise and give each rank one piece of the result.

        The gradient is that of :meth:`all_reduce` with ``G`` the ``g_r`` joined, an all-gather.

        Collective: every rank calls it, with the same op, shape, dtype, axis and counts.

        Args:
            x, comm, op: as in :meth:`all_reduce`.
            axis: axis that is cut.
            counts: lengths of the pieces; by default as ``numpy.array_split`` cuts.

        Returns:
            Piece ``rank`` of the result, a new array.

        Raises:
            As :meth:`all_reduce`. ShapeError: the counts do not add up to the axis.
        """
        comm = comm_or_current(comm, "reduce_scatter")
        self.check("reduce_scatter", x, op)
        sizes = split_sizes("reduce_scatter", _length(x, axis), comm.size, counts)

        def forward(x: Any) -> Any:
            return comm.reduce_scatter(x, op=op, axis=axis, counts=sizes)

        def adjoint(g: Any) -> Any:
            joined: Any = self.all_gather(g, comm, axis, counts=sizes)
            return joined / comm.size if op == "avg" else joined

        def backward(g: Any, x: Any, y: Any) -> Any:
            # Stacking adds a new first axis. A negative axis counts from the end, so it does not
            # move.
            at = axis + 1 if axis >= 0 else axis
            both: Any = self.all_gather(self.stack(g, y), comm, at, counts=sizes)
            folded = self.bare(both[1]).reshape(x.shape)
            return both[0].reshape(x.shape) * self._partial(x, folded, comm, op)

        if op in LINEAR:
            return self.record(CollectiveStep(forward, adjoint), x)
        return self.record(CollectiveStep(forward, backward, keeps=True), x)

    def _partial(self, x: Any, y: Any, comm: Communicator, op: Op) -> Any:
        """Return ``∂y/∂x`` of this rank's ``x``, elementwise; ``y`` is the fold of all arrays."""
        if op == "prod":
            pieces = self.all_gather(x.reshape((1, *x.shape)), comm, counts=[1] * comm.size)
            return self.product_of_others(pieces, comm.rank)
        # Ranks that hold the same extreme share its derivative equally. This is one of the
        # subgradients, and it does not depend on the order of the ranks.
        holds = self.equal(self.bare(x), y)
        return holds / comm.all_reduce(holds)

    # -- whole arrays and pieces ----------------------------------------------------------

    def broadcast(
        self, x: T | None, comm: Communicator | None = None, root: int = 0, *, like: Any = None
    ) -> T:
        """Give every rank the array of ``root``.

        The gradient at the root is ``Σ_r g_r``, a reduce; that of another rank's ``x`` is zero.

        Collective: every rank calls it, with the same root.

        Args:
            x: at the root, an array. On other ranks None, or an array of the root's shape and
                dtype, whose values do not matter and which gets the zero gradient. None costs one
                more message on some transports. Derivatives of higher order need an array on every
                rank, because they pass through the zero gradient.
            comm: ranks that take part; None: those of the current communicator.
            root: rank whose array is sent.
            like: if ``x`` is None, an array whose kind and device are also the result's. By default
                the result is on the CPU.

        Returns:
            A new array on every rank, the root included.

        Raises:
            As :meth:`Communicator.broadcast`.
        """
        comm = comm_or_current(comm, "broadcast")
        if x is not None or comm.rank == root:
            self.check("broadcast", x)
        return self._broadcast(x, comm, root, x, self._near(like))

    def _near(self, like: Any) -> Any:
        """Return what names the kind of a result, for ``like``."""
        return self.like if like is None else self.bare(like)

    def _broadcast(self, template: Any, comm: Communicator, root: int, x: Any, near: Any) -> T:
        """Broadcast from the root.

        Off the root, ``template`` describes the array to receive, and ``x`` gets the zero gradient.
        """
        expected = None if comm.rank == root else self.bare(template)

        def forward(x: Any) -> Any:
            if comm.rank == root:
                return self.copy(comm.broadcast(x, root=root))
            return comm.broadcast(expected, root=root, like=near)

        def adjoint(g: Any) -> Any:
            return self.reduce(g, comm, root)

        return self.record(CollectiveStep(forward, adjoint, comm.rank == root), x, near)

    def _spread(self, g: Any, comm: Communicator, root: int, room: Callable[[], Any]) -> Any:
        """Broadcast the root's ``g``; on other ranks fill ``room``.

        On other ranks ``g`` only ties the call to the graph. Because ``room`` gives shape and
        dtype, the root does not have to announce them, which would cost a message on some
        transports.
        """
        return self._broadcast(None if comm.rank == root else room(), comm, root, g, None)

    def all_gather(
        self,
        x: T,
        comm: Communicator | None = None,
        axis: int = 0,
        *,
        counts: Sequence[int] | None = None,
    ) -> T:
        """Join the ranks' arrays along an axis, in rank order, at every rank.

        The gradient is piece ``r`` of ``Σ_s g_s``, a reduce-scatter.

        Collective: every rank calls it, with the same dtype and axis; shapes may differ along the
        axis.

        Args:
            x: array; one without dimensions counts as one of length 1.
            comm: ranks that take part; None: those of the current communicator.
            axis: axis to join along.
            counts: lengths of the ranks' arrays along ``axis``, if all ranks know them. Without
                ``counts`` the first backward pass exchanges them, in a message of 8 bytes a rank.

        Returns:
            A new array.

        Raises:
            As :meth:`Communicator.all_gather`.
        """
        comm = comm_or_current(comm, "all_gather")
        self.check("all_gather", x)
        lengths = self._lengths(x, comm, axis, counts)

        def forward(x: Any) -> Any:
            return comm.all_gather(x, axis=axis, counts=counts)

        def adjoint(g: Any) -> Any:
            return self.reduce_scatter(g, comm, "sum", axis, counts=lengths())

        return self.record(CollectiveStep(forward, adjoint), x)

    def gather(
        self,
        x: T,
        comm: Communicator | None = None,
        root: int = 0,
        axis: int = 0,
        *,
        counts: Sequence[int] | None = None,
    ) -> T:
        """Join the ranks' arrays along an axis, in rank order, at ``root``.

        The gradient is piece ``r`` of ``g_root``, a scatter.

        Collective: every rank calls it, with the same root, dtype and axis.

        Args:
            x, comm, axis, counts: as in :meth:`all_gather`.
            root: rank that gets the result.

        Returns:
            At the root a new array; on other ranks a delegate, of the dtype of ``x``.

        Raises:
            As :meth:`Communicator.gather`.
        """
        comm = comm_or_current(comm, "gather")
        self.check("gather", x)
        lengths = self._lengths(x, comm, axis, counts)

        def forward(x: Any) -> Any:
            return comm.gather(x, root=root, axis=axis, counts=counts)

        def adjoint(g: Any) -> Any:
            # Off the root, g only ties the scatter to the graph and names the device.
            return self.scatter(g, comm, root, axis, counts=lengths())

        return self.record(CollectiveStep(forward, adjoint), x)

    def scatter(
        self,
        x: T | None,
        comm: Communicator | None = None,
        root: int = 0,
        axis: int = 0,
        *,
        counts: Sequence[int] | None = None,
        like: Any = None,
    ) -> T:
        """Cut the array of ``root`` into pieces and give each rank one piece.

        The gradient at the root is the ``g_r`` joined, a gather; that of another rank's ``x`` is
        zero.

        Collective: every rank calls it, with the same root and axis.

        Args:
            x: at the root, an array. On other ranks None, or any array, which gets the zero
                gradient; derivatives of higher order need one.
            comm: ranks that take part; None: those of the current communicator.
            root: rank whose array is cut.
            axis: axis that is cut.
            counts: at the root, lengths of the pieces; by default as ``numpy.array_split`` cuts.
            like: as in :meth:`broadcast`.

        Returns:
            Piece ``rank``, a new array.

        Raises:
            As :meth:`Communicator.scatter`.
        """
        comm = comm_or_current(comm, "scatter")
        if x is not None or comm.rank == root:
            self.check("scatter", x)
        near = self._near(like)

        def forward(x: Any) -> Any:
            source = x if comm.rank == root else None
            return comm.scatter(
                source, root=root, counts=counts, axis=axis, like=near if x is None else x
            )

        def adjoint(g: Any) -> Any:
            return self.gather(g, comm, root, axis)

        return self.record(CollectiveStep(forward, adjoint, comm.rank == root), x, near)

    def all_to_all(
        self,
        x: T,
        comm: Communicator | None = None,
        axis: int = 0,
        *,
        counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
    ) -> T:
        """Cut every rank's array into pieces, send piece ``j`` to rank ``j``, join received pieces.

        The gradient is the all-to-all that returns each piece of ``g`` to its sender. Its counts
        are the transpose of the forward counts.

        Collective: every rank calls it, with the same dtype and axis; shapes may differ along the
        axis.

        Args:
            x: array; one without dimensions counts as one of length 1.
            comm: ranks that take part; None: those of the current communicator.
            axis: axis to cut and to join along.
            counts: lengths of the pieces that this rank sends; ranks may differ. By default as
                ``numpy.array_split`` cuts.
            recv_counts: lengths of the pieces that this rank receives; all ranks pass them, or none
                does. Without them the first backward pass exchanges them.

        Returns:
            The pieces for this rank, in the order of their senders, as a new array.

        Raises:
            As :meth:`Communicator.all_to_all`.
        """
        comm = comm_or_current(comm, "all_to_all")
        self.check("all_to_all", x)
        sends = split_sizes("all_to_all", _length(x, axis), comm.size, counts)
        receives = [] if recv_counts is None else list(recv_counts)
        integers = self.integers(x)

        def forward(x: Any) -> Any:
            return comm.all_to_all(x, counts=sends, axis=axis)

        def adjoint(g: Any) -> Any:
            if not receives:
                receives.extend(comm.all_to_all(integers(sends)).tolist())
            return self.all_to_all(g, comm, axis, counts=receives, recv_counts=sends)

        return self.record(CollectiveStep(forward, adjoint), x)

    def _lengths(
        self, x: Any, comm: Communicator, axis: int, known: Sequence[int] | None
    ) -> Callable[[], list[int]]:
        """Return a function that exchanges all ranks' lengths along an axis, if necessary."""
        shape, integers = x.shape or (1,), self.integers(x)
        lengths = [] if known is None else list(known)

        def exchanged() -> list[int]:
            if not lengths:
                mine: Any = integers([shape[axis]])
                lengths.extend(comm.all_gather(mine, counts=[1] * comm.size).tolist())
            return lengths

        return exchanged

    # -- messages -------------------------------------------------------------------------

    def send(self, x: T, dst: int, comm: Communicator | None = None, tag: int = 0) -> T:
        """Send an array to rank ``dst``.

        The gradient is ``g_dst``, which the backward pass receives from ``dst``, with the same tag.

        Args:
            x: array of at most 12 dimensions.
            dst: another rank, which calls :meth:`recv`.
            comm: ranks that take part; None: those of the current communicator.
            tag: tag that the receiver uses.

        Returns:
            A delegate of the dtype of ``x``. The backward pass receives when it reaches the
            delegate.

        Raises:
            RankError: ``dst`` is ``NULL``, so no rank could send the gradient back. Other errors
                are those of :meth:`Communicator.send`.
        """
        comm = comm_or_current(comm, "send")
        _refuse_null("send", "dst", dst, comm)
        self.check("send", x)

        def forward(x: Any) -> Any:
            return comm.send(x, dst, tag=tag)

        def adjoint(g: Any) -> Any:
            return self.recv(comm, dst, tag, like=g, after=g)

        return self.record(CollectiveStep(forward, adjoint), x)

    def recv(
        self,
        comm: Communicator | None = None,
        src: int = ANY_SOURCE,
        tag: int = 0,
        *,
        like: Any = None,
        after: T | None = None,
    ) -> T:
        """Receive an array from rank ``src``.

        The backward pass sends ``g`` to ``src``, where it is the gradient of the array that was
        sent.

        Args:
            comm: ranks that take part; None: those of the current communicator.
            src: another rank, which calls :meth:`send`. Name it: the default, ``ANY_SOURCE``,
                raises an error.
            tag: tag that the sender uses.
            like: array whose kind and device are also the result's. By default the result is on the
                CPU.
            after: array, such as the delegate of an earlier :meth:`send`, on which this result is
                made to depend, with gradient zero. The backward pass of the operations that led to
                ``after`` waits for this result's. ``torch.autograd.grad``, ``chainer.grad`` and
                derivatives of higher order find the way through this result.

        Returns:
            A new array of the sender's shape and dtype.

        Raises:
            RankError: ``src`` is ``ANY_SOURCE`` or ``NULL``, so there is no rank to send the
                gradient to. Other errors are those of :meth:`Communicator.recv`.
        """
        comm = comm_or_current(comm, "recv")
        _refuse_null("recv", "src", src, comm)
        if src == ANY_SOURCE:
            raise RankError(
                "recv: src is ANY_SOURCE, which is not differentiable: the gradient has to be sent "
                f"to one known rank [rank {comm.rank} of {comm.size}]. Name the source rank, or "
                "receive with comm.recv, without a gradient."
            )
        if after is not None:
            self.check("recv", after)
        near = self._near(like)

        def forward(after: Any) -> Any:
            message = comm.recv(None, src, tag=tag, like=near)
            self.check("recv", message)
            return message

        def adjoint(g: Any) -> Any:
            return self.send(g, src, comm, tag)

        return self.record(CollectiveStep(forward, adjoint, False), after, near)


def _length(x: Any, axis: int) -> int:
    """Return the length of an axis; 0 for an axis that does not exist, which the call refuses."""
    shape = tuple(x.shape) or (1,)
    return shape[axis] if -len(shape) <= axis < len(shape) else 0


def _refuse_null(what: str, name: str, rank: int, comm: Communicator) -> None:
    if rank == NULL:
        raise RankError(
            f"{what}: {name} is NULL, which is not differentiable: the gradient has to be "
            f"exchanged with a rank [rank {comm.rank} of {comm.size}]. Leave the call out at the "
            f"edge, or use comm.{what}, without a gradient."
        )

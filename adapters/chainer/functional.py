"""Collectives that Chainer differentiates: the backward pass of each is its adjoint collective.

``x_r``, ``y_r`` and ``L_r`` are the input, result and loss of rank ``r``. Chainer differentiates
``L = Σ_r L_r``, and ``g_r = ∂L/∂y_r``. Each docstring gives ``∂L/∂x_r``.

- Every rank's result has to contribute to its loss. Otherwise that rank does not take part in the
  backward collective, and the other ranks wait for it. A call without a result on a rank
  (:func:`send`; :func:`reduce` and :func:`gather` off the root) returns a *delegate* there: a zero
  without dimensions, which has to be added to the loss.
- Results depend on other ranks' arrays. So if gradients are enabled, results require a gradient on
  every rank, whether ``x`` does or not. A rank with a frozen ``x`` takes part as well.
- Backward collectives run in the reverse order of the forward calls. So all ranks have to make the
  forward calls in the same order. Among the nodes that are ready, Chainer's backward pass takes the
  node of the highest rank, its depth in the graph. A node of this module gets a rank above all
  earlier nodes of its thread. So the backward order is the reverse order of creation, however the
  results are combined later.
- ``backward()`` visits every node. ``chainer.grad(outputs, inputs)`` visits only the nodes that
  lead to ``inputs``. So on each rank, an input of the collective has to be among ``inputs`` or
  depend on them.
- Backward passes consist of these same functions. So with ``enable_double_backprop=True``
  derivatives of any order are available.
- The functions differentiate float16, float32 and float64. They also send integers, which are not
  part of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collective import ANY_SOURCE, Communicator
from collective.inner import comm_or_current, differentiable

from .tape import Tape

__all__ = [
    "all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "recv", "reduce",
    "reduce_scatter", "scatter", "send",
]  # fmt: skip

_TAPE = Tape()


def all_reduce(x: Any, comm: Communicator | None = None, op: str = "sum") -> Any:
    """Fold the ranks' arrays elementwise and give every rank the result.

    With ``G = Σ_r g_r``, which is itself an all-reduce, the gradient is for

    - ``sum``: ``G``; ``avg``: ``G / size``;
    - ``min``, ``max``: ``G`` where ``x_r`` is the extreme, divided by the number of ranks that hold
      it; zero elsewhere;
    - ``prod``: ``G · Π_{s≠r} x_s``, correct even if factors are zero. The backward pass gathers all
      ranks' ``x`` for it, and so needs ``size`` times the memory of ``x``.

    Collective: every rank calls it, with the same op, shape and dtype.

    Args:
        x: variable or array, of any shape.
        comm: ranks that take part; None: those of the current communicator.
        op: ``"sum"``, ``"avg"``, ``"prod"``, ``"min"`` or ``"max"``.

    Returns:
        A new variable like ``x``.

    Raises:
        InvalidArgumentError: the op is another one, ``x`` is no variable or array, or ``x`` has no
            array yet.
        DtypeError: ``avg`` of integers, or a type that is not differentiated. Other errors are
            those of :meth:`Communicator.all_reduce`, in this call and in the backward pass.
    """
    return differentiable.all_reduce(_TAPE, x, comm_or_current(comm, "all_reduce"), op)


def reduce(x: Any, comm: Communicator | None = None, root: int = 0, op: str = "sum") -> Any:
    """Fold the ranks' arrays elementwise and give the result to ``root``.

    The gradient is that of :func:`all_reduce` with ``G = g_root``, a broadcast.

    Collective: every rank calls it, with the same root, op, shape and dtype.

    Args:
        x, comm, op: as in :func:`all_reduce`.
        root: rank that gets the result.

    Returns:
        At the root a new variable like ``x``; on other ranks a delegate, of the dtype of ``x``.

    Raises:
        As :func:`all_reduce`.
    """
    return differentiable.reduce(_TAPE, x, comm_or_current(comm, "reduce"), root, op)


def broadcast(
    x: Any, comm: Communicator | None = None, root: int = 0, *, like: Any = "numpy"
) -> Any:
    """Give every rank the array of ``root``.

    The gradient at the root is ``Σ_r g_r``, a reduce; that of another rank's ``x`` is zero.

    Collective: every rank calls it, with the same root.

    Args:
        x: at the root, a variable or an array. On other ranks None, or a variable or array of the
            root's shape and dtype, which gets the zero gradient; derivatives of higher order need
            it.
        comm: ranks that take part; None: those of the current communicator.
        root: rank whose array is sent.
        like: if ``x`` is None, the kind of the result: ``"numpy"``, ``"cupy"`` or an array of that
            kind.

    Returns:
        A new variable, on the root as well.

    Raises:
        As :meth:`Communicator.broadcast`.
    """
    return differentiable.broadcast(_TAPE, x, comm_or_current(comm, "broadcast"), root, like)


def all_gather(
    x: Any, comm: Communicator | None = None, axis: int = 0, *, counts: Sequence[int] | None = None
) -> Any:
    """Join the ranks' arrays along an axis, in rank order, at every rank.

    The gradient is piece ``r`` of ``Σ_s g_s``, a reduce-scatter.

    Collective: every rank calls it, with the same dtype and axis; shapes may differ along the axis.

    Args:
        x: variable or array; one without dimensions counts as one of length 1.
        comm: ranks that take part; None: those of the current communicator.
        axis: axis to join along.
        counts: lengths of the ranks' arrays along ``axis``, if all ranks know them. Without
            ``counts`` the first backward pass exchanges them, in a message of 8 bytes a rank.

    Returns:
        A new variable.

    Raises:
        As :meth:`Communicator.all_gather`.
    """
    return differentiable.all_gather(_TAPE, x, comm_or_current(comm, "all_gather"), axis, counts)


def gather(
    x: Any,
    comm: Communicator | None = None,
    root: int = 0,
    axis: int = 0,
    *,
    counts: Sequence[int] | None = None,
) -> Any:
    """Join the ranks' arrays along an axis, in rank order, at ``root``.

    The gradient is piece ``r`` of ``g_root``, a scatter.

    Collective: every rank calls it, with the same root, dtype and axis.

    Args:
        x, comm, axis, counts: as in :func:`all_gather`.
        root: rank that gets the result.

    Returns:
        At the root a new variable; on other ranks a delegate, of the dtype of ``x``.

    Raises:
        As :meth:`Communicator.gather`.
    """
    return differentiable.gather(_TAPE, x, comm_or_current(comm, "gather"), root, axis, counts)


def scatter(
    x: Any,
    comm: Communicator | None = None,
    root: int = 0,
    axis: int = 0,
    *,
    counts: Sequence[int] | None = None,
    like: Any = "numpy",
) -> Any:
    """Cut the array of ``root`` into pieces and give each rank one piece.

    The gradient at the root is the ranks' ``g_r = ∂L/∂y_r`` joined, a gather; that of another
    rank's ``x`` is zero.

    Collective: every rank calls it, with the same root and axis.

    Args:
        x: at the root, a variable or an array. On other ranks None, or any variable or array. A
            variable gets a zero gradient; pass one for derivatives of higher order.
        comm: ranks that take part; None: those of the current communicator.
        root: rank whose array is cut.
        axis: axis that is cut.
        counts: at the root, lengths of the pieces; by default as ``numpy.array_split`` cuts.
        like: as in :func:`broadcast`.

    Returns:
        Piece ``rank``, a new variable.

    Raises:
        As :meth:`Communicator.scatter`.
    """
    return differentiable.scatter(
        _TAPE, x, comm_or_current(comm, "scatter"), root, axis, counts, like
    )


def reduce_scatter(
    x: Any,
    comm: Communicator | None = None,
    op: str = "sum",
    axis: int = 0,
    *,
    counts: Sequence[int] | None = None,
) -> Any:
    """Fold the ranks' arrays elementwise and give each rank one piece of the result.

    The gradient is that of :func:`all_reduce` with ``G`` the ``g_r`` joined, an all-gather.

    Collective: every rank calls it, with the same op, shape, dtype, axis and counts.

    Args:
        x, comm, op: as in :func:`all_reduce`.
        axis: axis that is cut.
        counts: lengths of the pieces; by default as ``numpy.array_split`` cuts.

    Returns:
        Piece ``rank`` of the result, a new variable.

    Raises:
        As :func:`all_reduce`. ShapeError: the counts do not add up to the axis.
    """
    return differentiable.reduce_scatter(
        _TAPE, x, comm_or_current(comm, "reduce_scatter"), op, axis, counts
    )


def all_to_all(
    x: Any,
    comm: Communicator | None = None,
    axis: int = 0,
    *,
    counts: Sequence[int] | None = None,
    recv_counts: Sequence[int] | None = None,
) -> Any:
    """Cut every rank's array into pieces, send piece ``j`` to rank ``j``, join the received pieces.

    The gradient is the all-to-all that returns each piece of ``g`` to its sender. Its counts are
    the transpose of the forward counts.

    Collective: every rank calls it, with the same dtype and axis; shapes may differ along the axis.

    Args:
        x: variable or array; one without dimensions counts as one of length 1.
        comm: ranks that take part; None: those of the current communicator.
        axis: axis to cut and to join along.
        counts: lengths of the pieces that this rank sends; ranks may differ. By default as
            ``numpy.array_split`` cuts.
        recv_counts: lengths of the pieces that this rank receives; all ranks pass them, or none
            does. Without them the first backward pass exchanges them.

    Returns:
        The pieces for this rank, in the order of their senders, as a new variable.

    Raises:
        As :meth:`Communicator.all_to_all`.
    """
    return differentiable.all_to_all(
        _TAPE, x, comm_or_current(comm, "all_to_all"), axis, counts, recv_counts
    )


def send(x: Any, dst: int, comm: Communicator | None = None, tag: int = 0) -> Any:
    """Send an array to rank ``dst``.

    The gradient is ``g_dst``, which the backward pass receives from ``dst``, with the same tag.

    Args:
        x: variable or array of at most 12 dimensions.
        dst: another rank, which calls :func:`recv`.
        comm: ranks that take part; None: those of the current communicator.
        tag: tag that the receiver uses.

    Returns:
        A delegate of the dtype of ``x``. The backward pass receives when it reaches the delegate.

    Raises:
        As :meth:`Communicator.send`.
    """
    return differentiable.send(_TAPE, x, dst, comm_or_current(comm, "send"), tag)


def recv(
    comm: Communicator | None = None,
    src: int = ANY_SOURCE,
    tag: int = 0,
    *,
    like: Any = "numpy",
    after: Any = None,
) -> Any:
    """Receive an array from rank ``src``.

    The backward pass sends ``g`` to ``src``, where it is the gradient of the array that was sent.

    Args:
        comm: ranks that take part; None: those of the current communicator.
        src: another rank, which calls :func:`send`. Name it: the default, ``ANY_SOURCE``, raises an
            error.
        tag: tag that the sender uses.
        like: kind of the result: ``"numpy"``, ``"cupy"`` or an array of that kind.
        after: variable, such as the delegate of an earlier :func:`send`, on which this result is
            made to depend, with gradient zero. The backward pass of the operations that led to
            ``after`` waits for this result's. ``chainer.grad`` and derivatives of higher order find
            the way through this result.

    Returns:
        A new variable of the sender's shape and dtype.

    Raises:
        RankError: ``src`` is ``ANY_SOURCE``, so there is no rank to send the gradient to. Other
            errors are those of :meth:`Communicator.recv`.
    """
    return differentiable.recv(_TAPE, comm_or_current(comm, "recv"), src, tag, like, after)

"""Collectives that Chainer differentiates: the backward of each is its adjoint collective.

With ``x_r``, ``y_r`` and ``L_r`` the input, result and loss of rank ``r``, what is differentiated
is ``L = Σ_r L_r``, and ``g_r = ∂L/∂y_r``. Each docstring says what ``∂L/∂x_r`` is.

- Every rank's result has to contribute to its loss, or that rank does not take part in the
  backward collective and the others wait for it. What has no result on a rank (:func:`send`;
  :func:`reduce` and :func:`gather` off the root) returns a *delegate* there, a zero of no
  dimensions, to be added to the loss.
- Results depend on other ranks' arrays. So where gradients are enabled they require one on
  every rank, whether ``x`` does or not, and a rank with a frozen ``x`` takes part all the same.
- Backward collectives run in the reverse order of the forward calls, which therefore have to be
  made in one order on all ranks. Chainer takes the ready node of the highest rank, its depth in
  the graph; a node of ours gets one above those of all that its thread made before, so that it
  is the reverse order of creation, however the results were combined afterwards.
- ``backward()`` visits every node. ``chainer.grad(outputs, inputs)`` visits those that lead to
  ``inputs``: on each rank an input of the collective has to be among them or before them.
- Backwards are made of these same functions, so that with ``enable_double_backprop=True``
  derivatives of any order are there.
- Differentiated are float16, float32 and float64. Integers travel, and are no part of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chainer
import chainer.functions as F

from collective.communicator import Communicator
from collective.communicator.rows import split_sizes
from collective.training.adjoints import LINEAR, Step, length

from .adjoints import Fold, Lengths, Like, Linear, bare, check, record
from .functional_exchanges import all_to_all, recv, send

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]


def all_reduce(x: Any, comm: Communicator, op: str = "sum") -> Any:
    """Fold the ranks' arrays elementwise and give every rank the result.

    With ``G = Σ_r g_r``, an all-reduce itself, the gradient is for

    - ``sum``: ``G``; ``avg``: ``G / size``;
    - ``min``, ``max``: ``G`` where ``x_r`` is the extreme, divided by how many ranks hold it;
      zero elsewhere;
    - ``prod``: ``G · Π_{s≠r} x_s``, zeros among the factors included. All ranks' ``x`` are
      gathered for it: backward needs ``size`` times the memory of ``x``.

    Collective: every rank calls it, with one op, shape and dtype.

    Args:
        x: a variable or an array, of any shape.
        comm: the ranks.
        op: ``"sum"``, ``"avg"``, ``"prod"``, ``"min"`` or ``"max"``.

    Returns:
        A new variable like ``x``.

    Raises:
        InvalidArgumentError: another op, or ``x`` is no variable or array, or has none yet.
        DtypeError: ``avg`` of integers, or another type that is not differentiated. And as
            :meth:`Communicator.all_reduce`, then and in the backward pass.
    """
    check("all_reduce", x, op)

    def forward(x: Any) -> Any:
        return comm.all_reduce(x, op=op)

    if op in LINEAR:
        return record(Linear, Step(forward, lambda g: all_reduce(g, comm, op)), x)

    def backward(g: Any, x: Any, y: Any) -> Any:
        return all_reduce(g, comm) * _partial(x, y, comm, op)

    return record(Fold, Step(forward, backward), x)


def reduce(x: Any, comm: Communicator, root: int = 0, op: str = "sum") -> Any:
    """Fold the ranks' arrays elementwise and give the result to ``root``.

    The gradient is that of :func:`all_reduce` with ``G = g_root``, a broadcast.

    Collective: every rank calls it, with one root, op, shape and dtype.

    Args:
        x, comm, op: as in :func:`all_reduce`.
        root: the rank that gets the result.

    Returns:
        At the root a new variable like ``x``; elsewhere a delegate, of the dtype of ``x``.

    Raises:
        As :func:`all_reduce`.
    """
    check("reduce", x, op)

    def forward(x: Any) -> Any:
        return comm.reduce(x, root=root, op=op)

    x_like = Like(x)

    def adjoint(g: Any) -> Any:
        spread = _spread(g, comm, root, x_like)
        return spread / comm.size if op == "avg" else spread

    if op in LINEAR:
        return record(Linear, Step(forward, adjoint), x)

    def backward(g: Any, x: Any, y: Any) -> Any:
        both = F.stack([g, chainer.Variable(y)]) if comm.rank == root else g
        spread = _spread(both, comm, root, Like(x, (2, *x.shape)))
        return spread[0] * _partial(x, spread[1].array, comm, op)

    return record(Fold, Step(forward, backward), x)


def broadcast(x: Any, comm: Communicator, root: int = 0, *, like: Any = "numpy") -> Any:
    """Give every rank the array of ``root``.

    The gradient at the root is ``Σ_r g_r``, a reduce; that of another rank's ``x`` is zero.

    Collective: every rank calls it, with one root.

    Args:
        x: at the root, a variable or an array. Elsewhere None, or one of the root's shape and
            dtype, to which the zero gradient is to go; derivatives of higher order need one.
        comm: the ranks.
        root: the rank whose array it is.
        like: where ``x`` is None, ``"numpy"``, ``"cupy"`` or an array of the kind that the
            result is to be.

    Returns:
        A new variable, at the root too.

    Raises:
        As :meth:`Communicator.broadcast`.
    """
    if x is not None or comm.rank == root:
        check("broadcast", x)
    return _broadcast(x, comm, root, x, like)


def all_gather(
    x: Any, comm: Communicator, axis: int = 0, *, counts: Sequence[int] | None = None
) -> Any:
    """Join the ranks' arrays along an axis, in rank order, at every rank.

    The gradient is piece ``r`` of ``Σ_s g_s``, a reduce-scatter.

    Collective: every rank calls it, with one dtype and axis; shapes may differ along the axis.

    Args:
        x: a variable or an array; one of no dimensions counts as one of length 1.
        comm: the ranks.
        axis: the axis to join along.
        counts: the ranks' lengths along ``axis``, where all ranks know them. Without them the
            first backward exchanges them, in a message of 8 bytes a rank.

    Returns:
        A new variable.

    Raises:
        As :meth:`Communicator.all_gather`.
    """
    check("all_gather", x)
    lengths = Lengths(x, comm, axis, counts)

    def forward(x: Any) -> Any:
        return comm.all_gather(x, axis=axis, counts=counts)

    def adjoint(g: Any) -> Any:
        return reduce_scatter(g, comm, axis=axis, counts=lengths())

    return record(Linear, Step(forward, adjoint), x)


def gather(
    x: Any,
    comm: Communicator,
    root: int = 0,
    axis: int = 0,
    *,
    counts: Sequence[int] | None = None,
) -> Any:
    """Join the ranks' arrays along an axis, in rank order, at ``root``.

    The gradient is piece ``r`` of ``g_root``, a scatter.

    Collective: every rank calls it, with one root, dtype and axis.

    Args:
        x, comm, axis, counts: as in :func:`all_gather`.
        root: the rank that gets the result.

    Returns:
        At the root a new variable; elsewhere a delegate, of the dtype of ``x``.

    Raises:
        As :meth:`Communicator.gather`.
    """
    check("gather", x)
    lengths = Lengths(x, comm, axis, counts)

    def forward(x: Any) -> Any:
        return comm.gather(x, root=root, axis=axis, counts=counts)

    def adjoint(g: Any) -> Any:
        # Off the root g only ties the scatter to the graph, and says on which device.
        return scatter(g, comm, root, axis, counts=lengths())

    return record(Linear, Step(forward, adjoint), x)


def scatter(
    x: Any,
    comm: Communicator,
    root: int = 0,
    axis: int = 0,
    *,
    counts: Sequence[int] | None = None,
    like: Any = "numpy",
) -> Any:
    """Cut the array of ``root`` into pieces and give each rank one.

    The gradient at the root is the ``g_r`` joined, a gather; that of another rank's ``x`` is zero.

    Collective: every rank calls it, with one root and axis.

    Args:
        x: at the root, a variable or an array. Elsewhere None, or any to which the zero
            gradient is to go; derivatives of higher order need one.
        comm: the ranks.
        root: the rank whose array is cut.
        axis: the axis that is cut.
        counts: at the root, lengths of the pieces; by default as ``numpy.array_split`` cuts.
        like: as in :func:`broadcast`.

    Returns:
        Piece ``rank``, a new variable.

    Raises:
        As :meth:`Communicator.scatter`.
    """
    if x is not None or comm.rank == root:
        check("scatter", x)
    near = like if x is None else bare(x)

    def forward(x: Any) -> Any:
        source = x if comm.rank == root else None
        return comm.scatter(source, root=root, counts=counts, axis=axis, like=near)

    def adjoint(g: Any) -> Any:
        return gather(g, comm, root, axis)

    return record(Linear, Step(forward, adjoint, comm.rank == root), x, near)


def reduce_scatter(
    x: Any,
    comm: Communicator,
    op: str = "sum",
    axis: int = 0,
    *,
    counts: Sequence[int] | None = None,
) -> Any:
    """Fold the ranks' arrays elementwise and give each rank one piece of the result.

    The gradient is that of :func:`all_reduce` with ``G`` the ``g_r`` joined, an all-gather.

    Collective: every rank calls it, with one op, shape, dtype, axis and counts.

    Args:
        x, comm, op: as in :func:`all_reduce`.
        axis: the axis that is cut.
        counts: lengths of the pieces; by default as ``numpy.array_split`` cuts.

    Returns:
        Piece ``rank`` of the result, a new variable.

    Raises:
        As :func:`all_reduce`. ShapeError: the counts do not add up to the axis.
    """
    check("reduce_scatter", x, op)
    sizes = split_sizes("reduce_scatter", length(x, axis), comm.size, counts)

    def forward(x: Any) -> Any:
        return comm.reduce_scatter(x, op=op, axis=axis, counts=sizes)

    def adjoint(g: Any) -> Any:
        joined = all_gather(g, comm, axis, counts=sizes)
        return joined / comm.size if op == "avg" else joined

    if op in LINEAR:
        return record(Linear, Step(forward, adjoint), x)

    def backward(g: Any, x: Any, y: Any) -> Any:
        # With a new first axis: one from the end is where it was.
        at = axis + 1 if axis >= 0 else axis
        both = all_gather(F.stack([g, chainer.Variable(y)]), comm, at, counts=sizes)
        total = F.reshape(both[0], x.shape)
        return total * _partial(x, both[1].array.reshape(x.shape), comm, op)

    return record(Fold, Step(forward, backward), x)


# -- steps of several ------------------------------------------------------------------------


def _broadcast(template: Any, comm: Communicator, root: int, x: Any, like: Any) -> Any:
    """Broadcast; off the root ``template`` says what comes and ``x`` gets the zero gradient."""
    given = None if comm.rank == root else bare(template)
    near = bare(like)

    def forward(x: Any) -> Any:
        if comm.rank == root:
            return comm.broadcast(x, root=root).copy()
        return comm.broadcast(given, root=root, like=near)

    def adjoint(g: Any) -> Any:
        return reduce(g, comm, root)

    return record(Linear, Step(forward, adjoint, comm.rank == root), x, near)


def _spread(g: Any, comm: Communicator, root: int, like: Like) -> Any:
    """Broadcast the root's ``g``; elsewhere it ties the call to the graph, and ``like`` comes."""
    template = None if comm.rank == root else like.empty()
    return _broadcast(template, comm, root, g, "numpy")


def _partial(x: Any, y: Any, comm: Communicator, op: str) -> Any:
    """Return ``∂y/∂x`` of this rank's ``x``, elementwise, for ``y`` folded of all ranks'."""
    if op == "prod":
        rows = all_gather(F.expand_dims(x, 0), comm, counts=[1] * comm.size)
        return F.prod(F.concat([rows[: comm.rank], rows[comm.rank + 1 :]], 0), 0)
    holds = (x.array == y).astype(y.dtype)
    return holds / comm.all_reduce(holds)

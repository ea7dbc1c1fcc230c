"""Collectives inside ``jit`` that JAX differentiates: each backward pass is the adjoint collective.

``x_r``, ``y_r`` and ``L_r`` are the input, result and loss of rank ``r``. Each rank calls
``jax.grad`` on its ``L_r``. Together they differentiate ``L = Σ_r L_r``, and ``g_r = ∂L/∂y_r``.
Each docstring gives ``∂L/∂x_r``.

- The calls work inside ``jit``, ``grad``, ``vmap``, ``scan``, ``cond`` and ``while_loop``, and
  outside of them. XLA makes them in the order of the program.
- ``comm`` is fixed when JAX traces the call. None is the current communicator of that moment.
- JAX compiles shapes. So a result's shape follows from the arguments: from ``counts``, or from the
  rule that every rank passes an array of the same shape.
- Every rank has to differentiate the same calls: the result contributes to its loss, and ``x``
  depends on the argument that it differentiates. Otherwise that rank does not take part in the
  backward collective, and the other ranks wait for it. A call without a result on a rank
  (:func:`send`; :func:`reduce` and :func:`gather` off the root) returns a *delegate* there: a zero
  without dimensions, which has to be added to the loss.
- Forward mode (``jvp``, ``linearize``) makes the call a second time, with the tangents. Then the
  tangent of a result is ``Σ_r ∂y/∂x_r · t_r``, where ``t_r`` is the tangent that rank ``r`` passes.
- ``vmap`` makes one call with all elements. All ranks have to map over the same number. For
  gradients of each element, differentiate the mapped function: ``grad`` of ``vmap``.
- A program runs on one CPU device of its process. Several devices, and GPUs, are refused.
- JAX runs programs in the background. Calls of :class:`Communicator` on the same communicator wait
  until the programs have ended that their thread has started.
- ``jax.checkpoint`` is refused: it would make the calls a second time, on this rank only if other
  ranks do not use it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from collective import Communicator, InvalidArgumentError, RankError, ShapeError, UnsupportedError
from collective.algorithms.pieces import check_counts, split_sizes
from collective.inner import comm_or_current, pass_over
from collective.ops import NAMES, Op
from collective.request import call_site

from .traced import JitCall, bind

__all__ = [
    "all_gather", "all_reduce", "all_to_all", "barrier", "broadcast", "gather", "recv", "reduce",
    "reduce_scatter", "scan", "scatter", "send", "sendrecv",
]  # fmt: skip

pass_over(jax)


def all_reduce(x: Any, comm: Communicator | None = None, op: Op = "sum") -> jax.Array:
    """Fold the ranks' arrays elementwise and give every rank the result.

    With ``G = Σ_r g_r``, which is itself an all-reduce, the gradient is for

    - ``sum``: ``G``; ``avg``: ``G / size``;
    - ``min``, ``max``: ``G`` where ``x_r`` is the extreme, divided by the number of ranks that hold
      it; zero elsewhere;
    - ``prod``: ``G · Π_{s≠r} x_s``, correct even if factors are zero. A program that is
      differentiated gathers all ranks' ``x`` for it, in ``size`` times the memory of ``x``.

    Collective: every rank calls it, with the same op, shape and dtype.

    Args:
        x: array of any shape; it is differentiated if it is floating point or complex.
        comm: ranks that take part; None: those of the current communicator.
        op: ``"sum"``, ``"avg"``, ``"prod"``, ``"min"`` or ``"max"``; without a gradient also
            ``"band"``, ``"bor"``, ``"bxor"``, ``"land"`` and ``"lor"``.

    Returns:
        A new array like ``x``.

    Raises:
        InvalidArgumentError: the op is another one. Errors of the call itself are those of
            :meth:`Communicator.all_reduce`. JAX raises them as ``JaxRuntimeError``, whose text
            begins with their names.
    """
    comm = comm_or_current(comm, "all_reduce")
    _check_op("all_reduce", op)
    x = _array("all_reduce", x)
    return _fold(x, x.shape, op, _call("all_reduce", comm), _call("all_reduce", comm, op="sum"))


def reduce(x: Any, comm: Communicator | None = None, root: int = 0, op: Op = "sum") -> jax.Array:
    """Fold the ranks' arrays elementwise and give the result to ``root``.

    The gradient is that of :func:`all_reduce` with ``G = g_root``, a broadcast.

    Collective: every rank calls it, with the same root, op, shape and dtype.

    Args:
        x, comm, op: as in :func:`all_reduce`.
        root: rank that gets the result.

    Returns:
        At the root a new array like ``x``; on other ranks a delegate, of the dtype of ``x``.

    Raises:
        As :func:`all_reduce`. RankError: there is no such root.
    """
    comm = comm_or_current(comm, "reduce")
    _check_op("reduce", op)
    root, x = _check_rank("reduce", comm, "root", root), _array("reduce", x)
    at_root = comm.rank == root
    return _fold(
        x, x.shape if at_root else (), op,
        _call("reduce", comm, delegate=not at_root, root=root),
        _call("broadcast", comm, root=root),
    )  # fmt: skip


def scan(x: Any, comm: Communicator | None = None, op: Op = "sum") -> jax.Array:
    """Fold the arrays of ranks 0 to this one elementwise.

    The call has no derivative: differentiating it raises UnsupportedError.

    Collective: every rank calls it, with the same op, shape and dtype.

    Args:
        x, comm, op: as in :func:`all_reduce`.

    Returns:
        A new array like ``x``.

    Raises:
        As :func:`all_reduce`.
    """
    comm = comm_or_current(comm, "scan")
    _check_op("scan", op)
    x = _array("scan", x)
    return bind(x, _call("scan", comm, op=op), None, x.shape)


def broadcast(x: Any, comm: Communicator | None = None, root: int = 0) -> jax.Array:
    """Give every rank the array of ``root``.

    The gradient at the root is ``Σ_r g_r``, a reduce; that of another rank's ``x`` is zero.

    Collective: every rank calls it, with the same root.

    Args:
        x: at the root, an array. On other ranks an array of the root's shape and dtype, whose
            values do not matter, and which gets the zero gradient.
        comm: ranks that take part; None: those of the current communicator.
        root: rank whose array is sent.

    Returns:
        A new array on every rank, the root included.

    Raises:
        RankError: there is no such root. InvalidArgumentError: ``x`` is None.
    """
    comm = comm_or_current(comm, "broadcast")
    root, x = _check_rank("broadcast", comm, "root", root), _array("broadcast", x)
    return bind(
        x, _call("broadcast", comm, root=root),
        _call("reduce", comm, delegate=comm.rank != root, root=root, op="sum"), x.shape,
    )  # fmt: skip


def all_gather(
    x: Any, comm: Communicator | None = None, axis: int = 0, *, counts: Sequence[int] | None = None
) -> jax.Array:
    """Join the ranks' arrays along an axis, in rank order, at every rank.

    The gradient is piece ``r`` of ``Σ_s g_s``, a reduce-scatter.

    Collective: every rank calls it, with the same dtype and axis.

    Args:
        x: array; one without dimensions counts as one of length 1.
        comm: ranks that take part; None: those of the current communicator.
        axis: axis to join along.
        counts: lengths of the ranks' arrays along ``axis``; None: all have that of ``x``.

    Returns:
        A new array.

    Raises:
        ShapeError: there is no such axis, or the counts do not fit ``x``.
    """
    comm = comm_or_current(comm, "all_gather")
    x, axis = _along("all_gather", x, axis)
    lengths = _gathered("all_gather", comm, x, axis, counts)
    return bind(
        x, _call("all_gather", comm, axis=axis),
        _call("reduce_scatter", comm, op="sum", axis=axis, counts=lengths),
        _with(x, axis, sum(lengths)),
    )  # fmt: skip


def gather(
    x: Any,
    comm: Communicator | None = None,
    root: int = 0,
    axis: int = 0,
    *,
    counts: Sequence[int] | None = None,
) -> jax.Array:
    """Join the ranks' arrays along an axis, in rank order, at ``root``.

    The gradient is piece ``r`` of ``g_root``, a scatter.

    Collective: every rank calls it, with the same root, dtype and axis.

    Args:
        x, comm, axis, counts: as in :func:`all_gather`.
        root: rank that gets the result.

    Returns:
        At the root a new array; on other ranks a delegate, of the dtype of ``x``.

    Raises:
        As :func:`all_gather`. RankError: there is no such root.
    """
    comm = comm_or_current(comm, "gather")
    root, (x, axis) = _check_rank("gather", comm, "root", root), _along("gather", x, axis)
    at_root = comm.rank == root
    lengths = _gathered("gather", comm, x, axis, counts)
    return bind(
        x, _call("gather", comm, delegate=not at_root, root=root, axis=axis),
        _scatter(comm, root, axis, lengths), _with(x, axis, sum(lengths)) if at_root else (),
    )  # fmt: skip


def scatter(
    x: Any,
    comm: Communicator | None = None,
    root: int = 0,
    axis: int = 0,
    *,
    counts: Sequence[int] | None = None,
) -> jax.Array:
    """Cut the array of ``root`` into pieces and give each rank one piece.

    The gradient at the root is the ``g_r`` joined, a gather; that of another rank's ``x`` is zero.

    Collective: every rank calls it, with the same root, axis and counts.

    Args:
        x: at the root, an array. On other ranks an array of the root's shape and dtype, whose
            values do not matter, and which gets the zero gradient.
        comm: ranks that take part; None: those of the current communicator.
        root: rank whose array is cut.
        axis: axis that is cut.
        counts: lengths of the pieces; by default as ``numpy.array_split`` cuts.

    Returns:
        Piece ``rank``, a new array.

    Raises:
        RankError: there is no such root. ShapeError: there is no such axis, or the counts do not
            add up to it. InvalidArgumentError: ``x`` is None.
    """
    comm = comm_or_current(comm, "scatter")
    root, (x, axis) = _check_rank("scatter", comm, "root", root), _along("scatter", x, axis)
    pieces = _cut("scatter", comm, x, axis, counts)
    return bind(
        x, _scatter(comm, root, axis, pieces),
        _call("gather", comm, delegate=comm.rank != root, root=root, axis=axis),
        _with(x, axis, pieces[comm.rank]),
    )  # fmt: skip


def reduce_scatter(
    x: Any,
    comm: Communicator | None = None,
    op: Op = "sum",
    axis: int = 0,
    *,
    counts: Sequence[int] | None = None,
) -> jax.Array:
    """Fold the ranks' arrays elementwise and give each rank one piece of the result.

    The gradient is that of :func:`all_reduce` with ``G`` the ``g_r`` joined, an all-gather.

    Collective: every rank calls it, with the same op, shape, dtype, axis and counts.

    Args:
        x, comm, op: as in :func:`all_reduce`.
        axis: axis that is cut.
        counts: lengths of the pieces; by default as ``numpy.array_split`` cuts.

    Returns:
        Piece ``rank`` of the result, a new array.

    Raises:
        As :func:`all_reduce`. ShapeError: the counts do not add up to the axis.
    """
    comm = comm_or_current(comm, "reduce_scatter")
    _check_op("reduce_scatter", op)
    x, axis = _along("reduce_scatter", x, axis)
    pieces = _cut("reduce_scatter", comm, x, axis, counts)
    return _fold(
        x, _with(x, axis, pieces[comm.rank]), op,
        _call("reduce_scatter", comm, axis=axis, counts=pieces),
        _call("all_gather", comm, axis=axis),
    )  # fmt: skip


def all_to_all(
    x: Any,
    comm: Communicator | None = None,
    axis: int = 0,
    *,
    counts: Sequence[int] | None = None,
    recv_counts: Sequence[int] | None = None,
) -> jax.Array:
    """Cut every rank's array into pieces, send piece ``j`` to rank ``j``, join the received pieces.

    The gradient is the all-to-all that returns each piece of ``g`` to its sender. Its counts are
    the transpose of the forward counts.

    Collective: every rank calls it, with the same dtype and axis.

    Args:
        x: array; one without dimensions counts as one of length 1.
        comm: ranks that take part; None: those of the current communicator.
        axis: axis to cut and to join along.
        counts: lengths of the pieces that this rank sends; by default as ``numpy.array_split``
            cuts, and all ranks' arrays have one shape.
        recv_counts: lengths of the pieces that this rank receives. Pass both or neither.

    Returns:
        The pieces for this rank, in the order of their senders, as a new array.

    Raises:
        InvalidArgumentError: only one of ``counts`` and ``recv_counts`` is given. ShapeError: the
            counts do not fit ``x``.
    """
    comm = comm_or_current(comm, "all_to_all")
    x, axis = _along("all_to_all", x, axis)
    if (counts is None) != (recv_counts is None):
        raise InvalidArgumentError(
            "all_to_all: one of counts and recv_counts is missing. JAX compiles the shape of the "
            "result, so pass both or neither."
        )
    pieces = _cut("all_to_all", comm, x, axis, counts)
    if recv_counts is None:
        received = (pieces[comm.rank],) * comm.size
    else:
        received = tuple(check_counts("all_to_all", recv_counts, comm.size))
    return bind(
        x, _call("all_to_all", comm, axis=axis, counts=pieces),
        _call("all_to_all", comm, axis=axis, counts=received), _with(x, axis, sum(received)),
    )  # fmt: skip


def send(x: Any, dst: int, comm: Communicator | None = None, tag: int = 0) -> jax.Array:
    """Send an array to rank ``dst``.

    The gradient is ``g_dst``, which the backward pass receives from ``dst``, with the same tag.

    Args:
        x: array of at most 12 dimensions.
        dst: another rank, which calls :func:`recv`.
        comm: ranks that take part; None: those of the current communicator.
        tag: tag that the receiver uses.

    Returns:
        A delegate of the dtype of ``x``. The backward pass receives when it reaches the delegate.

    Raises:
        RankError: there is no such rank.
    """
    comm = comm_or_current(comm, "send")
    dst = _check_rank("send", comm, "dst", dst)
    return bind(
        _array("send", x), _call("send", comm, delegate=True, dst=dst, tag=tag),
        _call("recv", comm, src=dst, tag=tag), (),
    )  # fmt: skip


def recv(
    comm: Communicator | None = None,
    src: int = -1,
    tag: int = 0,
    *,
    like: Any,
    after: Any = None,
) -> jax.Array:
    """Receive an array from rank ``src``.

    The backward pass sends ``g`` to ``src``, where it is the gradient of the array that was sent.
    It runs if ``like`` or ``after`` depends on the argument that is differentiated.

    Args:
        comm: ranks that take part; None: those of the current communicator.
        src: another rank, which calls :func:`send`. Name it: the default raises an error.
        tag: tag that the sender uses.
        like: array or ``jax.ShapeDtypeStruct`` of the sender's shape and dtype, since JAX compiles
            shapes. The values of an array do not matter, and it gets the zero gradient.
        after: array, such as the delegate of an earlier :func:`send`, on which this result is made
            to depend, with gradient zero.

    Returns:
        A new array.

    Raises:
        RankError: ``src`` is no rank.
    """
    comm = comm_or_current(comm, "recv")
    src = _check_rank("recv", comm, "src", src)
    template = _template(like)
    if after is not None:
        # Add zero times the sum, so that the result depends on it under every transformation.
        zero = 0 * jnp.sum(_array("recv", after)).astype(template.dtype)
        template = (template + zero).astype(template.dtype)
    return bind(
        template, _call("recv", comm, src=src, tag=tag),
        _call("send", comm, delegate=True, dst=src, tag=tag), template.shape,
    )  # fmt: skip


def sendrecv(
    x: Any, dst: int, src: int, comm: Communicator | None = None, tag: int = 0, *, like: Any = None
) -> jax.Array:
    """Send an array to rank ``dst``, and receive one from rank ``src``.

    The gradient is ``g_dst``: the backward pass sends ``g`` to ``src`` and receives from ``dst``.

    Args:
        x: array to send.
        dst, src: ranks, which call :func:`sendrecv` as well.
        comm: ranks that take part; None: those of the current communicator.
        tag: tag of both messages.
        like: array or ``jax.ShapeDtypeStruct`` of the shape that arrives; None: that of ``x``.

    Returns:
        A new array.

    Raises:
        RankError: ``dst`` or ``src`` is no rank. InvalidArgumentError: ``like`` has another dtype.
    """
    comm = comm_or_current(comm, "sendrecv")
    dst = _check_rank("sendrecv", comm, "dst", dst)
    src = _check_rank("sendrecv", comm, "src", src)
    x = _array("sendrecv", x)
    if like is not None and like.dtype != x.dtype:
        raise InvalidArgumentError(
            f"sendrecv: like is of {like.dtype} (expected the dtype of x, {x.dtype}). Use send and "
            "recv for arrays of two dtypes."
        )
    return bind(
        x, _call("sendrecv", comm, dst=dst, src=src, tag=tag),
        _call("sendrecv", comm, dst=src, src=dst, tag=tag), x.shape if like is None else like.shape,
    )  # fmt: skip


def barrier(comm: Communicator | None = None) -> None:
    """Wait until every rank has reached this call.

    Collective: every rank calls it.

    Args:
        comm: ranks that take part; None: those of the current communicator.
    """
    comm = comm_or_current(comm, "barrier")
    done = bind(jnp.zeros((), np.uint8), _call("barrier", comm, delegate=True), None, ())
    jax.block_until_ready(done)  # outside jit: JAX makes the call in the background


# -- helpers -----------------------------------------------------------------------------------


def _call(name: str, comm: Communicator, *, delegate: bool = False, **arguments: Any) -> JitCall:
    return JitCall(name, comm, tuple(arguments.items()), call_site(), delegate)


def _scatter(comm: Communicator, root: int, axis: int, pieces: Sequence[int]) -> JitCall:
    call = _call("scatter", comm, root=root, axis=axis)
    return call.with_(counts=tuple(pieces)) if comm.rank == root else call


def _fold(x: Any, shape: Sequence[int], op: Op, call: JitCall, adjoint: JitCall) -> jax.Array:
    """Fold the ranks' arrays; ``call`` lacks the op, and ``adjoint`` is that of a sum."""
    if op == "sum":
        return bind(x, call.with_(op="sum"), adjoint, shape)

    def forward(primals: Any, tangents: Any) -> Any:
        (x,), (tangent,) = primals, tangents
        share = (tangent * _partial(call, op, x)).astype(x.dtype)
        return fold(x), bind(share, call.with_(op="sum"), adjoint, shape)

    fold: Any = jax.custom_jvp(lambda x: bind(x, call.with_(op=op), None, shape))
    fold.defjvp(forward)
    return fold(x)


def _partial(call: JitCall, op: Op, x: Any) -> Any:
    """Return the derivative of a fold by this rank's ``x``, elementwise."""
    comm = call.comm
    if op == "avg":
        return 1 / comm.size
    if op in ("min", "max"):
        # Ranks that hold the same extreme share its derivative equally.
        x = jax.lax.stop_gradient(x)
        held = (x == all_reduce(x, comm, op)).astype(x.dtype)
        return held / all_reduce(held, comm)
    if op == "prod":
        whole = all_gather(x[None], comm)
        return jnp.prod(jnp.concatenate([whole[: comm.rank], whole[comm.rank + 1 :]]), axis=0)
    raise UnsupportedError(
        f"{call.name}: op={op!r} has no gradient (expected sum, avg, prod, min, max)"
    )


def _template(like: Any) -> Any:
    if isinstance(like, jax.ShapeDtypeStruct):
        return jnp.zeros(like.shape, like.dtype)
    return _array("recv", like)


def _array(name: str, x: Any) -> jax.Array:
    if x is None:
        raise InvalidArgumentError(
            f"{name}: the array is None. JAX compiles shapes, so pass an array of the right shape "
            "and dtype on every rank; its values do not matter where they are not sent."
        )
    if not jax.tree_util.all_leaves([x]):
        raise InvalidArgumentError(
            f"{name}: got a {type(x).__name__} (expected one array). Call jax.tree.map with a "
            f"function that calls {name} for each array."
        )
    return jnp.asarray(x)


def _check_op(name: str, op: Op) -> None:
    if op not in NAMES:
        raise InvalidArgumentError(f"{name}: op={op!r} (expected one of {', '.join(NAMES)})")


def _check_rank(name: str, comm: Communicator, which: str, rank: Any) -> int:
    """Return a rank as an integer, which an array of JAX's may have been."""
    try:
        number = operator.index(rank)
    except TypeError:
        raise RankError(
            f"{name}: {which} is {rank!r} (expected an integer), on rank {comm.rank}. Inside jit, "
            "pass an integer of Python, which JAX knows when it traces the call."
        ) from None
    if not 0 <= number < comm.size:
        raise RankError(
            f"{name}: {which}={number} is no rank of this communicator (expected 0 to "
            f"{comm.size - 1}), on rank {comm.rank}. Inside jit, name the rank."
        )
    return number


def _along(name: str, x: Any, axis: int) -> tuple[Any, int]:
    """Return an array of at least one dimension, and the number of its axis, from 0."""
    x = _array(name, x)
    x = x.reshape(1) if x.ndim == 0 else x
    if not -x.ndim <= axis < x.ndim:
        raise ShapeError(f"{name}: axis={axis} of an array of {x.ndim} dimensions")
    return x, axis % x.ndim


def _with(x: Any, axis: int, length: int) -> tuple[int, ...]:
    return (*x.shape[:axis], length, *x.shape[axis + 1 :])


def _gathered(
    name: str, comm: Communicator, x: Any, axis: int, counts: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the lengths of the ranks' arrays."""
    if counts is None:
        return (x.shape[axis],) * comm.size
    lengths = tuple(check_counts(name, counts, comm.size))
    if lengths[comm.rank] != x.shape[axis]:
        raise ShapeError(
            f"{name}: the array has length {x.shape[axis]} along axis {axis} (expected "
            f"counts[{comm.rank}] = {lengths[comm.rank]}), on rank {comm.rank}"
        )
    return lengths


def _cut(
    name: str, comm: Communicator, x: Any, axis: int, counts: Sequence[int] | None
) -> tuple[int, ...]:
    """Return the lengths of an array's pieces."""
    return tuple(split_sizes(name, x.shape[axis], comm.size, counts))

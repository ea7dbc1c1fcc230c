"""Collectives that PyTorch differentiates: the backward of each is its adjoint collective.

With ``x_r``, ``y_r`` and ``L_r`` the input, result and loss of rank ``r``, what is differentiated
is ``L = Σ_r L_r``, and ``g_r = ∂L/∂y_r``. Each docstring says what ``∂L/∂x_r`` is.

- Every rank's result has to contribute to its loss, or that rank does not take part in the
  backward collective and the others wait for it. What has no result on a rank (:func:`send`;
  :func:`reduce` and :func:`gather` off the root) returns a *delegate* there, a zero of no
  dimensions, to be added to the loss.
- Results depend on other ranks' tensors. So where gradients are enabled they require one on
  every rank, whether ``x`` does or not, and a rank with a frozen ``x`` takes part all the same.
- Backward collectives run in the reverse order of the forward calls, which therefore have to be
  made in one order on all ranks. Autograd runs, of the nodes that are ready, the one created
  last; a node is created after those it depends on, so on one device that is the reverse order of
  creation, however the results were combined afterwards.
- ``backward()`` visits every node. ``torch.autograd.grad(loss, inputs)`` visits those that lead to
  ``inputs``: on each rank an input of the collective has to be among them or before them.
- Backwards are made of these same functions, so that derivatives of any order are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from collective.communicator import Communicator
from collective.ops import Op
from collective.training import differentiable

from .tape import Tape

__all__ = [
    "all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "recv", "reduce",
    "reduce_scatter", "scatter", "send",
]  # fmt: skip

_TAPE: differentiable.Tape[torch.Tensor] = Tape()


def all_reduce(x: torch.Tensor, comm: Communicator, op: Op = "sum") -> torch.Tensor:
    """Fold the ranks' tensors elementwise and give every rank the result.

    With ``G = Σ_r g_r``, an all-reduce itself, the gradient is for

    - ``sum``: ``G``; ``avg``: ``G / size``;
    - ``min``, ``max``: ``G`` where ``x_r`` is the extreme, divided by how many ranks hold it, as
      ``torch.amax`` shares it; zero elsewhere;
    - ``prod``: ``G · Π_{s≠r} x̄_s``, zeros among the factors included. All ranks' ``x`` are
      gathered for it: backward needs ``size`` times the memory of ``x``.

    Collective: every rank calls it, with one op, shape and dtype.

    Args:
        x: of any shape and strides; floating point or complex to be differentiated.
        comm: the ranks.
        op: ``"sum"``, ``"avg"``, ``"prod"``, ``"min"`` or ``"max"``.

    Returns:
        A new tensor like ``x``.

    Raises:
        InvalidArgumentError: another op, or ``x`` is no tensor; and as
            :meth:`Communicator.all_reduce`, then and in the backward pass.
    """
    return differentiable.all_reduce(_TAPE, x, comm, op)


def reduce(x: torch.Tensor, comm: Communicator, root: int = 0, op: Op = "sum") -> torch.Tensor:
    """Fold the ranks' tensors elementwise and give the result to ``root``.

    The gradient is that of :func:`all_reduce` with ``G = g_root``, a broadcast.

    Collective: every rank calls it, with one root, op, shape and dtype.

    Args:
        x, comm, op: as in :func:`all_reduce`.
        root: the rank that gets the result.

    Returns:
        At the root a new tensor like ``x``; elsewhere a delegate, of the dtype of ``x``.

    Raises:
        As :func:`all_reduce`.
    """
    return differentiable.reduce(_TAPE, x, comm, root, op)


def broadcast(
    x: torch.Tensor | None, comm: Communicator, root: int = 0, *, like: Any = "torch"
) -> torch.Tensor:
    """Give every rank the tensor of ``root``.

    The gradient at the root is ``Σ_r g_r``, a reduction to it; that of another's ``x`` is zero.

    Collective: every rank calls it, with one root.

    Args:
        x: at the root, a tensor. Elsewhere one of its shape and dtype, whose values do not
            matter, or None, which costs a message on some transports. Derivatives of higher
            order need it everywhere: they go by the zero gradient.
        comm: the ranks.
        root: the rank whose tensor it is.
        like: where ``x`` is None, a tensor on the device where the result is to be.

    Returns:
        A new tensor on every rank, the root included.

    Raises:
        As :meth:`Communicator.broadcast`.
    """
    return differentiable.broadcast(_TAPE, x, comm, root, like)


def all_gather(
    x: torch.Tensor, comm: Communicator, axis: int = 0, *, counts: Sequence[int] | None = None
) -> torch.Tensor:
    """Join the ranks' tensors along an axis, in rank order, at every rank.

    The gradient is piece ``r`` of ``Σ_s g_s``, a reduce-scatter.

    Collective: every rank calls it, with one dtype and axis; shapes may differ along the axis.

    Args:
        x: a tensor; one of no dimensions counts as one of length 1.
        comm: the ranks.
        axis: the axis to join along.
        counts: the ranks' lengths along ``axis``, where all ranks know them. Without them the
            first backward exchanges them, in a message of 8 bytes a rank.

    Returns:
        A new tensor.

    Raises:
        As :meth:`Communicator.all_gather`.
    """
    return differentiable.all_gather(_TAPE, x, comm, axis, counts)


def gather(
    x: torch.Tensor,
    comm: Communicator,
    root: int = 0,
    axis: int = 0,
    *,
    counts: Sequence[int] | None = None,
) -> torch.Tensor:
    """Join the ranks' tensors along an axis, in rank order, at ``root``.

    The gradient is piece ``r`` of ``g_root``, a scatter.

    Collective: every rank calls it, with one root, dtype and axis.

    Args:
        x, comm, axis, counts: as in :func:`all_gather`.
        root: the rank that gets the result.

    Returns:
        At the root a new tensor; elsewhere a delegate, of the dtype of ``x``.

    Raises:
        As :meth:`Communicator.gather`.
    """
    return differentiable.gather(_TAPE, x, comm, root, axis, counts)


def scatter(
    x: torch.Tensor | None,
    comm: Communicator,
    root: int = 0,
    axis: int = 0,
    *,
    counts: Sequence[int] | None = None,
    like: Any = "torch",
) -> torch.Tensor:
    """Cut the tensor of ``root`` into pieces and give each rank one.

    The gradient at the root is the ``g_r`` joined, a gather; that of another rank's ``x`` is zero.

    Collective: every rank calls it, with one root and axis.

    Args:
        x: at the root, a tensor. Elsewhere None, or any tensor to which the zero gradient is to
            go; derivatives of higher order need one.
        comm: the ranks.
        root: the rank whose tensor is cut.
        axis: the axis that is cut.
        counts: at the root, lengths of the pieces; by default as ``numpy.array_split`` cuts.
        like: where ``x`` is None, a tensor on the device where the result is to be.

    Returns:
        Piece ``rank``, a new tensor.

    Raises:
        As :meth:`Communicator.scatter`.
    """
    return differentiable.scatter(_TAPE, x, comm, root, axis, counts, like)


def reduce_scatter(
    x: torch.Tensor,
    comm: Communicator,
    op: Op = "sum",
    axis: int = 0,
    *,
    counts: Sequence[int] | None = None,
) -> torch.Tensor:
    """Fold the ranks' tensors elementwise and give each rank one piece of the result.

    The gradient is that of :func:`all_reduce` with ``G`` the ``g_r`` joined, an all-gather.

    Collective: every rank calls it, with one op, shape, dtype, axis and counts.

    Args:
        x, comm, op: as in :func:`all_reduce`.
        axis: the axis that is cut.
        counts: lengths of the pieces; by default as ``numpy.array_split`` cuts.

    Returns:
        Piece ``rank`` of the result, a new tensor.

    Raises:
        As :func:`all_reduce`. ShapeError: the counts do not add up to the axis.
    """
    return differentiable.reduce_scatter(_TAPE, x, comm, op, axis, counts)


def all_to_all(
    x: torch.Tensor,
    comm: Communicator,
    axis: int = 0,
    *,
    counts: Sequence[int] | None = None,
    recv_counts: Sequence[int] | None = None,
) -> torch.Tensor:
    """Cut every rank's tensor into pieces, send piece ``j`` to rank ``j``, join what comes.

    The gradient is the all-to-all that takes each piece of ``g`` back to where it came from: its
    counts are the transpose of these.

    Collective: every rank calls it, with one dtype and axis; shapes may differ along the axis.

    Args:
        x: a tensor; one of no dimensions counts as one of length 1.
        comm: the ranks.
        axis: the axis to cut and to join along.
        counts: lengths of the pieces that this rank sends; ranks may differ. By default as
            ``numpy.array_split`` cuts.
        recv_counts: lengths of the pieces that this rank receives, given on all ranks or none.
            Without them the first backward exchanges them.

    Returns:
        The pieces for this rank, in the order of their senders, as a new tensor.

    Raises:
        As :meth:`Communicator.all_to_all`.
    """
    return differentiable.all_to_all(_TAPE, x, comm, axis, counts, recv_counts)


def send(x: torch.Tensor, dst: int, comm: Communicator, tag: int = 0) -> torch.Tensor:
    """Send a tensor to rank ``dst``.

    The gradient is ``g_dst``, received from there in the backward pass, with the same tag.

    Args:
        x: a tensor of at most 12 dimensions.
        dst: another rank, which calls :func:`recv`.
        comm: the ranks.
        tag: the receiver's.

    Returns:
        A delegate of the dtype of ``x``: backward receives when it comes to it.

    Raises:
        As :meth:`Communicator.send`.
    """
    return differentiable.send(_TAPE, x, dst, comm, tag)


def recv(
    comm: Communicator,
    src: int,
    tag: int = 0,
    *,
    like: Any = "torch",
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    """Receive a tensor from rank ``src``.

    Backward sends ``g`` to ``src``, where it is the gradient of what was sent.

    Args:
        comm: the ranks.
        src: another rank, which calls :func:`send`; not ``ANY_SOURCE``.
        tag: the sender's.
        like: a tensor on the device where the result is to be.
        after: a tensor, as a delegate of an earlier :func:`send`, on which this result is made to
            depend, with gradient zero. Backward of what led to it waits for this one's, and
            ``torch.autograd.grad`` and derivatives of higher order find the way through it.

    Returns:
        A new tensor of the sender's shape and dtype.

    Raises:
        RankError: ``src`` is ``ANY_SOURCE``, to whom no gradient could be sent. And as
            :meth:`Communicator.recv`.
    """
    return differentiable.recv(_TAPE, comm, src, tag, like, after)

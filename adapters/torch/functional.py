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
from collective.communicator.rows import split_sizes
from collective.training.adjoints import LINEAR, Step, length

from .adjoints import Fold, Lengths, Like, Linear, check, record
from .messages import recv, send

__all__ = [
    "all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "recv", "reduce",
    "reduce_scatter", "scatter", "send",
]  # fmt: skip


def all_reduce(x: torch.Tensor, comm: Communicator, op: str = "sum") -> torch.Tensor:
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
    check("all_reduce", x, op)

    def forward(x: Any) -> Any:
        return comm.all_reduce(x, op=op)

    if op in LINEAR:
        return record(Linear, Step(forward, lambda g: all_reduce(g, comm, op)), x)

    def backward(g: Any, x: Any, y: Any) -> Any:
        return all_reduce(g, comm) * _partial(x, y, comm, op)

    return record(Fold, Step(forward, backward), x)


def reduce(x: torch.Tensor, comm: Communicator, root: int = 0, op: str = "sum") -> torch.Tensor:
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
        both = torch.stack([g, y]) if comm.rank == root else g
        total, y = _spread(both, comm, root, Like(x, (2, *x.shape)))
        return total * _partial(x, y.detach(), comm, op)

    return record(Fold, Step(forward, backward), x)


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
    if x is not None or comm.rank == root:
        check("broadcast", x)
    return _broadcast(x, comm, root, x, like)


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
    check("all_gather", x)
    lengths = Lengths(x, comm, axis, counts)

    def forward(x: Any) -> Any:
        return comm.all_gather(x, axis=axis, counts=counts)

    def adjoint(g: Any) -> Any:
        return reduce_scatter(g, comm, axis=axis, counts=lengths())

    return record(Linear, Step(forward, adjoint), x)


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
    check("gather", x)
    lengths = Lengths(x, comm, axis, counts)

    def forward(x: Any) -> Any:
        return comm.gather(x, root=root, axis=axis, counts=counts)

    def adjoint(g: Any) -> Any:
        # Off the root g only ties the scatter to the graph, and says on which device.
        return scatter(g, comm, root, axis, counts=lengths(), like=g)

    return record(Linear, Step(forward, adjoint), x)


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
    if x is not None or comm.rank == root:
        check("scatter", x)

    def forward(x: Any) -> Any:
        source = x if comm.rank == root else None
        near = like if x is None else x
        return comm.scatter(source, root=root, counts=counts, axis=axis, like=near)

    def adjoint(g: Any) -> Any:
        return gather(g, comm, root, axis)

    return record(Linear, Step(forward, adjoint, comm.rank == root), x)


def reduce_scatter(
    x: torch.Tensor,
    comm: Communicator,
    op: str = "sum",
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
        total, y = all_gather(torch.stack([g, y]), comm, at, counts=sizes)
        return total.reshape(x.shape) * _partial(x, y.detach().reshape(x.shape), comm, op)

    return record(Fold, Step(forward, backward), x)


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
    check("all_to_all", x)
    sends = split_sizes("all_to_all", length(x, axis), comm.size, counts)
    receives = [] if recv_counts is None else list(recv_counts)
    device = x.device

    def forward(x: Any) -> Any:
        return comm.all_to_all(x, counts=sends, axis=axis)

    def adjoint(g: Any) -> Any:
        if not receives:
            told = comm.all_to_all(torch.tensor(sends, device=device))
            receives.extend(told.tolist())
        return all_to_all(g, comm, axis, counts=receives, recv_counts=sends)

    return record(Linear, Step(forward, adjoint), x)


# -- steps of several ------------------------------------------------------------------------


def _broadcast(
    template: torch.Tensor | None, comm: Communicator, root: int, x: torch.Tensor | None, like: Any
) -> torch.Tensor:
    """Broadcast; off the root ``template`` says what comes and ``x`` gets the zero gradient."""
    given = None if comm.rank == root or template is None else template.detach()

    def forward(x: Any) -> Any:
        if comm.rank == root:
            return comm.broadcast(x, root=root).clone()
        return comm.broadcast(given, root=root, like=like)

    def adjoint(g: Any) -> Any:
        return reduce(g, comm, root)

    return record(Linear, Step(forward, adjoint, comm.rank == root), x)


def _spread(g: torch.Tensor, comm: Communicator, root: int, like: Like) -> torch.Tensor:
    """Broadcast the root's ``g``; elsewhere it ties the call to the graph, and ``like`` comes."""
    template = None if comm.rank == root else like.empty()
    return _broadcast(template, comm, root, g, "torch")


def _partial(x: torch.Tensor, y: torch.Tensor, comm: Communicator, op: str) -> torch.Tensor:
    """Return ``∂y/∂x`` of this rank's ``x``, elementwise, for ``y`` folded of all ranks'."""
    if op == "prod":
        rows = all_gather(x.unsqueeze(0), comm, counts=[1] * comm.size)
        others = torch.cat([rows[: comm.rank], rows[comm.rank + 1 :]])
        return others.prod(0).conj()
    holds = (x.detach() == y).to(y.dtype)
    share: torch.Tensor = holds / comm.all_reduce(holds)
    return share

"""Differentiable calls between pairs of ranks; the rest of :mod:`.functional`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collective.communicator import Communicator
from collective.communicator.rows import split_sizes
from collective.training.adjoints import Step, check_source, length

from .adjoints import Linear, bare, check, module_of, record

__all__ = ["all_to_all", "recv", "send"]


def all_to_all(
    x: Any,
    comm: Communicator,
    axis: int = 0,
    *,
    counts: Sequence[int] | None = None,
    recv_counts: Sequence[int] | None = None,
) -> Any:
    """Cut every rank's array into pieces, send piece ``j`` to rank ``j``, join what comes.

    The gradient is the all-to-all that takes each piece of ``g`` back to where it came from: its
    counts are the transpose of these.

    Collective: every rank calls it, with one dtype and axis; shapes may differ along the axis.

    Args:
        x: a variable or an array; one of no dimensions counts as one of length 1.
        comm: the ranks.
        axis: the axis to cut and to join along.
        counts: lengths of the pieces that this rank sends; ranks may differ. By default as
            ``numpy.array_split`` cuts.
        recv_counts: lengths of the pieces that this rank receives, given on all ranks or none.
            Without them the first backward exchanges them.

    Returns:
        The pieces for this rank, in the order of their senders, as a new variable.

    Raises:
        As :meth:`Communicator.all_to_all`.
    """
    check("all_to_all", x)
    sends = split_sizes("all_to_all", length(x, axis), comm.size, counts)
    receives = [] if recv_counts is None else list(recv_counts)
    xp = module_of(x)

    def forward(x: Any) -> Any:
        return comm.all_to_all(x, counts=sends, axis=axis)

    def adjoint(g: Any) -> Any:
        if not receives:
            told = comm.all_to_all(xp.array(sends))
            receives.extend(told.tolist())
        return all_to_all(g, comm, axis, counts=receives, recv_counts=sends)

    return record(Linear, Step(forward, adjoint), x)


def send(x: Any, dst: int, comm: Communicator, tag: int = 0) -> Any:
    """Send an array to rank ``dst``.

    The gradient is ``g_dst``, received from there in the backward pass, with the same tag.

    Args:
        x: a variable or an array of at most 12 dimensions.
        dst: another rank, which calls :func:`recv`.
        comm: the ranks.
        tag: the receiver's.

    Returns:
        A delegate of the dtype of ``x``: backward receives when it comes to it.

    Raises:
        As :meth:`Communicator.send`.
    """
    check("send", x)

    def forward(x: Any) -> Any:
        comm.send(x, dst, tag=tag)

    def adjoint(g: Any) -> Any:
        return recv(comm, dst, tag, like=bare(g), after=g)

    return record(Linear, Step(forward, adjoint), x)


def recv(
    comm: Communicator, src: int, tag: int = 0, *, like: Any = "numpy", after: Any = None
) -> Any:
    """Receive an array from rank ``src``.

    Backward sends ``g`` to ``src``, where it is the gradient of what was sent.

    Args:
        comm: the ranks.
        src: another rank, which calls :func:`send`; not ``ANY_SOURCE``.
        tag: the sender's.
        like: ``"numpy"``, ``"cupy"`` or an array of the kind that the result is to be.
        after: a variable, as a delegate of an earlier :func:`send`, on which this result is
            made to depend, with gradient zero. Backward of what led to it waits for this one's,
            and ``chainer.grad`` and derivatives of higher order find the way through it.

    Returns:
        A new variable of the sender's shape and dtype.

    Raises:
        RankError: ``src`` is ``ANY_SOURCE``, to whom no gradient could be sent. And as
            :meth:`Communicator.recv`.
    """
    check_source(comm, src)
    if after is not None:
        check("recv", after)
    near = bare(like)

    def forward(after: Any) -> Any:
        found = comm.recv(None, src, tag=tag, like=near)
        check("recv", found)
        return found

    return record(Linear, Step(forward, lambda g: send(g, src, comm, tag), False), after, near)

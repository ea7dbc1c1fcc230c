"""Messages that PyTorch differentiates: the gradient goes back where the tensor came from.

They belong to :mod:`collective.adapters.torch.functional`, which says what holds for all.
"""

from __future__ import annotations

from typing import Any

import torch

from collective.communicator import Communicator
from collective.training.adjoints import Step, check_source

from .adjoints import Linear, check, record

__all__ = ["recv", "send"]


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
    check("send", x)

    def adjoint(g: Any) -> Any:
        return recv(comm, dst, tag, like=g, after=g)

    return record(Linear, Step(lambda x: comm.send(x, dst, tag=tag), adjoint), x)


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
    check_source(comm, src)
    if after is not None:
        check("recv", after)

    def forward(after: Any) -> Any:
        found = comm.recv(None, src, tag=tag, like=like)
        check("recv", found)
        return found

    return record(Linear, Step(forward, lambda g: send(g, src, comm, tag), False), after)

"""What the differentiable collectives of every framework have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from collective.communicator import Communicator
from collective.contract.backend import ANY_SOURCE
from collective.errors import InvalidArgumentError, RankError

__all__ = ["FOLDS", "LINEAR", "Step", "check_op", "check_source", "length"]

#: The ops whose derivatives do not depend on the arrays, and those whose do.
LINEAR, FOLDS = ("sum", "avg"), ("prod", "min", "max")


@dataclass(frozen=True)
class Step:
    """One call.

    Attributes:
        forward: from array to array, or to None where there is no result.
        backward: from what the framework differentiates to the same, ``g -> gradient``; where
            the derivative depends on the arrays ``(g, x, y) -> gradient``.
        linked: whether some rank's result depends on this rank's ``x``. If not, backward gives
            a delegate.
    """

    forward: Callable[[Any], Any]
    backward: Callable[..., Any]
    linked: bool = True


def length(x: Any, axis: int) -> int:
    """Return the length of an axis, 0 for one that is not there, which the call refuses."""
    shape = tuple(x.shape) or (1,)
    return shape[axis] if -len(shape) <= axis < len(shape) else 0


def check_op(what: str, op: str) -> None:
    """Refuse an op that is not differentiated.

    Raises:
        InvalidArgumentError: it is none of :data:`LINEAR` and :data:`FOLDS`.
    """
    if op not in LINEAR + FOLDS:
        raise InvalidArgumentError(
            f"{what}: op {op!r}; one of {', '.join(LINEAR + FOLDS)}, which can be "
            "differentiated. The communicator's own calls take the others."
        )


def check_source(comm: Communicator, src: int) -> None:
    """Refuse to receive from nobody in particular.

    Raises:
        RankError: ``src`` is ``ANY_SOURCE``, to whom no gradient could be sent.
    """
    if src == ANY_SOURCE:
        raise RankError(
            f"recv: ANY_SOURCE; a rank, to which the gradient is sent [rank {comm.rank} of "
            f"{comm.size}]. Name the source, or receive with comm.recv, without a gradient."
        )

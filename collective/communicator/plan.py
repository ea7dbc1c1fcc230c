"""What is made of a call once, so that it can be made again and again: for all, and by programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from collective.errors import InvalidArgumentError
from collective.memory import nested
from collective.memory.arrays import adapter_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from collective.contract.backend import Plan
    from collective.request import Request

__all__ = ["PREPARE", "Planned", "PreparedCall", "refuse_unfit"]

#: As ``async_op`` of a communicator's method: return the call, prepared, and make none.
#: A reload of this module keeps the object, because other modules compare with it by identity.
PREPARE: Any = globals().get("PREPARE", object())


class Planned:
    """A request with its plan.

    Attributes:
        request: what all ranks have to agree on.
        plan: makes it, of two buffers and seconds: the transport's, or what stands for it.
        compares: whether the ranks' calls are only compared, and nothing is moved.
        takes_gpus: whether it takes arrays of GPUs, if they are such, where they are.
        comparison: what compares the ranks' calls before it is made, once there is one.
    """

    __slots__ = ("compares", "comparison", "plan", "request", "takes_gpus")

    def __init__(
        self, request: Request, plan: Plan, *, compares: bool = False, takes_gpus: bool = True
    ) -> None:
        self.request = request
        self.plan = plan
        self.compares = compares
        self.takes_gpus = takes_gpus
        self.comparison: Planned | None = None


class PreparedCall:
    """One collective call on given arrays; :meth:`Communicator.plan` returns it.

    It keeps the arrays, and works on the memory that they had when it was made: on what is in it
    whenever it is called.
    """

    __slots__ = ("_call", "_make", "operation")

    def __init__(self, operation: str, make: Callable[[bool], Any]) -> None:
        self.operation = operation
        self._make = make
        self._call: Callable[[], Any] | None = None

    def replace(self, call: Callable[[], Any]) -> None:
        """Make the call by ``call`` if it is to be made at once: that does the same, and faster."""
        self._call = call

    def __call__(self, *, async_op: bool = False) -> Any:
        """Make the call.

        Collective, as the call is: the other ranks may make it with or without a plan.

        Args:
            async_op: return a ``Work`` at once.

        Returns:
            What the call returns. Without ``out`` it is the same array every time.

        Raises:
            As the call. CommunicatorClosedError: the communicator was closed meanwhile.
        """
        if self._call is not None and not async_op:
            return self._call()
        return self._make(async_op)

    def __repr__(self) -> str:
        return f"<prepared {self.operation}>"


def refuse_unfit(operation: str, x: Any, out: Any, axis: int) -> None:
    """Refuse arrays of which a call would work on a copy: it would be of one moment.

    Raises:
        InvalidArgumentError: a structure, strides, an ``out`` that overlaps ``x``, an ``axis``, or
            what is seen through a copy.
    """
    seen: list[Any] = []
    for name, each in (("x", x), ("out", out)):
        if each is None:
            continue
        if nested.is_tree(each):
            raise InvalidArgumentError(
                f"plan: {operation} of a structure; one array. Plan a call for each of them."
            )
        if isinstance(each, (bool, int, float, complex, np.generic)):
            raise InvalidArgumentError(
                f"plan: {operation}: {name} is the number {each}; an array, whose elements may "
                f"change from call to call. Pass np.array({each}), or make the call."
            )
        array: Any = adapter_of(each).view(each)[0]
        if not array.flags.c_contiguous:
            raise InvalidArgumentError(
                f"plan: {operation}: {name} has strides; a contiguous array. Copy it into one, "
                "and pass that."
            )
        if type(array) is not np.ndarray:
            raise InvalidArgumentError(
                f"plan: {operation}: {name} is on a GPU; an array on the CPU. Make the call, "
                "which only enqueues it."
            )
        if array.size and not np.may_share_memory(array, adapter_of(each).view(each)[0]):
            raise InvalidArgumentError(
                f"plan: {operation}: {name} has no memory that is looked at each time (a "
                "lazily conjugated or negated tensor); an array that has. Pass a copy of it."
            )
        seen.append(array)
    if len(seen) == 2 and out is not x and np.may_share_memory(seen[0], seen[1]):
        raise InvalidArgumentError(
            f"plan: {operation}: out overlaps x; memory of its own, or x itself."
        )
    if axis not in (0, -seen[0].ndim if seen else 0):
        raise InvalidArgumentError(f"plan: {operation}: axis {axis}; the first one.")

"""What is made of a call once, so that it can be made again and again: for all, and by programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from collective import native
from collective.contract.copying import NotCopied
from collective.errors import DtypeError, InvalidArgumentError, ShapeError
from collective.memory import nested
from collective.memory.arrays import adapter_of
from collective.memory.dtypes import DType
from collective.memory.holding import hold

if TYPE_CHECKING:
    from collective.contract.backend import Plan
    from collective.contract.work import Work
    from collective.request import Request

__all__ = ["PREPARE", "CallForms", "Planned", "PreparedCall", "refuse_unfit"]

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


class CallForms(NamedTuple):
    """A prepared call in two forms that do the same.

    Attributes:
        make: makes the call on the memory that the arrays had when this was prepared; its argument
            is whether to return a ``Work``.
        direct: makes the call at once on the memory that the arrays have by then, in less time;
            None where it would not take less.
    """

    make: Callable[[bool], Any]
    direct: Callable[[], Any] | None


class PreparedCall(NotCopied):
    """One collective call on given arrays; :meth:`Communicator.plan` returns it.

    It keeps the arrays. Every call works on the memory that the arrays have by then: an array may
    have been resized and resized back, a tensor may have been given another storage.

    Args:
        operation: the method's name.
        prepare: returns the call with this array as ``out``, or as it was planned for None.
        arrays: what the call was planned on, by the names ``x`` and ``out``.
        keeps: whether every call without ``out`` returns one and the same array.
        who: this rank, for errors.
    """

    __slots__ = (
        "_arrays", "_direct", "_dtype", "_formats", "_keeps", "_like", "_make", "_pending",
        "_places", "_prepare", "_shape", "_who", "operation",
    )  # fmt: skip
    instead = "Prepare another one with comm.plan(), on the arrays of the copy."

    def __init__(
        self,
        operation: str,
        prepare: Callable[[Any], CallForms],
        arrays: dict[str, Any],
        keeps: bool,
        who: str,
    ) -> None:
        self.operation = operation
        self._prepare = prepare
        self._arrays = {name: array for name, array in arrays.items() if array is not None}
        self._keeps = keeps and "out" not in self._arrays
        self._who = who
        self._pending: Work[Any] | None = None
        # The shape and dtype of the first array are those of the call.
        self._like = next(iter(self._arrays.values()), _NOTHING)
        self._shape = getattr(self._like, "shape", None)
        self._dtype = getattr(self._like, "dtype", None)
        self._plan()

    def _plan(self) -> None:
        """Prepare the call on the memory that the arrays have now."""
        self._make, self._direct = self._prepare(self._arrays.get("out"))
        if self._dtype is None:  # what speaks DLPack need not have more attributes than that
            self._direct = None
        self._places = [(array, _place(array)) for array in self._arrays.values()]
        self._formats = {name: _format(array) for name, array in self._arrays.items()}

    def __call__(self, *, async_op: bool = False) -> Any:
        """Make the call.

        Collective, as the call is: the other ranks may make it with or without a plan.

        Args:
            async_op: return a ``Work`` at once.

        Returns:
            What the call returns. Without ``out`` a reduction and ``broadcast`` return the same
            array every time; calls that cut or join return a new one.

        Raises:
            As the call. ShapeError, DtypeError: an array no longer has the shape or dtype that it
                was planned with; nothing was sent, and the communicator stays usable.
            CommunicatorClosedError: the communicator was closed meanwhile.
        """
        if self._direct is not None and not async_op:
            like = self._like
            if like.dtype is self._dtype and like.shape == self._shape:
                return self._direct()
        held = hold(self._arrays.values())
        self._follow()
        result = self._make(async_op)
        if async_op:
            result._hold(held)
        if self._keeps:
            if async_op:
                self._pending = result
            else:
                self._keep(result)
        return result

    def _follow(self) -> None:
        """Prepare the call again if an array's elements are somewhere else by now.

        Raises:
            ShapeError, DtypeError, InvalidArgumentError: the array does not fit the plan any more.
        """
        if self._pending is not None and self._pending.done():
            if self._pending.exception() is None:
                self._keep(self._pending.wait())
            self._pending = None
        for array, place in self._places:
            if _place(array) != place:
                self._refuse_other_formats()
                refuse_unfit(self.operation, self._arrays.get("x"), self._arrays.get("out"), 0)
                self._plan()
                return

    def _refuse_other_formats(self) -> None:
        for name, array in self._arrays.items():
            before, now = self._formats[name], _format(array)
            for error, what in ((ShapeError, "shape"), (DtypeError, "dtype")):
                old, new = getattr(before, what), getattr(now, what)
                if old != new:
                    raise error(
                        f"{self.operation}: {name} has {what} {new} by now (it was planned with "
                        f"{old}) {self._who}. Plan the call again."
                    )

    def _keep(self, result: Any) -> None:
        """Make the calls after this one into its result, which the program has got by now.

        The program may resize the result, too, and the calls follow that array as any other.
        """
        self._keeps = False
        if result is None or result is self._arrays.get("x"):
            return
        self._arrays["out"] = result
        try:
            self._plan()
        except InvalidArgumentError:
            # The framework's arrays are read-only. Nothing moves their memory, either.
            del self._arrays["out"]

    def __repr__(self) -> str:
        return f"<prepared {self.operation}>"


class _Format(NamedTuple):
    """What an array must keep to be one of a prepared call's."""

    shape: tuple[int, ...]
    dtype: DType


_NOTHING = np.empty(0)
_view = native.viewer()


def _format(x: Any) -> _Format:
    array, dtype = adapter_of(x).view(x)
    return _Format(array.shape, dtype)


def _place(x: Any) -> tuple[Any, ...]:
    """Return where an array's elements are and how they are read, to be compared with another."""
    place = None if _view is None else _view(x)
    if place is not None:
        return place
    array, dtype = adapter_of(x).view(x)
    # Without elements there is no memory, and NumPy may invent another address every time.
    address = array.__array_interface__["data"][0] if array.size else 0
    return address, array.strides, array.shape, dtype


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

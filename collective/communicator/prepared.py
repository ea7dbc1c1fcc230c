"""Calls that a program prepares once and makes many times."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from collective import native
from collective.contract.copying import NotCopied
from collective.errors import DtypeError, InvalidArgumentError, ShapeError
from collective.memory import nested
from collective.memory.arrays import adapter_of
from collective.memory.dtypes import DType
from collective.memory.holding import hold

from .calls.broadcasting import Barrier, Broadcast
from .calls.call import Call
from .calls.gathering import AllGather, AllToAll, Gather
from .calls.reduction import AllReduce, Reduce, ReduceScatter, Scan
from .calls.scattering import Scatter
from .foreign_names import explain_arguments
from .path import Path

if TYPE_CHECKING:
    from collective.contract.work import Work

__all__ = ["PreparedCall", "plan"]

#: Classes of the calls that can be prepared, by the names of their methods.
_KINDS: dict[str, type[Any]] = {
    "all_reduce": AllReduce,
    "reduce": Reduce,
    "reduce_scatter": ReduceScatter,
    "scan": Scan,
    "broadcast": Broadcast,
    "gather": Gather,
    "all_gather": AllGather,
    "scatter": Scatter,
    "all_to_all": AllToAll,
    "barrier": Barrier,
}

#: Calls whose result has the same shape in every call, so that one array can be reused for it.
_KEEPING = {"all_reduce", "reduce", "reduce_scatter", "scan", "broadcast"}


def plan(
    comm: object, path: Path, operation: str, args: Sequence[Any], options: Mapping[str, Any]
) -> PreparedCall:
    """Return a prepared call; see :meth:`Communicator.plan`.

    Args:
        comm, path: the communicator and its path.
        operation: name of the communicator's method.
        args, options: arguments of the method.
    """
    if operation not in _KINDS:
        names = ", ".join(_KINDS)
        raise InvalidArgumentError(f"plan: operation {operation!r}; one of {names} {path.who}.")
    if "async_op" in options:
        raise InvalidArgumentError("plan: async_op is not planned; pass it when you make the call.")
    method = getattr(comm, operation)
    try:
        bound = inspect.signature(method).bind(*args, **options)
    except TypeError as error:
        raise explain_arguments(method, error) from None
    bound.apply_defaults()
    arguments = bound.arguments
    del arguments["async_op"]
    timeout = arguments.pop("timeout")
    return PreparedCall(path, method, arguments, timeout)


class PreparedCall(NotCopied):
    """One collective call on the same arrays; :meth:`Communicator.plan` returns it.

    The prepared call keeps the arrays alive. Every call works on the memory that the arrays have at
    that time: an array may have been resized and resized back, a tensor may have got another
    storage.

    Args:
        path: path of the communicator.
        method: method of the communicator that makes the call.
        arguments: arguments of the method by name, without ``timeout`` and ``async_op``.
        timeout: seconds; None for the communicator's timeout.
    """

    __slots__ = (
        "_arguments", "_arrays", "_call", "_direct", "_dtype", "_formats", "_keeps", "_kind",
        "_like", "_method", "_path", "_pending", "_places", "_renews", "_seconds", "_shape",
        "_timeout", "operation",
    )  # fmt: skip
    instead = "Prepare another one with comm.plan(), on the arrays of the copy."

    def __init__(
        self,
        path: Path,
        method: Callable[..., Any],
        arguments: dict[str, Any],
        timeout: float | None,
    ) -> None:
        self.operation: str = method.__name__
        self._kind = _KINDS[self.operation]
        self._path = path
        self._method = method
        self._arguments = arguments
        self._timeout = timeout
        self._seconds = path.check_timeout(timeout)
        x, out = arguments.get("x"), arguments.get("out")
        refuse_unfit(self.operation, x, out, arguments.get("axis", 0))
        self._arrays = {name: array for name, array in (("x", x), ("out", out))
                        if array is not None}  # fmt: skip
        # Whether all calls without `out` must return the same array.
        self._keeps = self.operation in _KEEPING and x is not None and out is None
        # Whether each call must get new memory for its result, because arrays never change.
        self._renews = self._keeps and adapter_of(x).immutable
        self._keeps = self._keeps and not self._renews
        self._pending: Work[Any] | None = None
        # The shape and dtype of the first array determine those of the call.
        self._like = next(iter(self._arrays.values()), _NOTHING)
        self._shape = getattr(self._like, "shape", None)
        self._dtype = getattr(self._like, "dtype", None)
        self._prepare()

    def _prepare(self) -> None:
        """Prepare the call on the present memory of the arrays."""
        out = self._arrays.get("out")
        arguments = self._arguments if out is None else {**self._arguments, "out": out}
        self._call: Call = self._kind(self._path, **arguments).prepare()
        # The method in C remembers its plans, too, and then does not call Python. Without `out` it
        # would make a new array in every call.
        has_output = out is not None or self.operation == "barrier"
        # `_dtype` is None for an array that only supports DLPack and has no attribute `dtype`.
        self._direct: Callable[[], Any] | None = None
        if (
            has_output
            and self._path.door is not None
            and self._timeout is None
            and self._dtype is not None
        ):
            self._direct = _as_in_program(self._method, arguments)
        self._places = [(array, _place(array)) for array in self._arrays.values()]
        self._formats = {name: _format(array) for name, array in self._arrays.items()}

    def __call__(self, *, async_op: bool = False) -> Any:
        """Make the call.

        Collective, like the planned call. Other ranks may make the call with or without a plan.

        Args:
            async_op: if true, return a ``Work`` at once.

        Returns:
            The result of the call. Without ``out``, reductions and ``broadcast`` return the same
            array every time, if the framework's arrays can change; all other calls, and calls on
            JAX's arrays, return a new array.

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
        if self._renews:
            self._prepare()
        self._follow()
        result = self._path.go_again(self._call, self._seconds, async_op)
        if async_op:
            result.keep(held)
        if self._keeps:
            if async_op:
                self._pending = result
            else:
                self._keep(result)
        return result

    def _follow(self) -> None:
        """Prepare the call again if the elements of an array have moved.

        Raises:
            ShapeError, DtypeError, InvalidArgumentError: the array no longer fits the plan.
        """
        if self._pending is not None and self._pending.done():
            if self._pending.exception() is None:
                self._keep(self._pending.wait())
            self._pending = None
        for array, place in self._places:
            if _place(array) != place:
                self._refuse_other_formats()
                refuse_unfit(self.operation, self._arrays.get("x"), self._arrays.get("out"), 0)
                self._prepare()
                return

    def _refuse_other_formats(self) -> None:
        for name, array in self._arrays.items():
            before, after = self._formats[name], _format(array)
            for error, what in ((ShapeError, "shape"), (DtypeError, "dtype")):
                old, new = getattr(before, what), getattr(after, what)
                if old != new:
                    raise error(
                        f"{self.operation}: {name} has {what} {new} now (it was planned with "
                        f"{old}) {self._path.who}. Plan the call again."
                    )

    def _keep(self, result: Any) -> None:
        """Use the result, which the program now has, as ``out`` of all later calls.

        The program may resize the result, too. Later calls follow its memory as that of any other
        array.
        """
        self._keeps = False
        x = self._arrays.get("x")
        if result is None or result is x:
            return
        # The root's result of a broadcast may be a view of x, and is up to date in every call.
        views = [adapter_of(array).view(array)[0] for array in (x, result) if array is not None]
        if len(views) == 2 and np.may_share_memory(*views):
            return
        self._arrays["out"] = result
        try:
            self._prepare()
        except InvalidArgumentError:
            # The framework's arrays are read-only, so they cannot be an `out`.
            del self._arrays["out"]
            self._renews = True

    def __repr__(self) -> str:
        return f"<prepared {self.operation}>"


def _as_in_program(method: Callable[..., Any], arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """Return the call in the form in which a program writes it, without default arguments.

    The method in C takes calls in this form only.
    """
    parameters = inspect.signature(method).parameters
    named = {
        name: value
        for name, value in arguments.items()
        if name != "x" and value is not parameters[name].default
    }
    positional = [arguments["x"]] if "x" in arguments else []
    return functools.partial(method, *positional, **named)


class _Format(NamedTuple):
    """Shape and dtype of an array, which must not change between prepared calls."""

    shape: tuple[int, ...]
    dtype: DType


_NOTHING = np.empty(0)
_view = native.viewer()


def _format(x: Any) -> _Format:
    array, dtype = adapter_of(x).view(x)
    return _Format(array.shape, dtype)


def _place(x: Any) -> tuple[Any, ...]:
    """Return the address and layout of an array's elements, to compare with an earlier place."""
    place = None if _view is None else _view(x)
    if place is not None:
        return place
    array, dtype = adapter_of(x).view(x)
    # An array without elements has no memory, and NumPy may return another address every time.
    address = array.__array_interface__["data"][0] if array.size else 0
    return address, array.strides, array.shape, dtype


def refuse_unfit(operation: str, x: Any, out: Any, axis: int) -> None:
    """Refuse arguments for which each call would need a copy: a copy made now would not change.

    Raises:
        InvalidArgumentError: a structure, an array with strides, an ``out`` that overlaps ``x``, an
            ``axis`` other than the first, or an array that can only be viewed through a copy.
    """
    arrays: list[Any] = []
    for name, value in (("x", x), ("out", out)):
        if value is None:
            continue
        if nested.is_tree(value):
            raise InvalidArgumentError(
                f"plan: {operation} of a structure; expected one array. Plan a call for each array."
            )
        if isinstance(value, (bool, int, float, complex, np.generic)):
            raise InvalidArgumentError(
                f"plan: {operation}: {name} is the number {value}; expected an array, whose "
                f"elements may change from call to call. Pass np.array({value}), or make the call "
                "without a plan."
            )
        array: Any = adapter_of(value, operation, name).view(value)[0]
        if not array.flags.c_contiguous:
            raise InvalidArgumentError(
                f"plan: {operation}: {name} has strides; expected a contiguous array. Copy it into "
                "one, and pass the copy."
            )
        if type(array) is not np.ndarray:
            raise InvalidArgumentError(
                f"plan: {operation}: {name} is on a GPU; expected an array on the CPU. Make the "
                "call without a plan; on a GPU it is only enqueued."
            )
        if array.size and not np.may_share_memory(array, adapter_of(value).view(value)[0]):
            raise InvalidArgumentError(
                f"plan: {operation}: {name} is a lazily conjugated or negated tensor, so its "
                "storage does not hold its values; pass x.resolve_conj().resolve_neg(), or a copy."
            )
        arrays.append(array)
    if len(arrays) == 2 and out is not x and np.may_share_memory(arrays[0], arrays[1]):
        raise InvalidArgumentError(
            f"plan: {operation}: out overlaps x; expected separate memory, or x itself."
        )
    if axis not in (0, -arrays[0].ndim if arrays else 0):
        raise InvalidArgumentError(f"plan: {operation}: axis {axis}; expected the first axis, 0.")

"""``MPI.Op``: operators of reductions, on Python objects and on packed elements."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from .datatypes import handle_of
from .exceptions import CLASSES, MPIError
from .handles import Handle, OpaqueObject, reader
from .layouts import Piece, TypeLayout
from .memory import Bytes, buffer
from .messages import simple

_Fold = Callable[[Any, Any], Any]


class Operator(OpaqueObject):
    """What a handle of an operator names.

    Args:
        on_objects: function of two Python objects.
        on_arrays: function of two arrays; None if the program made the operator.
        commutative: whether the order of the inputs does not matter.
        core: name of the library's operator, or "".
        kinds: NumPy's kinds of the elements for which ``on_arrays`` is defined.

    Attributes:
        function: the program's function of two buffers and a datatype.
    """

    def __init__(
        self, on_objects: _Fold, on_arrays: _Fold | None, commutative: bool = True, core: str = "",
        function: Callable[..., Any] | None = None, kinds: str = "",
    ) -> None:  # fmt: skip
        self.kinds = kinds
        self.on_objects = on_objects
        self.on_arrays = on_arrays
        self.commutative = commutative
        self.core = core
        self.function = function


class Op(Handle, kind=True):
    """Operator of a reduction."""

    __slots__ = ()
    null_error = CLASSES["ERR_OP"]

    def __call__(self, x: Any, y: Any, /) -> Any:
        """Return ``x`` combined with ``y``."""
        if self._inner is None:
            raise ValueError("the null operator combines nothing")
        return self._inner.on_objects(x, y)

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self and self._inner.function is not None:
            return type(self).Create, (self._inner.function, self._inner.commutative)
        return super().__reduce__()

    @classmethod
    def Create(cls, function: Callable[..., Any], commute: bool = False) -> Any:
        """Return an operator.

        Args:
            function: called with two buffers and a datatype; it combines the first buffer with the
                second, and writes the result to the second. For Python objects it is called with
                them and None, and returns the result.
            commute: whether the order of the inputs does not matter.
        """

        def on_objects(x: Any, y: Any) -> Any:
            return function(x, y, None)

        return cls._of(Operator(on_objects, None, bool(commute), "", function))

    Free = Handle._free
    Is_commutative, is_commutative = reader(
        lambda operator: operator.commutative, "whether the order of the inputs does not matter"
    )
    is_predefined = property(lambda self: self._inner is None or self._inner.function is None)

    def Reduce_local(self, inbuf: Any, inoutbuf: Any) -> None:
        """Combine two buffers of this process; the second has the result."""
        source, target = simple(inbuf, False), simple(inoutbuf, True)
        check_alike(source, target)
        check_defined(self._live, target.layout)
        result = target.packed().copy()
        fold(self._live, source.packed(), result, target)
        target.unpack(result)


def check_alike(source: Piece, target: Piece) -> None:
    """Raise ValueError unless two pieces have as many elements of one datatype."""
    if source.layout is not target.layout:
        raise ValueError("mismatch in send and receive MPI datatypes")
    if source.count != target.count:
        raise ValueError(
            f"mismatch in send count {source.count} and receive count {target.count}"
        )  # fmt: skip


def operator_of(op: Any) -> Operator:
    """Return what the handle of an operator names.

    Raises:
        TypeError: it is no handle of an operator, such as the name "sum".
        MPIError: it is ``OP_NULL``.
    """
    if not isinstance(op, Op):
        raise TypeError(f"op: expected Op, got {type(op).__name__} {op!r}")
    return op._live  # type: ignore[no-any-return]


def check_defined(op: Operator, layout: TypeLayout) -> None:
    """Check that an operator is defined for the elements of a layout.

    Each rank of a reduction checks it before it sends anything, although not each rank folds:
    otherwise some ranks would raise and the others would return.

    Raises:
        MPIError: it is not, such as ``BAND`` for floats.
    """
    if op.on_arrays is None:
        return
    dtype = layout.dtype
    if dtype is None or dtype.kind not in op.kinds:
        raise MPIError(
            CLASSES["ERR_OP"], f"{op.name} is not defined for {layout.name or dtype or 'a struct'}"
        )


def fold(op: Operator, lower: Bytes, higher: Bytes, piece: Piece) -> None:
    """Combine packed elements of a lower rank with those of a higher rank, into the latter.

    Args:
        op: the operator.
        lower, higher: packed elements, of equal length.
        piece: a piece with their datatype and their number.
    """
    if not len(higher):
        return
    layout = piece.layout
    if op.on_arrays is not None:
        assert layout.dtype is not None, "check_defined() has not run"
        a, b = lower.view(layout.dtype), higher.view(layout.dtype)
        b[...] = op.on_arrays(a, b)
        return
    count = len(higher) // layout.size
    if layout.dense:
        _call(op, lower, higher, layout)
        return
    # The program's function sees elements as they lie in memory, with the gaps.
    low, high = layout.span(count)
    places = layout.places(count) - low
    first, second = np.zeros(high - low, np.uint8), np.zeros(high - low, np.uint8)
    first[places], second[places] = lower, higher
    _call(op, first, second, layout)
    higher[...] = second[places]


def _call(op: Operator, lower: Bytes, higher: Bytes, layout: TypeLayout) -> None:
    assert op.function is not None
    op.function(lower.view(buffer), higher.view(buffer), handle_of(layout))


def _logical(function: _Fold) -> _Fold:
    return lambda a, b: function(a.astype(bool), b.astype(bool)).astype(a.dtype)


def _located(better: _Fold) -> tuple[_Fold, _Fold]:
    """Return the fold of pairs of a value and its index: of objects, and of arrays."""

    def on_objects(x: Any, y: Any) -> Any:
        if better(x[0], y[0]):
            return x
        return x if x[0] == y[0] and not y[1] < x[1] else y

    def on_arrays(a: Any, b: Any) -> Any:
        equal = (a["value"] == b["value"]) & (a["index"] <= b["index"])
        return np.where(better(a["value"], b["value"]) | equal, a, b)

    return on_objects, on_arrays


def _operators() -> dict[str, Operator]:
    maxloc, minloc = _located(operator.gt), _located(operator.lt)
    # MPI 4.1, section 6.9.2, with logical operators of floats beside.
    ordered, numbers, whole, truth = "biuf", "iufc", "biu", "biuf"
    both = ordered + "cV"
    return {
        "MAX": Operator(lambda x, y: y if y > x else x, np.maximum, core="max", kinds=ordered),
        "MIN": Operator(lambda x, y: y if y < x else x, np.minimum, core="min", kinds=ordered),
        "SUM": Operator(operator.add, np.add, core="sum", kinds=numbers),
        "PROD": Operator(operator.mul, np.multiply, core="prod", kinds=numbers),
        "LAND": Operator(lambda x, y: bool(x) & bool(y), _logical(np.logical_and), kinds=truth),
        "BAND": Operator(operator.and_, np.bitwise_and, core="band", kinds=whole),
        "LOR": Operator(lambda x, y: bool(x) | bool(y), _logical(np.logical_or), kinds=truth),
        "BOR": Operator(operator.or_, np.bitwise_or, core="bor", kinds=whole),
        "LXOR": Operator(lambda x, y: bool(x) ^ bool(y), _logical(np.logical_xor), kinds=truth),
        "BXOR": Operator(operator.xor, np.bitwise_xor, core="bxor", kinds=whole),
        "MAXLOC": Operator(*maxloc, kinds="V"),
        "MINLOC": Operator(*minloc, kinds="V"),
        "REPLACE": Operator(lambda x, y: y, lambda a, b: b, False, kinds=both),
        "NO_OP": Operator(lambda x, y: x, lambda a, b: a, False, kinds=both),
    }


OP_NULL = Op._constant("OP_NULL")
#: The predefined operators by name.
OPERATORS = {name: Op._constant(name, inner) for name, inner in _operators().items()}
SUM = OPERATORS["SUM"]
for _name, _op in OPERATORS.items():
    _op._inner.name = f"MPI_{_name}"

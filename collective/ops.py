"""Reduction operators, named as in MPI and NCCL.

A transport gets a :class:`ReduceOp`. A user passes its name (``"sum"``), or calls
:func:`premul_sum` or :func:`user_op`. The arithmetic itself is in
:mod:`collective.algorithms.arithmetic`: integers wrap, and ``min`` and ``max`` of floats are IEEE
754-2019's minimum and maximum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

import numpy as np

from collective.errors import InvalidArgumentError

#: Name of an operator, for type checkers, which then report an unknown one. A program that reads
#: the name from its configuration passes ``cast(Op, name)``; a call checks the name, too.
Op = Literal["sum", "prod", "min", "max", "avg", "band", "bor", "bxor", "land", "lor"]
NAMES: tuple[Op, ...] = get_args(Op)

Array = np.ndarray[Any, Any]

#: Names that other libraries use for these operators.
_FOREIGN = {
    "add": "sum", "average": "avg", "mean": "avg", "product": "prod", "maximum": "max",
    "minimum": "min", "all": "land", "any": "lor",
}  # fmt: skip


class _ForeignConstant:
    """Descriptor for a constant that other libraries' operator classes have, and this one lacks.

    Reading the constant raises an error that shows what to write instead.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(
            f"{owner.__name__} has no {self._name}: operators are given by name; use "
            f"op={_FOREIGN.get(self._name.lower(), self._name.lower())!r}"
        )


if TYPE_CHECKING:

    class _ForeignConstants:
        """Empty base class: type checkers must not see the constants."""

else:
    _ForeignConstants = type(
        "_ForeignConstants",
        (),
        {"__slots__": ()}
        | {name.upper(): _ForeignConstant(name.upper()) for name in (*NAMES, "product")},
    )


@dataclass(frozen=True, slots=True, eq=False)
class ReduceOp(_ForeignConstants):
    """Operator that combines the ranks' elements into one.

    Equal operators give equal bits, so that a communicator may use the plan of an earlier call.

    Attributes:
        name: one of :data:`NAMES`, ``"premul_sum"`` or ``"user"``.
        factor: for ``premul_sum``, the number by which each rank multiplies its input first.
        function: for ``"user"``, ``f(a, b)`` on two one-dimensional arrays.
        label: for ``"user"``, the name that error texts and the mismatch check use.
        commutative: whether the fold may combine the ranks in any order. The library assumes that
            every operator is associative; one that is not needs ``order="rank"``.
    """

    name: str
    factor: float | None = None
    function: Callable[[Array, Array], Array] | None = None
    label: str = ""
    commutative: bool = True

    def _identity(self) -> tuple[object, ...]:
        """Return what two operators must have in common to be equal."""
        # -0.0 == 0.0, but their products have other signs. The class of a user's function may call
        # functions equal that compute other values, or allow no hash. Only a bound method, which
        # each access makes anew, is compared by its value.
        factor = None if self.factor is None else self.factor.hex()
        function = self.function
        same = function if isinstance(function, MethodType) else id(function)
        return self.name, factor, same, self.label, self.commutative

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ReduceOp):
            return NotImplemented
        return self is other or self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __str__(self) -> str:
        if self.factor is not None:
            return f"{self.name}({self.factor!r})"
        return f"user_op({self.label})" if self.function is not None else self.name


_NAMED: dict[str, ReduceOp] = {name: ReduceOp(name) for name in NAMES}


def as_op(op: str | ReduceOp) -> ReduceOp:
    """Return the operator that ``op`` names.

    Raises:
        InvalidArgumentError: there is no such operator; the text lists all names.
    """
    if isinstance(op, ReduceOp):
        return op
    reducer = _NAMED.get(op) if isinstance(op, str) else None
    if reducer is None:
        meant = _meant(op)
        raise InvalidArgumentError(
            f"op: {op!r} is not a reduction; one of {', '.join(NAMES)}, or "
            f"collective.premul_sum(factor) or collective.user_op(function).{meant}"
        )
    return reducer


def _meant(op: object) -> str:
    """Return a sentence that names this library's operator for one of another library, or ""."""
    root = type(op).__module__.partition(".")[0]
    text = op if isinstance(op, str) else ""
    if root == "torch":  # str(op) is "RedOpType.SUM"
        text = str(op).rpartition(".")[2]
    elif root == "mpi4py":
        text = str(op.__reduce__())  # the name, if the operator is predefined
    word = text.lower()
    if word in ("maxloc", "minloc"):
        return f" Use {word[:3]} of all_gather_object((x, rank))."
    word = _FOREIGN.get(word, word)
    return f" Use op={word!r}." if word in NAMES else ""


def premul_sum(factor: float) -> ReduceOp:
    """Return the operator that sums ``factor * x`` over the ranks (``ncclRedOpCreatePreMulSum``).

    Args:
        factor: finite number; each rank may pass its own. It is rounded to the arrays' dtype
            before the multiplication.

    Raises:
        InvalidArgumentError: the factor is not a real number, or is infinite or NaN.
    """
    real = (int, float, np.integer, np.floating)
    if isinstance(factor, bool) or not isinstance(factor, real):
        raise InvalidArgumentError(f"premul_sum: factor {factor!r} is not a real number.")
    try:
        finite = math.isfinite(factor)
    except OverflowError:  # an int that is too large for a float
        finite = False
    if not finite:
        raise InvalidArgumentError(f"premul_sum: factor {factor!r} is not finite.")
    return ReduceOp("premul_sum", factor=float(factor))


def user_op(function: Callable[[Array, Array], Array], *, commutative: bool = False) -> ReduceOp:
    """Return an operator that folds with ``function`` (``MPI_Op_create``).

    Args:
        function: ``f(a, b) -> c`` on NumPy arrays of one dimension, equal length and
            dtype; ``a`` comes from the lower ranks. The function must return an array of the
            same length, which is cast to the arrays' dtype. It must not change its inputs. It
            must be associative and elementwise: an array may arrive in pieces. bfloat16 arrays
            arrive as float32. If the function raises an exception on one rank, the call raises
            it there, and ``PeerFailedError`` on all other ranks; then the communicator is broken.
        commutative: if true, the ranks may be combined in any order, which can be faster.

    Raises:
        InvalidArgumentError: ``function`` is not callable.
    """
    if not callable(function):
        raise InvalidArgumentError(f"user_op: {function!r} is not callable.")
    label = getattr(function, "__name__", type(function).__name__)
    return ReduceOp("user", function=function, label=label, commutative=commutative)

"""Element types and reductions in MPI's terms: its own operators, and ours as operators of MPI's.

An operator that MPI lacks is one of two MPI operators for the whole process, whose function
is called with pieces of the arrays and their datatype. The datatype says which reduction is
running: each running one has a slot with datatypes of its own.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from collective.algorithms import arithmetic
from collective.memory.dtypes import BY_NAME, DType
from collective.ops import ReduceOp, as_op

if TYPE_CHECKING:
    from collective.memory.buffer import Buffer

__all__ = [
    "Deviations", "MpiFold", "Slot", "being_made", "deviations", "making", "mpi_op", "of_flags",
    "prepare", "slot", "type_of",
]  # fmt: skip

Array = np.ndarray[Any, Any]
#: Names of operators and dtypes for which MPI's operator does otherwise than NumPy's.
Deviations = frozenset[tuple[str, str]]

# Types of the same size and arithmetic. A boolean's byte may be any, as NumPy's, and MPI's C_BOOL
# may not: with a logical operator a byte of any value is true or false. The 16-bit floats only
# travel as this; MPI never sums them, see mpi_op().
_TYPES = {
    "bool": "UINT8_T",
    "int8": "INT8_T",
    "int16": "INT16_T",
    "int32": "INT32_T",
    "int64": "INT64_T",
    "uint8": "UINT8_T",
    "uint16": "UINT16_T",
    "uint32": "UINT32_T",
    "uint64": "UINT64_T",
    "float16": "UINT16_T",
    "bfloat16": "UINT16_T",
    "float8_e4m3fn": "UINT8_T",
    "float8_e5m2": "UINT8_T",
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "complex64": "C_FLOAT_COMPLEX",
    "complex128": "C_DOUBLE_COMPLEX",
}
_OPS = {
    "sum": "SUM",
    "avg": "SUM",
    "premul_sum": "SUM",
    "prod": "PROD",
    "min": "MIN",
    "max": "MAX",
    "band": "BAND",
    "bor": "BOR",
    "bxor": "BXOR",
    "land": "LAND",
    "lor": "LOR",
}
# Of booleans, whose bytes may be others than 0 and 1: MPI's logical operators give those two.
_BOOLEAN_OPS = {
    "min": "LAND",
    "max": "LOR",
    "band": "LAND",
    "bor": "LOR",
    "bxor": "LXOR",
    "land": "LAND",
    "lor": "LOR",
}
# The operators that are tried on integers, of all widths, and on booleans. Open MPI's for AVX
# saturate: of uint8 they add 200 and 200 to 255, and of 16 bits and of signed ones they do alike.
_TRIED = [
    *(
        (op, name)
        for name, dtype in BY_NAME.items()
        if dtype.kind in "iu"
        for op in ("sum", "prod", "min", "max", "band", "bor", "bxor", "land", "lor")
    ),
    *((op, "bool") for op in _BOOLEAN_OPS),
]
# Elements that are tried of each: they fill vectors of 64 bytes, then shorter ones, and leave
# some over, so that each of an operator's loops has its turn.
_ELEMENTS = 191

# MPICH and Intel MPI hold a lock of theirs while they call a function of ours, which waits for
# Python's lock. mpi4py lets go of that one in everything that communicates, but not where it
# makes datatypes, groups, error handlers: a thread that does that meanwhile waits for MPI's
# lock, and for ever (tried). So all datatypes are made beforehand, and communicators while no
# such reduction runs: see making().

# Reductions with a function of ours that can run at once, a thread each.
_SLOTS = 16
_SIZES = (1, 2, 4, 8, 16)

_lock = threading.Lock()
_slots: list[Slot] = []
_by_handle: dict[int, Slot] = {}
_operators: list[Any] = []
_running = 0
#: How many threads make communicators; meanwhile no reduction may begin that MPI folds with
#: a function of ours.
being_made = 0


def type_of(module: Any, dtype: DType) -> Any:
    """Return the MPI datatype whose elements are ``dtype``'s, bit by bit."""
    return getattr(module, _TYPES[dtype.name])


@functools.cache
def deviations(module: Any) -> Array:
    """Try MPI's operators for integers and booleans; return a flag each, 1 where NumPy's differs.

    That takes 1.5 ms, once a process. The flags may differ between ranks, whose processors may
    have other vector units: see :func:`of_flags`.
    """
    return np.array([_deviates(module, *pair) for pair in _TRIED], np.uint8)


def _deviates(module: Any, name: str, dtype_name: str) -> bool:
    dtype, op = BY_NAME[dtype_name], as_op(name)
    random, kind = np.random.default_rng(0), type_of(module, dtype)
    drawn = random.integers(0, 256, (2, _ELEMENTS * dtype.itemsize), np.uint8)
    if dtype.kind == "b":
        drawn[drawn < 128] = 0  # or hardly any would be false
    left, right = drawn.view(dtype.storage)
    expected = np.empty_like(right)
    arithmetic.fold(op, dtype)(left, right, out=expected)
    mpis = _operator(module, name, dtype)
    mpis.Reduce_local([left, _ELEMENTS, kind], [right, _ELEMENTS, kind])
    return bool((right.view(np.uint8) != expected.view(np.uint8)).any())


def _operator(module: Any, name: str, dtype: DType) -> Any:
    """Return MPI's operator that does to elements of ``dtype`` what ours of this name does."""
    return getattr(module, (_BOOLEAN_OPS if dtype.kind == "b" else _OPS)[name])


def of_flags(flags: Array) -> Deviations:
    """Return what the flags of :func:`deviations` mean, of one rank or of several together."""
    return frozenset(pair for pair, flag in zip(_TRIED, flags, strict=True) if flag)


def mpi_op(module: Any, op: ReduceOp, dtype: DType, unlike: Deviations) -> Any:
    """Return MPI's own operator for ``op`` on ``dtype``, or None if it has none.

    None for user functions and 16-bit floats; for logical operators on floats, which MPI
    does not define (MPI 4.1, section 6.9.2); for the minimum and maximum of floats, where
    MPI leaves open what becomes of NaN and of zeros with signs, and implementations lose
    them; and for what is in ``unlike``.
    """
    if op.function is not None or (dtype.itemsize == 2 and dtype.kind == "f"):
        return None
    if dtype.kind == "f" and op.name in ("min", "max", "land", "lor"):
        return None
    if (op.name, dtype.name) in unlike:
        return None
    return _operator(module, op.name, dtype)


class Slot:
    """One running reduction with a function of ours.

    Attributes:
        types: an MPI datatype for each element size, which no other slot has.
        error: what the function raised.
    """

    __slots__ = ("error", "fold", "storage", "types")

    def __init__(self, types: dict[int, Any]) -> None:
        self.types = types
        self.fold: arithmetic.Fold | None = None
        self.storage: np.dtype[Any] | None = None
        self.error: BaseException | None = None

    def __call__(self, left: Any, right: Any) -> None:
        """Set ``right`` to ``left op right``; whatever is raised must not reach MPI."""
        if self.error is None:
            try:
                b = np.frombuffer(right, self.storage)
                with np.errstate(all="ignore"):
                    self.fold(np.frombuffer(left, self.storage), b, out=b)  # type: ignore[misc]
            except BaseException as error:
                self.error = error


def _call(left: Any, right: Any, datatype: Any) -> None:
    """Be the function of the two operators: MPI's ``inoutvec[i] = invec[i] op inoutvec[i]``."""
    _by_handle[_handle(datatype)](left, right)


_handle: Callable[[Any], int]


def prepare(module: Any) -> None:
    """Make the operators and the slots, once a process; nothing may be running."""
    global _handle
    with _lock:
        if _operators:
            return
        _handle = module._handleof
        for _ in range(_SLOTS):
            types = {size: module.BYTE.Create_contiguous(size).Commit() for size in _SIZES}
            made = Slot(types)
            _slots.append(made)
            _by_handle.update((_handle(datatype), made) for datatype in types.values())
        _operators.extend(module.Op.Create(_call, commute) for commute in (False, True))


@contextlib.contextmanager
def slot(fold: MpiFold, turn: Callable[[], None]) -> Iterator[Slot]:
    """Take a slot for a reduction by ``fold``; call ``turn()`` while there is none.

    Raises:
        BaseException: at the end, what the function raised.
    """
    global _running
    while (mine := _take()) is None:
        turn()
    mine.fold, mine.storage = fold.function, fold.storage
    try:
        yield mine
        error = mine.error
    finally:
        mine.fold = mine.error = None
        with _lock:
            _slots.append(mine)
            _running -= 1
    if error is not None:
        raise error


def _take() -> Slot | None:
    global _running
    with _lock:
        if not _slots:
            return None
        _running += 1
        return _slots.pop()


@contextlib.contextmanager
def making(turn: Callable[[], None]) -> Iterator[None]:
    """Make a communicator while no reduction runs that calls a function of ours.

    Those that run end soon, since all ranks have come to them; ``turn()`` is called while
    they do. Those that come later see :data:`being_made`.
    """
    global being_made
    with _lock:
        being_made += 1
    try:
        while _running:
            turn()
        yield
    finally:
        with _lock:
            being_made -= 1


class MpiFold:
    """A reduction, prepared for one operator and dtype.

    Attributes:
        op: the MPI operator.
        type: the MPI datatype; None for an operator of ours, whose slot has one.
        function: ours, where MPI has no operator.
        storage: the NumPy type of the elements.
        pre, post: what is done to each input and to each result, or None.
    """

    __slots__ = ("function", "op", "post", "pre", "storage", "type")

    def __init__(
        self, module: Any, op: ReduceOp, dtype: DType, size: int, unlike: Deviations
    ) -> None:
        offered = mpi_op(module, op, dtype, unlike)
        self.storage = dtype.storage
        self.pre = arithmetic.pre(op, dtype, size)
        self.post = arithmetic.post(op, dtype, size)
        self.type = None if offered is None else type_of(module, dtype)
        self.op = _operators[op.commutative] if offered is None else offered
        self.function = arithmetic.fold(op, dtype) if offered is None else None

    def enter(self, src: Buffer, room: Buffer | None) -> Array:
        """Return what this rank contributes: ``src``, or scaled in ``room`` or new memory."""
        if self.pre is None:
            return src.array
        scaled = np.empty_like(src.array) if room is None else room.array
        with np.errstate(all="ignore"):
            self.pre(src.array, scaled)
        return scaled

    def leave(self, dst: Array) -> None:
        """Make a folded value, in place, the result."""
        if self.post is not None:
            with np.errstate(all="ignore"):
                self.post(dst, dst)

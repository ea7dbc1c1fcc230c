"""Element types and reductions in MPI's terms: MPI's own operators, and user-defined ones.

For operators that MPI lacks, the whole process has two user-defined MPI operators. MPI calls their
function with pieces of the arrays and with their datatype. The datatype identifies the reduction:
each running reduction has a slot with datatypes of its own.
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

Array = np.ndarray[Any, Any]
#: Names of operators and dtypes for which MPI's operator gives other results than NumPy's.
Deviations = frozenset[tuple[str, str]]

# MPI types of the same size and arithmetic. A boolean travels as an integer, because the byte of
# one of NumPy's booleans may have any value, and that of MPI's C_BOOL may not. For MPI's logical
# operators a byte of any value is true or false. The 16-bit floats only travel as these types; MPI
# never sums them, see mpi_op().
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
# Operators for booleans, whose bytes may differ from 0 and 1: MPI's logical operators return only
# these two values.
_BOOLEAN_OPS = {
    "min": "LAND",
    "max": "LOR",
    "band": "LAND",
    "bor": "LOR",
    "bxor": "LXOR",
    "land": "LAND",
    "lor": "LOR",
}
# The operators that are tried on integers of all widths and on booleans. Open MPI's operators for
# AVX saturate: for uint8 they add 200 and 200 to 255. Those for 16 bits and for signed integers do
# the same.
_TRIED = [
    *(
        (op, name)
        for name, dtype in BY_NAME.items()
        if dtype.kind in "iu"
        for op in ("sum", "prod", "min", "max", "band", "bor", "bxor", "land", "lor")
    ),
    *((op, "bool") for op in _BOOLEAN_OPS),
]
# Number of elements in each trial. They fill vectors of 64 bytes, then shorter vectors, and leave
# some elements over, so that each loop of an operator runs.
_ELEMENTS = 191

# MPICH and Intel MPI hold a lock of their own while they call a function in Python, which waits for
# Python's lock. mpi4py releases Python's lock in every call that communicates, but not where it
# makes datatypes, groups or error handlers. A thread that makes one meanwhile holds Python's lock
# and waits for MPI's lock: a deadlock (tried). So all datatypes are made beforehand, and
# communicators only while no such reduction runs: see making().

# Number of reductions with a function in Python that can run at once, each in its own thread.
_SLOTS = 16
_SIZES = (1, 2, 4, 8, 16)

_lock = threading.Lock()
_slots: list[Slot] = []
_by_handle: dict[int, Slot] = {}
_operators: list[Any] = []
_running = 0
#: Number of threads that are making communicators. Meanwhile no reduction with a function in Python
#: may begin.
being_made = 0


def type_of(module: Any, dtype: DType) -> Any:
    """Return the MPI datatype that moves elements of ``dtype`` bit by bit."""
    return getattr(module, _TYPES[dtype.name])


@functools.cache
def deviations(module: Any) -> Array:
    """Try MPI's operators for integers and booleans; return flags, 1 where NumPy's result differs.

    The trial takes 1.5 ms, once per process. The flags may differ between ranks, whose processors
    may have different vector units: see :func:`of_flags`.
    """
    return np.array([_deviates(module, *pair) for pair in _TRIED], np.uint8)


def _deviates(module: Any, name: str, dtype_name: str) -> bool:
    dtype, op = BY_NAME[dtype_name], as_op(name)
    random, kind = np.random.default_rng(0), type_of(module, dtype)
    drawn = random.integers(0, 256, (2, _ELEMENTS * dtype.itemsize), np.uint8)
    if dtype.kind == "b":
        drawn[drawn < 128] = 0  # otherwise hardly any element would be false
    left, right = drawn.view(dtype.storage)
    expected = np.empty_like(right)
    arithmetic.fold(op, dtype)(left, right, out=expected)
    mpis = _operator(module, name, dtype)
    mpis.Reduce_local([left, _ELEMENTS, kind], [right, _ELEMENTS, kind])
    return bool((right.view(np.uint8) != expected.view(np.uint8)).any())


def _operator(module: Any, name: str, dtype: DType) -> Any:
    """Return MPI's operator that matches this library's operator ``name`` on ``dtype``."""
    return getattr(module, (_BOOLEAN_OPS if dtype.kind == "b" else _OPS)[name])


def of_flags(flags: Array) -> Deviations:
    """Return the names that belong to flags of :func:`deviations`, of one rank or of several."""
    return frozenset(pair for pair, flag in zip(_TRIED, flags, strict=True) if flag)


def mpi_op(module: Any, op: ReduceOp, dtype: DType, unlike: Deviations) -> Any:
    """Return MPI's own operator for ``op`` on ``dtype``, or None if there is none to use.

    The result is None for user functions and 16-bit floats, and for pairs in ``unlike``. It is None
    for logical operators on floats, which MPI does not define (MPI 4.1, section 6.9.2). It is also
    None for the minimum and maximum of floats: MPI does not specify the results for NaN and for
    signed zeros, and implementations lose them.
    """
    if op.function is not None or (dtype.itemsize == 2 and dtype.kind == "f"):
        return None
    if dtype.kind == "f" and op.name in ("min", "max", "land", "lor"):
        return None
    if (op.name, dtype.name) in unlike:
        return None
    return _operator(module, op.name, dtype)


class Slot:
    """One running reduction with a function in Python.

    Attributes:
        types: an MPI datatype for each element size; no other slot has the same datatypes.
        fold: the function; None while no reduction has the slot.
        storage: NumPy type of the elements.
        error: exception that the function raised.
    """

    __slots__ = ("error", "fold", "storage", "types")

    def __init__(self, types: dict[int, Any]) -> None:
        self.types = types
        self.fold: arithmetic.Fold | None = None
        self.storage: np.dtype[Any] | None = None
        self.error: BaseException | None = None

    def __call__(self, left: Any, right: Any) -> None:
        """Set ``right`` to ``left op right``; keep any exception, which must not reach MPI."""
        if self.error is None:
            try:
                b = np.frombuffer(right, self.storage)
                with np.errstate(all="ignore"):
                    self.fold(np.frombuffer(left, self.storage), b, out=b)  # type: ignore[misc]
            except BaseException as error:
                self.error = error


def _call(left: Any, right: Any, datatype: Any) -> None:
    """Run as the function of the two operators: MPI's ``inoutvec[i] = invec[i] op inoutvec[i]``."""
    _by_handle[_handle(datatype)](left, right)


_handle: Callable[[Any], int]


def prepare(module: Any) -> None:
    """Make the operators and the slots, once per process, while no reduction is running."""
    global _handle
    with _lock:
        if _operators:
            return
        _handle = module._handleof
        for _ in range(_SLOTS):
            types = {size: module.BYTE.Create_contiguous(size).Commit() for size in _SIZES}
            new_slot = Slot(types)
            _slots.append(new_slot)
            _by_handle.update((_handle(datatype), new_slot) for datatype in types.values())
        _operators.extend(module.Op.Create(_call, commute) for commute in (False, True))


@contextlib.contextmanager
def slot(fold: MpiFold, turn: Callable[[], None]) -> Iterator[Slot]:
    """Take a slot for a reduction by ``fold``; call ``turn()`` while no slot is free.

    Raises:
        BaseException: at the end, the exception that the reduction's function raised.
    """
    global _running
    while (taken := _take()) is None:
        turn()
    taken.fold, taken.storage = fold.function, fold.storage
    try:
        yield taken
        error = taken.error
    finally:
        taken.fold = taken.error = None
        with _lock:
            _slots.append(taken)
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
    """Hold off reductions with a function in Python while the body makes a communicator.

    Running reductions end soon, since all ranks have arrived in them; ``turn()`` is called until
    they have ended. Later reductions see :data:`being_made`.
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
        type: the MPI datatype; None for a user-defined operator, whose slot has the datatype.
        function: this library's function if MPI has no operator, or None.
        storage: NumPy type of the elements.
        pre, post: functions that change each input and each result, or None.
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
        """Return this rank's contribution: ``src``, or ``src`` scaled in ``room`` or new memory."""
        if self.pre is None:
            return src.array
        scaled = np.empty_like(src.array) if room is None else room.array
        with np.errstate(all="ignore"):
            self.pre(src.array, scaled)
        return scaled

    def leave(self, dst: Array) -> None:
        """Turn a reduced value, in place, into the result."""
        if self.post is not None:
            with np.errstate(all="ignore"):
                self.post(dst, dst)

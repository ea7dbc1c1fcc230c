"""Reductions prepared for MPI: its own operators, and ours as operators of MPI's.

An operator that MPI lacks is one of two MPI operators for the whole process, whose function
is called with pieces of the arrays and their datatype. The datatype says which reduction is
running: each running one has a slot with datatypes of its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from collective.algorithms import arithmetic

from .datatypes import Deviations, mpi_op, type_of

if TYPE_CHECKING:
    from collective.memory.buffer import Buffer
    from collective.memory.dtypes import DType
    from collective.ops import ReduceOp

__all__ = ["MpiFold", "Slot", "being_made", "making", "prepare", "slot"]

Array = np.ndarray[Any, Any]

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

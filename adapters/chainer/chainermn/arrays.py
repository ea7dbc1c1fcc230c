"""What ChainerMN's array calls take, and what is told of arrays whose shapes differ per rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import chainer
import numpy as np

from collective.errors import InvalidArgumentError, MismatchError
from collective.memory import dtypes

if TYPE_CHECKING:
    from collective.communicator import Communicator

__all__ = [
    "MessageMismatchError",
    "MessageTypeError",
    "Shape",
    "agreed",
    "checked",
    "checked_each",
    "exchanged",
    "flat",
    "from_root",
    "on_gpu",
    "parted",
]

_TYPES = ("int32", "int64", "float16", "float32", "float64")
_DTYPES = {np.dtype(name) for name in _TYPES}
# A row has the number of the dtype, whether it is on a GPU, how many dimensions and these;
# NumPy's arrays have 64 at most.
_DIMENSIONS = 64
_WORDS = 3 + _DIMENSIONS


class MessageTypeError(InvalidArgumentError, TypeError):
    """An object or an element type that ChainerMN's array calls do not take."""


class MessageMismatchError(MismatchError, TypeError):
    """The ranks' arrays differ in their element type; raised on every rank."""


class Shape(NamedTuple):
    """What a rank is told of another's array."""

    dtype: str
    shape: tuple[int, ...]
    on_gpu: bool

    @property
    def length(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


def checked(what: str, x: Any) -> Any:
    """Return ``x``, an array that ChainerMN carries, or a number of NumPy's as one.

    Raises:
        MessageTypeError: it is something else, or has another element type.
    """
    if isinstance(x, np.generic):
        x = np.asarray(x)
    if not isinstance(x, chainer.get_array_types()):
        raise MessageTypeError(
            f"{what}: a {type(x).__name__}; an array of NumPy or CuPy. Pass the array of a "
            f"Variable, or use {what}_obj."
        )
    if x.dtype not in _DTYPES:
        raise MessageTypeError(
            f"{what}: does not support dtype {x.dtype}; {', '.join(_TYPES)}. Cast it."
        )
    return x


def checked_each(what: str, xs: Sequence[Any], size: int | None = None) -> tuple[Any, ...]:
    """Return several arrays as a tuple, all of one element type and as many as there should be."""
    if size is not None and len(xs) != size:
        raise InvalidArgumentError(f"{what}: {len(xs)} arrays for {size} ranks; one for each.")
    found = tuple(checked(what, x) for x in xs)
    if not found:
        raise InvalidArgumentError(f"{what}: no arrays; one or more.")
    kinds = sorted({x.dtype.name for x in found})
    if len(kinds) > 1:
        raise MessageTypeError(f"{what}: arrays of {', '.join(kinds)}; of one dtype. Cast them.")
    return found


def on_gpu(x: Any) -> bool:
    """Tell whether an array is on a GPU."""
    return not isinstance(x, np.ndarray)


def flat(xs: Sequence[Any]) -> Any:
    """Return all elements of some arrays, one after the other."""
    if len(xs) == 1:
        return xs[0].reshape(-1)
    xp = chainer.backend.get_array_module(*xs)
    return xp.concatenate([x.reshape(-1) for x in xs])


def parted(joined: Any, shapes: Sequence[Shape]) -> tuple[Any, ...]:
    """Return the arrays that stand one after the other in ``joined``."""
    found, start = [], 0
    for each in shapes:
        found.append(joined[start : start + each.length].reshape(each.shape))
        start += each.length
    return tuple(found)


def exchanged(comm: Communicator, xs: Sequence[Any]) -> list[list[Shape]]:
    """Tell all ranks what arrays this one has, and return what each has, in rank order.

    Collective: every rank calls it, with as many arrays.
    """
    rows = _rows(xs)
    table = comm.all_gather(rows, counts=[len(rows)] * comm.size)
    shapes = [_shape(row) for row in table]
    return [shapes[start : start + len(rows)] for start in range(0, len(shapes), len(rows))]


def from_root(comm: Communicator, root: int, xs: Sequence[Any] | None) -> list[Shape]:
    """Return what arrays the root has for the ranks, one for each."""
    rows = np.empty((comm.size, _WORDS), np.int64) if xs is None else _rows(xs)
    comm.broadcast(rows, root=root, out=rows)
    return [_shape(row) for row in rows]


def agreed(what: str, shapes: Sequence[Shape], comm: Communicator) -> None:
    """Refuse arrays of different element types, one a rank, on all ranks."""
    kinds = [each.dtype for each in shapes]
    if len(set(kinds)) > 1:
        listed = ", ".join(f"rank {rank} {kind}" for rank, kind in enumerate(kinds))
        raise MessageMismatchError(
            f"{what}: all dtypes must be the same; {listed} [rank {comm.rank} of {comm.size}]. "
            "Cast them."
        )


def _rows(xs: Sequence[Any]) -> np.ndarray[Any, Any]:
    rows = np.zeros((len(xs), _WORDS), np.int64)
    for row, x in zip(rows, xs):
        row[:3] = dtypes.BY_NAME[x.dtype.name].code, on_gpu(x), x.ndim
        row[3 : 3 + x.ndim] = x.shape
    return rows


def _shape(row: np.ndarray[Any, Any]) -> Shape:
    code, gpu, ndim = map(int, row[:3])
    return Shape(dtypes.BY_CODE[code].name, tuple(map(int, row[3 : 3 + ndim])), bool(gpu))

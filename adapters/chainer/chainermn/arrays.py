"""Arrays of ChainerMN's array calls: checks, and the exchange of shapes that differ by rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import chainer
import numpy as np

from collective import InvalidArgumentError, MismatchError
from collective.inner import dtypes

if TYPE_CHECKING:
    from collective import Communicator

_TYPES = ("int32", "int64", "float16", "float32", "float64")
_DTYPES = {np.dtype(name) for name in _TYPES}
# A row holds the dtype's number, whether the array is on a GPU, the number of dimensions, and the
# dimensions. NumPy's arrays have at most 64 dimensions.
_DIMENSIONS = 64
_WORDS = 3 + _DIMENSIONS


class MessageTypeError(InvalidArgumentError, TypeError):
    """Object or element type that ChainerMN's array calls do not take."""


class MessageMismatchError(MismatchError, TypeError):
    """Different element types of the ranks' arrays; raised on every rank."""


class Shape(NamedTuple):
    """Description of a peer's array."""

    dtype: str
    shape: tuple[int, ...]
    on_gpu: bool

    @property
    def length(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def checked(what: str, x: Any) -> Any:
    """Return ``x`` if it is an array that ChainerMN can send; turn a NumPy scalar into an array.

    Raises:
        MessageTypeError: ``x`` is no such array, or has another element type.
    """
    if isinstance(x, np.generic):
        x = np.asarray(x)
    if not isinstance(x, chainer.get_array_types()):
        raise MessageTypeError(
            f"{what}: x is a {type(x).__name__} (expected an array of NumPy or CuPy). Pass the "
            f"array of a Variable, or use {what}_obj."
        )
    if x.dtype not in _DTYPES:
        raise MessageTypeError(
            f"{what}: does not support dtype {x.dtype} (expected one of {', '.join(_TYPES)}). "
            "Cast the array."
        )
    return x


def checked_each(what: str, xs: Sequence[Any], size: int | None = None) -> tuple[Any, ...]:
    """Return several arrays as a tuple, after a check of their dtypes and of their number."""
    if size is not None and len(xs) != size:
        raise InvalidArgumentError(
            f"{what}: {len(xs)} arrays for {size} ranks (expected one array for each rank)."
        )
    arrays = tuple(checked(what, x) for x in xs)
    if not arrays:
        raise InvalidArgumentError(f"{what}: no arrays (expected at least one).")
    kinds = sorted({x.dtype.name for x in arrays})
    if len(kinds) > 1:
        raise MessageTypeError(
            f"{what}: the arrays have dtypes {', '.join(kinds)} (expected a single dtype). Cast "
            "them."
        )
    return arrays


def on_gpu(x: Any) -> bool:
    """Return whether an array is on a GPU."""
    return not isinstance(x, np.ndarray)


def flat(xs: Sequence[Any]) -> Any:
    """Return all elements of some arrays, concatenated to one dimension."""
    if len(xs) == 1:
        return xs[0].reshape(-1)
    xp = chainer.backend.get_array_module(*xs)
    return xp.concatenate([x.reshape(-1) for x in xs])


def parted(joined: Any, shapes: Sequence[Shape]) -> tuple[Any, ...]:
    """Split ``joined``, the result of :func:`flat`, into arrays of the given shapes."""
    arrays, start = [], 0
    for described in shapes:
        arrays.append(joined[start : start + described.length].reshape(described.shape))
        start += described.length
    return tuple(arrays)


def exchanged(comm: Communicator, xs: Sequence[Any]) -> list[list[Shape]]:
    """Exchange descriptions of the ranks' arrays; return those of each rank, in rank order.

    Collective: every rank calls it, with the same number of arrays.
    """
    rows = _rows(xs)
    table = comm.all_gather(rows, counts=[len(rows)] * comm.size)
    shapes = [_shape(row) for row in table]
    return [shapes[start : start + len(rows)] for start in range(0, len(shapes), len(rows))]


def from_root(comm: Communicator, root: int, xs: Sequence[Any] | None) -> list[Shape]:
    """Return descriptions of the arrays that the root has for the ranks, one for each rank."""
    rows = np.empty((comm.size, _WORDS), np.int64) if xs is None else _rows(xs)
    comm.broadcast(rows, root=root, out=rows)
    return [_shape(row) for row in rows]


def agreed(what: str, shapes: Sequence[Shape], comm: Communicator) -> None:
    """Check that the ranks' arrays have the same element type; every rank raises the error."""
    kinds = [described.dtype for described in shapes]
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

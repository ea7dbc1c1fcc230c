"""Output arrays of calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.errors import DeviceError, DtypeError, InvalidArgumentError, ShapeError
from collective.memory import nested
from collective.memory.arrays import NUMBERS, Adapter, Staged, adapter_of
from collective.memory.buffer import Buffer
from collective.memory.dtypes import DType
from collective.memory.overlap import find_overlap, writable_arrays


class Output:
    """Array for the result of a call: the user's array or a new one.

    Args:
        what: the operation, for errors.
        out: the user's array; if None, ``adapter`` makes a new array.
        shape, dtype: shape and dtype of the result.
        near: an array of the call, in the kind of memory that the transport works on. If that is
            host memory, ``out`` may still be on a GPU: the result is copied to it.
        x: the user's input, if ``near`` is the transport's view of it.

    On a GPU, ``out`` may be on another stream than ``near``. Then the call waits for the present
    work of that stream, and later work on that stream waits for the call.

    Attributes:
        flat: contiguous array of the result's length, which the transport writes.
        in_place: true if ``flat`` has been found to be the memory of ``near``.
    """

    __slots__ = (
        "_adapter",
        "_apart",
        "_array",
        "_dtype",
        "_given",
        "_near",
        "_target",
        "flat",
        "in_place",
    )

    def __init__(
        self,
        what: str,
        out: Any,
        adapter: Adapter,
        shape: tuple[int, ...],
        dtype: DType,
        near: Any = None,
        x: Any = None,
    ) -> None:
        self._given = out
        self.in_place = False
        self._dtype = dtype
        self._adapter = adapter
        self._target: Any = None
        self._near: Any = None  # set only if `out` is on another stream than `near`
        on_host = near is None or isinstance(near, np.ndarray)
        if out is None:
            if not on_host:
                self._array = adapter.empty(shape, dtype, near.device, near.stream)
            elif adapter.immutable:
                self._array = adapter.empty(shape, dtype, None)
            else:
                self._array = np.empty(shape, dtype.storage)
            self.flat = self._array.ravel()
            return
        if _is_view(near, out, x) and near.shape == shape and near.flags.carray:
            # In place. The checks below are not needed: the input has passed them already.
            self._array, self._apart, self.flat = near, False, near.ravel()
            self.in_place = True
            return
        if adapter is NUMBERS:
            raise InvalidArgumentError(
                f"{what}: a number cannot be written to, so out must be None with a number. Use "
                "the return value of the call, or pass arrays."
            )
        array, out_dtype = adapter_of(out, what, "out").output(out)
        if out_dtype is not dtype:
            raise DtypeError(f"{what}: out has dtype {out_dtype}; the result has {dtype}.")
        if array.shape != shape:
            raise ShapeError(f"{what}: out has shape {array.shape}; the result has {shape}.")
        self._apart = not array.flags.carray
        if self._apart:
            refuse_overlap(what, [array])
        if not on_host:
            if type(array) is not type(near) or array.device is not near.device:
                same_memory(what, near, array)
            if array.stream is not near.stream:
                self._near = near
        elif isinstance(adapter, Staged):
            same_memory(what, adapter, array)
        if on_host and not isinstance(array, np.ndarray):
            self._target, array = array, np.empty(shape, dtype.storage)
            self._apart = False
        self._array = array
        self.flat = Buffer.empty(array.size, dtype, array).array if self._apart else array.ravel()
        if self._near is not None:
            self._near.effective_stream.wait_for(array.stream)

    def finish(self) -> Any:
        """Return the result in the form that the caller requested."""
        if self._given is None:
            return self._adapter.wrap(self._array, self._dtype)
        array: Any = self._array
        if self._near is not None:
            array.effective_stream.wait_for(self._near.effective_stream)
        if self._apart:
            array[...] = self.flat.reshape(array.shape)
        if self._near is not None:
            array.stream.wait_for(array.effective_stream)
        if self._target is not None:
            self._target.fill_from_host(self._array)
        return self._given


def input_buffer(array: Any, dtype: DType, output: Output | None, out: Any, x: Any) -> Buffer:
    """Return a buffer with the input that either does not overlap the output, or is the output.

    Args:
        array, dtype: input of the call, and its dtype.
        output: output of the call; None if this rank gets no result.
        out: the user's array for the result.
        x: the user's input. If ``out`` is the same object, the call works in place.
    """
    if output is not None and output.in_place:
        return Buffer(output.flat, dtype)
    flat = array.ravel()
    if not flat.flags.aligned:  # such as a view of bytes from a file, behind a header
        flat = flat.copy()
    if output is not None and out is not None:
        if out is x:
            # In place: one buffer, unless strides made a contiguous copy necessary.
            if np.may_share_memory(flat, output.flat):
                return Buffer(output.flat, dtype)
        elif np.may_share_memory(flat, output.flat):
            flat = flat.copy()
    return Buffer(flat, dtype)


def outputs_of(what: str, out: Any, nesting: Any, count: int, like: str, who: str) -> list[Any]:
    """Return the arrays for the leaves of a result: the leaves of ``out``, or None for each leaf.

    Args:
        what, who: the operation and this rank, for errors.
        nesting: nesting of the result, from :func:`collective.memory.nested.skeleton`.
        count: number of leaves.
        like: word for the structure that ``out`` must match ("input" or "result"), for errors.

    Raises:
        InvalidArgumentError: ``out`` is nested differently, or its leaves overlap.
    """
    if out is None:
        return [None] * count
    if nested.skeleton(out) != nesting:
        raise InvalidArgumentError(f"{what}: out is nested differently from the {like} {who}.")
    refuse_overlap(what, writable_arrays(out, what))
    return nested.flatten(out)


def refuse_overlap(what: str, arrays: Sequence[Any]) -> None:
    """Refuse outputs in which an element would be written twice: its value would be undefined.

    Args:
        what: the operation, for the error.
        arrays: views of the leaves of ``out``, in the order of the leaves.

    Raises:
        InvalidArgumentError: elements of one array, or of two arrays, share memory.
    """
    pair = find_overlap(arrays)
    if pair is None:
        return
    first, second = pair
    if first == second:
        which = f"out[{first}]" if len(arrays) > 1 else "out"
        raise InvalidArgumentError(
            f"{what}: elements of {which} share memory, as in an expanded view; pass an array "
            "whose elements do not overlap."
        )
    raise InvalidArgumentError(
        f"{what}: leaves {first} and {second} of out share memory; pass arrays that do not overlap."
    )


def _is_view(near: Any, out: Any, x: Any) -> bool:
    """Return true if ``near`` is certainly a view of all of ``out``."""
    # The owner of a view is the framework's array. A copy that replaces the array has another
    # owner.
    return near is out or (out is x and type(near) is not np.ndarray and near.owner is x)


def same_memory(what: str, a: Any, b: Any) -> None:
    """Refuse two arrays if one is on the CPU and one on a GPU, or if they are on two GPUs.

    Args:
        a, b: arrays, or other objects with an attribute ``device``.
    """
    # Arrays on a device without an ordinal are read and written through host memory.
    ordinals = [
        None if isinstance(array, np.ndarray) else getattr(array.device, "ordinal", None)
        for array in (a, b)
    ]
    places = ["the CPU" if ordinal is None else f"cuda:{ordinal}" for ordinal in ordinals]
    if places[0] != places[1]:
        raise DeviceError(
            f"{what}: arrays on {' and on '.join(places)} in one call; all must be in one "
            "place. Copy them to one device."
        )

"""Where the result of a call goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from collective.errors import DeviceError, DtypeError, InvalidArgumentError, ShapeError
from collective.memory import nested
from collective.memory.arrays import Adapter, adapter_of
from collective.memory.buffer import Buffer
from collective.memory.dtypes import DType
from collective.memory.numbers import NUMBERS
from collective.memory.overlap import find_overlap, writable_arrays
from collective.memory.through_host import Staged

__all__ = ["Output", "input_buffer", "outputs_of", "refuse_overlap", "same_memory"]


class Output:
    """Where a result goes: an array of the user's or a new one.

    Args:
        what: the operation, for errors.
        out: the user's; None makes a new one, with ``adapter``.
        shape, dtype: the result's.
        near: an array of the call's, of the kind of memory that the transport works on. An
            ``out`` on a GPU takes results in host memory, too: they are copied there.
        x: what the call was given, if ``near`` is how the transport has it.

    On a GPU an ``out`` may be on another stream than ``near``: the call waits for what is there,
    and what comes there later waits for the call.

    Attributes:
        flat: contiguous, of the result's length; what the transport writes to.
        in_place: whether that is known to be the memory of ``near``.
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
        self._near: Any = None  # where that is on another stream
        on_host = near is None or isinstance(near, np.ndarray)
        if out is None:
            self._array = (
                np.empty(shape, dtype.storage)
                if on_host
                else adapter.empty(shape, dtype, near.device, near.stream)
            )
            self.flat = self._array.ravel()
            return
        if _is_view(near, out, x) and near.shape == shape and near.flags.carray:
            # In place, and what would be asked of it is known of the input.
            self._array, self._apart, self.flat = near, False, near.ravel()
            self.in_place = True
            return
        if adapter is NUMBERS:
            raise InvalidArgumentError(
                f"{what}: out with a number, which cannot be written to; leave it out, and take "
                "what the call returns, or pass arrays."
            )
        array, found = adapter_of(out).output(out)
        if found is not dtype:
            raise DtypeError(f"{what}: out has dtype {found}; the result has {dtype}.")
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
        """Return the result as the caller wants it."""
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
    """Return ``array`` as a buffer that overlaps the output not at all, or entirely.

    Args:
        array, dtype: the call's input.
        output: where the result goes; None where this rank gets none.
        out: the user's array for the result.
        x: the user's input. If ``out`` is the same the call works in place.
    """
    if output is not None and output.in_place:
        return Buffer(output.flat, dtype)
    flat = array.ravel()
    if output is not None and out is not None:
        if out is x:
            # In place: one buffer, unless the strides made it two.
            if np.may_share_memory(flat, output.flat):
                return Buffer(output.flat, dtype)
        elif np.may_share_memory(flat, output.flat):
            flat = flat.copy()
    return Buffer(flat, dtype)


def outputs_of(what: str, out: Any, nesting: Any, count: int, like: str, who: str) -> list[Any]:
    """Return where the leaves of a result go: those of ``out``, or None for each of them.

    Args:
        what, who: the operation and this rank, for errors.
        nesting: of the result, as of :func:`collective.memory.nested.skeleton`.
        count: number of leaves.
        like: what the result is nested like, for errors.

    Raises:
        InvalidArgumentError: ``out`` is nested differently, or its leaves overlap.
    """
    if out is None:
        return [None] * count
    if nested.skeleton(out) != nesting:
        raise InvalidArgumentError(f"{what}: out is nested differently from the {like} {who}.")
    refuse_overlap(what, writable_arrays(out))
    return nested.flatten(out)


def refuse_overlap(what: str, arrays: Sequence[Any]) -> None:
    """Refuse outputs of which one element is written twice: its value would be left to chance.

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
            "whose elements are all apart."
        )
    raise InvalidArgumentError(
        f"{what}: leaves {first} and {second} of out share memory; pass arrays that are apart."
    )


def _is_view(near: Any, out: Any, x: Any) -> bool:
    """Tell whether an array of the call's is known to be all of ``out``, where that is."""
    # A view of a framework's array belongs to that, and not to a copy that stands for it.
    return near is out or (out is x and type(near) is not np.ndarray and near.owner is x)


def same_memory(what: str, a: Any, b: Any) -> None:
    """Refuse arrays of which one is on the CPU and one on a GPU, or on two GPUs.

    Args:
        a, b: arrays, or what else tells its ``device``.
    """
    places = [
        "the CPU" if isinstance(array, np.ndarray) else f"cuda:{array.device.ordinal}"
        for array in (a, b)
    ]
    if places[0] != places[1]:
        raise DeviceError(
            f"{what}: arrays on {' and on '.join(places)} in one call; all must be in one "
            "place. Copy them there."
        )

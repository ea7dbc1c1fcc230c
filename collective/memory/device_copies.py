"""Copies of elements in GPU memory, and between GPU memory and the host."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from collective import cuda
from collective.cuda import Device, Event, Stream
from collective.cuda.pinning import LARGEST, is_pinned, pinned
from collective.errors import DeviceError, DtypeError, InvalidArgumentError, ShapeError

if TYPE_CHECKING:
    from .device_array import DeviceArray

Array = np.ndarray[Any, Any]

# Bytes of one step of a copy between the GPU and ordinary host memory. There are two blocks of this
# size: while one is on the bus, the CPU moves the other.
_STEP = 1 << 22


class Space(Protocol):
    """Allocator of a framework's GPU memory, which also copies arrays with gaps."""

    def empty(self, nbytes: int, device: Device, stream: Stream) -> tuple[int, Any]:
        """Return the address of new memory for use on ``stream``, and the memory's owner."""
        ...

    def assign(self, dst: DeviceArray, src: DeviceArray) -> None:
        """Enqueue a copy of elements on ``dst.effective_stream``.

        Both arrays have the same shape, dtype and device, and do not overlap. ``src`` may have
        strides of 0, but ``dst`` has none.
        """
        ...


class PlainSpace(Space):
    """Memory of CUDA's own allocator, with copies by the GPU's copy engines.

    The copy engines do not support negative strides, so a reversed axis costs one copy for each
    element. Copies of single elements are slow. Frameworks have kernels for such copies; this space
    is for arrays that belong to no framework.
    """

    def empty(self, nbytes: int, device: Device, stream: Stream) -> tuple[int, Any]:
        """Return the address of new memory for use on ``stream``, and the memory's owner."""
        memory = cuda.allocate(device, nbytes, stream)
        return memory.address, memory

    def assign(self, dst: DeviceArray, src: DeviceArray) -> None:
        """Enqueue a copy of elements on ``dst.effective_stream``."""
        axes = list(zip(dst.shape, dst.strides, src.strides))
        copies = _RowCopies(dst.itemsize, dst.device.max_pitch, dst.effective_stream)
        copies.elements(dst.address, src.address, axes)


PLAIN = PlainSpace()

#: Length, and the strides of destination and source.
Axis = tuple[int, int, int]


class _RowCopies:
    """Copy of elements with strides, done as few copies of rows."""

    def __init__(self, itemsize: int, max_pitch: int, stream: Stream) -> None:
        self._itemsize = itemsize
        self._max_pitch = max_pitch
        self._stream = stream

    def elements(self, dst: int, src: int, axes: list[Axis]) -> None:
        """Copy all elements, in any order."""
        kept = []
        for length, to, of in axes:
            if length == 1:
                continue
            if to < 0 or (to == 0 and of < 0):
                # Go along the axis from its other end. If both strides were negative, both are
                # positive then.
                dst += (length - 1) * to
                src += (length - 1) * of
                to, of = -to, -of
            kept.append((length, to, of))
        kept = _merged(sorted(kept, key=lambda axis: (-axis[1], -abs(axis[2]))))
        for n, (length, to, of) in enumerate(kept):
            if of == 0:
                self._repeated(dst, src, length, to, kept[:n] + kept[n + 1 :])
                return
        self._rows(dst, src, kept)

    def _repeated(self, dst: int, src: int, length: int, to: int, others: list[Axis]) -> None:
        """Copy repeated elements along an axis once, then copy the copies: 1, 2, 4, … at once."""
        self.elements(dst, src, others)
        done = 1
        written = [(count, stride, stride) for count, stride, _ in others]
        while done < length:
            more = min(done, length - done)
            self.elements(dst + done * to, dst, [(more, to, to), *written])
            done += more

    def _rows(self, dst: int, src: int, axes: list[Axis]) -> None:
        width = self._itemsize
        if axes and axes[-1][1] == axes[-1][2] == width:
            width *= axes.pop()[0]
        # A 2D copy takes rows at a fixed forward pitch. Use the longest axis that has one.
        fits = [
            axis
            for axis in axes
            if width <= axis[1] <= self._max_pitch and width <= axis[2] <= self._max_pitch
        ]
        rows, to, of = best = max(fits, default=(1, 0, 0))
        if fits:
            axes.remove(best)
        for steps in itertools.product(*(range(length) for length, _, _ in axes)):
            cuda.copy_2d(
                dst + sum(step * axis[1] for step, axis in zip(steps, axes)), to,
                src + sum(step * axis[2] for step, axis in zip(steps, axes)), of,
                width, rows, self._stream,
            )  # fmt: skip


def _merged(axes: list[Axis]) -> list[Axis]:
    """Join neighbouring axes that are one evenly spaced axis in both arrays; outer axes first."""
    merged: list[Axis] = []
    for length, to, of in axes:
        if merged and merged[-1][1] == to * length and merged[-1][2] == of * length:
            merged[-1] = (merged[-1][0] * length, to, of)
        else:
            merged.append((length, to, of))
    return merged


def assign(dst: DeviceArray, src: Any) -> None:
    """Enqueue ``dst[...] = src``, between the earlier and the later work on both streams."""
    if type(src) is not type(dst):
        raise DeviceError(
            f"array: elements on {dst.device} from {type(src).__name__}; host data is never copied "
            "to a GPU silently. Use fill_from_host()."
        )
    _check_writeable(dst)
    if src.device is not dst.device:
        raise DeviceError(
            f"array: elements on {dst.device} from {src.device}; elements are never copied between "
            "GPUs silently. Copy the array there first."
        )
    if src.dtype != dst.dtype:
        raise DtypeError(
            f"array: elements of {dst.dtype} from {src.dtype}; dtypes are not converted on a GPU. "
            "Convert the array first."
        )
    if src.shape != dst.shape:
        src = src.broadcast_to(dst.shape)
    if not dst.size or (dst.address == src.address and dst.strides == src.strides):
        return
    (low, high), (start, stop) = dst.bounds, src.bounds
    if low < stop and start < high:
        src = src.copy()
    stream, other = dst.effective_stream, src.effective_stream
    if other is stream:
        _copy(dst, src, stream)
    else:
        stream.wait_for(other)
        _copy(dst, src, stream)
        other.wait_for(stream)


def _copy(dst: DeviceArray, src: DeviceArray, stream: Stream) -> None:
    if dst.flags.c_contiguous and src.flags.c_contiguous:
        stream.copy(dst.address, src.address, dst.nbytes)
    else:
        dst.space.assign(dst, src)


def _check_writeable(array: DeviceArray) -> None:
    if not array.writeable:
        raise InvalidArgumentError("array: the array is read-only; pass a writeable one.")


# -- the host ---------------------------------------------------------------------------------


def to_host(array: DeviceArray, out: Array | None) -> Array:
    """See :meth:`DeviceArray.to_host`."""
    if out is None:
        out = _host_memory(array.shape, array.dtype)
    else:
        _check_host(array, out)
    if array.size:
        packed = array if array.flags.c_contiguous else array.copy()
        target = out if out.flags.c_contiguous else np.empty(array.shape, array.dtype)
        _read(packed.address, target.reshape(-1).view(np.uint8), packed.effective_stream)
        if target is not out:
            out[...] = target
    return out


def fill_from_host(array: DeviceArray, source: Array) -> None:
    """See :meth:`DeviceArray.fill_from_host`."""
    _check_writeable(array)
    _check_host(array, source)
    if array.size:
        target = array if array.flags.c_contiguous else array.allocate(array.shape)
        raw = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
        _write(target.address, raw, target.effective_stream)
        if target is not array:
            array[...] = target
            array.effective_stream.synchronize()


def _check_host(array: DeviceArray, host: Array) -> None:
    if host.shape != array.shape:
        raise ShapeError(f"array: shape {host.shape} on the host, {array.shape} on the GPU.")
    if host.dtype != array.dtype:
        raise DtypeError(f"array: dtype {host.dtype} on the host, {array.dtype} on the GPU.")


def _host_memory(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return uninitialised host memory, page-locked if it is not longer than ``LARGEST``."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes > LARGEST or not nbytes:
        return np.empty(shape, dtype)
    return pinned(nbytes).view(dtype).reshape(shape)


def _read(address: int, out: Array, stream: Stream) -> None:
    """Copy bytes of a GPU to ``out``, and wait until they are there.

    Args:
        out: contiguous bytes in host memory.
    """
    with _in_flight(stream) as flight:
        for start, part, block in _steps(out):
            cuda.copy(_address(block), address + start, block.size, stream)
            flight.append((stream.record(), part, block))
            if len(flight) > 1:
                _land(*flight.popleft())
        while flight:
            _land(*flight.popleft())


def _write(address: int, source: Array, stream: Stream) -> None:
    """Copy bytes of ``source`` to a GPU, and wait until ``source`` may be changed.

    Args:
        source: contiguous bytes in host memory.
    """
    with _in_flight(stream) as flight:
        for start, part, block in _steps(source):
            # The copy before the last used the same block: wait for that copy.
            if len(flight) > 1:
                _finish(flight.popleft()[0])
            if block is not part:
                block[:] = part
            cuda.copy(address + start, _address(block), block.size, stream)
            flight.append((stream.record(), part, block))
        while flight:
            _finish(flight.popleft()[0])


Flight = deque[tuple[Event, Array, Array]]


@contextlib.contextmanager
def _in_flight(stream: Stream) -> Any:
    """Yield a queue of copies in flight; after an error, wait for them.

    So no copy is running any more when its block goes back to the pool.
    """
    flight: Flight = deque()
    try:
        yield flight
    except BaseException:
        with contextlib.suppress(Exception):
            stream.synchronize()
        raise


def _steps(array: Array) -> Any:
    """Yield, for each step, its offset, its bytes, and page-locked memory for them."""
    if is_pinned(array):
        yield 0, array, array
        return
    blocks = [pinned(min(_STEP, array.size)) for _ in range(min(2, -(-array.size // _STEP)))]
    for start, block in zip(range(0, array.size, _STEP), itertools.cycle(blocks)):
        part = array[start : start + _STEP]
        yield start, part, block[: part.size]


def _land(event: Event, part: Array, block: Array) -> None:
    _finish(event)
    if block is not part:
        part[:] = block


def _finish(event: Event) -> None:
    event.synchronize()
    event.release()


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])

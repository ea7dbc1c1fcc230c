"""CuPy arrays as DeviceArrays over the same memory."""

from __future__ import annotations

import contextlib
from typing import Any

import cupy
import numpy as np

from collective import cuda
from collective.cuda import Device, Stream
from collective.errors import AllocationError, DtypeError
from collective.memory import dtypes
from collective.memory.arrays import Adapter, NumpyAdapter, adapter_like
from collective.memory.buffer import Spot, new_spot
from collective.memory.device_adapter import root_owner
from collective.memory.device_array import DeviceArray
from collective.memory.device_space import DeviceElements
from collective.memory.dtypes import DType

__all__ = ["CupyAdapter"]


class CupyAdapter(Adapter):
    """CuPy's arrays, in memory of any kind, managed memory too.

    CuPy's memory pools do not know that other streams use an array: what is still worked on
    must be kept.
    """

    name = "cupy"

    def accepts(self, x: Any) -> bool:
        return isinstance(x, cupy.ndarray)

    def view(self, x: Any) -> tuple[DeviceArray, DType]:
        dtype = dtypes.from_numpy(x.dtype)
        pointer = x.data
        device = cuda.device(pointer.device_id)
        array = DeviceArray(
            pointer.ptr,
            x.shape,
            dtype.storage,
            device,
            device.stream(_current_handle(device.ordinal)),
            strides=x.strides,
            owner=x,
            space=_SPACE,
        )
        return array, dtype

    def spot(self, x: Any) -> Spot | None:
        dtype = dtypes.BY_NUMPY.get(x.dtype)
        if dtype is None or dtype.storage != x.dtype or not x.flags.c_contiguous:
            return None
        address, ordinal = x.data.ptr, x.data.device_id
        if not x.size or address % x.dtype.alignment:
            return None
        device = cuda.device(ordinal)
        stream = device.stream(_current_handle(ordinal))
        return new_spot((address, x.size, dtype, x.shape, stream, device))

    def wrap(self, array: Any, dtype: DType) -> Any:
        """Return CuPy over an array's memory; what is in host memory is copied to the GPU."""
        kind = _named(dtype)
        if isinstance(array, np.ndarray):
            return cupy.asarray(array).view(kind)
        owner = root_owner(array)
        if (
            isinstance(owner, cupy.ndarray)
            and owner.dtype == kind
            and owner.shape == array.shape
            and owner.data.ptr == array.address
            and (
                owner.strides == array.strides
                or (array.flags.c_contiguous and owner.flags.c_contiguous)
            )
        ):
            return owner
        return _over(array, kind)

    def empty(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        device: Device | None,
        stream: Stream | None = None,
    ) -> DeviceArray:
        """Return memory of CuPy's pool, on its current device if ``device`` is None."""
        device = device or cuda.device(cupy.cuda.Device().id)
        kind = _named(dtype)
        with _current(cuda.effective_stream(self.current_stream(device))):
            made = _allocate(shape, kind)
        return self.view(made)[0]

    def current_stream(self, device: Device, stream: Stream | None = None) -> Stream:
        return device.stream(_current_handle(device.ordinal))

    def used_on(self, x: Any, stream: Stream) -> None:
        owner = root_owner(x)
        if isinstance(owner, cuda.Memory):
            owner.used_on(stream)


class CupySpace:
    """Memory of CuPy's pool, copied by CuPy's kernels."""

    def empty(self, nbytes: int, device: Device, stream: Stream) -> tuple[int, Any]:
        """Return an address, and what owns it, for use in ``stream``'s order."""
        with _current(stream):
            owner = _allocate((nbytes,), np.dtype("uint8"))
        return owner.data.ptr, owner

    def assign(self, dst: DeviceElements, src: DeviceElements) -> None:
        """Copy between arrays of one shape and item size, with any strides."""
        kind = _MOVED[dst.dtype.itemsize]
        with _current(cuda.effective_stream(dst.stream)):
            _over(dst, kind)[...] = _over(src, kind)


_SPACE = CupySpace()
# Types by the size of an element, in which bits are moved.
_MOVED = {n: np.dtype(f"uint{8 * n}") for n in (1, 2, 4, 8)} | {16: np.dtype("complex128")}


def _current_handle(ordinal: int) -> int:
    return int(cupy.cuda.get_current_stream(ordinal).ptr)


def _allocate(shape: tuple[int, ...], kind: np.dtype[Any]) -> Any:
    try:
        return cupy.empty(shape, kind)
    except cupy.cuda.memory.OutOfMemoryError as error:
        raise AllocationError(f"cupy: no memory for {kind} of shape {shape}: {error}") from error
    except (TypeError, ValueError) as error:
        raise _unknown(kind) from error


def _named(dtype: DType) -> np.dtype[Any]:
    """Return CuPy's dtype, which is that of NumPy or of ml_dtypes."""
    numpy = adapter_like("numpy")
    assert isinstance(numpy, NumpyAdapter)
    try:
        return numpy.named(dtype)
    except DtypeError as error:
        raise DtypeError(f"cupy: {dtype} is not there without ml_dtypes: {error}") from error


@contextlib.contextmanager
def _current(stream: Stream) -> Any:
    """Make a stream and its device CuPy's current ones."""
    ordinal = stream.device.ordinal
    with cupy.cuda.Device(ordinal):
        if (stream.handle or 1) == (_current_handle(ordinal) or 1):
            yield
            return
        if stream.handle <= 1:
            theirs = cupy.cuda.Stream.null
        else:
            theirs = cupy.cuda.ExternalStream(stream.handle, ordinal)
        with theirs:
            yield


def _over(array: DeviceElements, kind: np.dtype[Any]) -> Any:
    """Return CuPy over an array's memory, as ``kind``."""
    owner = root_owner(array)
    memory = owner.data.mem if isinstance(owner, cupy.ndarray) else None
    if memory is None:
        # Strides may lead to lower addresses, so that the length says nothing.
        memory = cupy.cuda.UnownedMemory(
            array.address, array.nbytes, array, device_id=array.device.ordinal
        )
    pointer = cupy.cuda.MemoryPointer(memory, array.address - memory.ptr)
    try:
        return cupy.ndarray(array.shape, kind, pointer, strides=array.strides)
    except (TypeError, ValueError) as error:
        raise _unknown(kind) from error


def _unknown(kind: np.dtype[Any]) -> DtypeError:
    return DtypeError(
        f"cupy: version {cupy.__version__} has no {kind}; update it, or pass like='cuda'."
    )

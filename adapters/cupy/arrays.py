"""Views of CuPy arrays as DeviceArrays."""

from __future__ import annotations

import contextlib
from typing import Any

import cupy
import numpy as np

from collective import AllocationError, DtypeError
from collective.inner import Adapter, DeviceArray, DType, Spot, adapter_like, cuda, dtypes
from collective.memory.arrays import NumpyAdapter
from collective.memory.buffer import new_spot
from collective.memory.device_adapter import root_owner


class CupyAdapter(Adapter):
    """Adapter for CuPy's arrays, in any kind of memory, including managed memory.

    CuPy's memory pools do not know that other streams use an array. So the program has to keep an
    array until the work on it has completed.
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

    def is_plain(self, x: Any) -> bool:
        return type(x) is cupy.ndarray and bool(x.flags.c_contiguous)

    def wrap(self, array: Any, dtype: DType) -> Any:
        """Return a CuPy array over an array's memory; a host array is copied to the GPU."""
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
        device: cuda.Device | None,
        stream: cuda.Stream | None = None,
    ) -> DeviceArray:
        """Return memory of CuPy's pool, on CuPy's current device if ``device`` is None."""
        device = device or cuda.device(cupy.cuda.Device().id)
        kind = _named(dtype)
        with _current(cuda.effective_stream(self.current_stream(device))):
            owner = _allocate(shape, kind)
        return self.view(owner)[0]

    def current_stream(self, device: cuda.Device, stream: cuda.Stream | None = None) -> cuda.Stream:
        return device.stream(_current_handle(device.ordinal))

    def used_on(self, x: Any, stream: cuda.Stream) -> None:
        owner = root_owner(x)
        if isinstance(owner, cuda.Memory):
            owner.used_on(stream)


class CupySpace:
    """Memory from CuPy's pool, copied by CuPy's kernels."""

    def empty(self, nbytes: int, device: cuda.Device, stream: cuda.Stream) -> tuple[int, Any]:
        """Return the address and the owner of new memory, for use in the order of ``stream``."""
        with _current(stream):
            owner = _allocate((nbytes,), np.dtype("uint8"))
        return owner.data.ptr, owner

    def assign(self, dst: DeviceArray, src: DeviceArray) -> None:
        """Copy between arrays of the same shape and item size, with any strides."""
        kind = _MOVED[dst.dtype.itemsize]
        with _current(cuda.effective_stream(dst.stream)):
            _over(dst, kind)[...] = _over(src, kind)


_SPACE = CupySpace()
# Types for copies of bits, by the size of an element.
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
    """Return CuPy's dtype, which is a dtype of NumPy or of ml_dtypes."""
    numpy = adapter_like("numpy")
    assert isinstance(numpy, NumpyAdapter)
    try:
        return numpy.named(dtype)
    except DtypeError as error:
        raise DtypeError(f"cupy: {dtype} needs the package ml_dtypes: {error}") from error


@contextlib.contextmanager
def _current(stream: cuda.Stream) -> Any:
    """Make a stream and its device CuPy's current stream and device in the body."""
    ordinal = stream.device.ordinal
    with cupy.cuda.Device(ordinal):
        if (stream.handle or 1) == (_current_handle(ordinal) or 1):
            yield
            return
        if stream.handle <= 1:
            cupy_stream = cupy.cuda.Stream.null
        else:
            cupy_stream = cupy.cuda.ExternalStream(stream.handle, ordinal)
        with cupy_stream:
            yield


def _over(array: DeviceArray, kind: np.dtype[Any]) -> Any:
    """Return a CuPy array of type ``kind`` over an array's memory."""
    owner = root_owner(array)
    memory = owner.data.mem if isinstance(owner, cupy.ndarray) else None
    if memory is None:
        # The size has no meaning here: with negative strides, elements lie below `array.address`.
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
        f"cupy: CuPy {cupy.__version__} has no {kind}. Update CuPy, or pass like='cuda'."
    )

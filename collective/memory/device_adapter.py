"""Arrays on GPUs that belong to a framework without an adapter, or to no framework.

Arrays with ``__cuda_array_interface__`` (Numba, PyCUDA, RMM, …) are used without a copy:
https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, version 2 or 3.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from collective import cuda
from collective.cuda import Device, Stream
from collective.errors import DeviceError, InvalidArgumentError

from . import dlpack, dtypes
from .arrays import NumpyAdapter, ProducerAdapter, adapter_like
from .buffer import Spot, new_spot
from .device_array import DeviceArray
from .dtypes import FOREIGN, DType

# Root module of a framework -> module and function that imports a DeviceArray, for frameworks whose
# function is not from_dlpack of the root module.
_TAKERS = {
    "jax": ("jax.dlpack", "from_dlpack"),
    "jaxlib": ("jax.dlpack", "from_dlpack"),
    "numba": ("numba.cuda", "as_cuda_array"),
}


class CudaArrayAdapter(ProducerAdapter):
    """Adapter of arrays with ``__cuda_array_interface__``, and of DeviceArray.

    An array that names its stream is used on that stream. Other arrays are used on the legacy
    default stream, which waits for most streams, and for which most streams wait. Results have the
    same type if the framework can import foreign memory. If not, they are DeviceArrays.
    """

    name = "cuda"

    def __init__(self, root: str = "collective") -> None:
        self._root = root

    def of(self, cls: type) -> CudaArrayAdapter:
        """Return the adapter for the framework of a type."""
        return CudaArrayAdapter(cls.__module__.partition(".")[0])

    def view(self, x: Any) -> tuple[DeviceArray, DType]:
        if isinstance(x, DeviceArray):
            dtype = dtypes.BY_NUMPY.get(x.dtype) or dtypes.from_numpy(x.dtype)
            return (x.view(dtype.storage) if dtype.name in FOREIGN else x), dtype
        return _read(x)

    def spot(self, x: Any) -> Spot | None:
        if type(x) is not DeviceArray or x._strides is not None or not x.writeable:
            return None
        dtype = dtypes.BY_NUMPY.get(x.dtype)
        address, shape = x.address, x.shape
        if dtype is None or dtype.storage is not x.dtype or address % x.dtype.alignment:
            return None
        count = math.prod(shape)
        return new_spot((address, count, dtype, shape, x.stream, x.device)) if count else None

    def output(self, x: Any) -> tuple[DeviceArray, DType]:
        array, dtype = self.view(x)
        if not array.writeable:
            raise InvalidArgumentError("out: the array is read-only; pass a writable one.")
        return array, dtype

    def wrap(self, array: Any, dtype: DType) -> Any:
        return self.hand_back(array, dtype, self._root)

    def hand_back(self, array: Any, dtype: DType, root: str) -> Any:
        """Return an array of the framework whose module is ``root``, over ``array``'s memory."""
        take = _taker(root)
        if take is not None:
            # A framework may refuse an array, for example its element type, by any of these errors.
            with contextlib.suppress(TypeError, ValueError, BufferError, RuntimeError):
                return take(Typed(array, dtype))
        return array.view(_named(dtype)) if dtype.name in FOREIGN else array

    def empty(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        device: Device | None,
        stream: Stream | None = None,
    ) -> DeviceArray:
        """Return memory of CUDA's own allocator."""
        device = device or cuda.device(0)
        stream = stream or device.stream(0)
        nbytes = math.prod(shape) * dtype.itemsize
        memory = cuda.allocate(device, nbytes, cuda.effective_stream(stream))
        memory.used_on(stream)
        return DeviceArray(memory.address, shape, dtype.storage, device, stream, owner=memory)

    def used_on(self, x: Any, stream: Stream) -> None:
        owner = root_owner(x)
        if isinstance(owner, cuda.Memory):
            owner.used_on(stream)


class Typed:
    """Array on loan to a framework, with an element type that NumPy may not have."""

    def __init__(self, array: DeviceArray, dtype: DType) -> None:
        self._array = array
        self._dtype = dtype

    def __dlpack__(self, **options: Any) -> Any:
        return dlpack.export(self._array, dtype=self._dtype, **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.device_of(self._array)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self._dtype.name in FOREIGN:
            raise AttributeError(f"__cuda_array_interface__ knows no {self._dtype}")
        interface: dict[str, Any] = self._array.__cuda_array_interface__
        return interface


def root_owner(array: Any) -> Any:
    """Return the object that keeps an array's memory alive, behind any number of arrays."""
    while isinstance(array, DeviceArray):
        array = array.owner
    return array


def _taker(root: str) -> Callable[[Any], Any] | None:
    if root == "collective":
        return None
    module, name = _TAKERS.get(root, (root, "from_dlpack"))
    if root not in sys.modules:
        return None
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _named(dtype: DType) -> np.dtype[Any]:
    numpy = adapter_like("numpy")
    assert isinstance(numpy, NumpyAdapter)
    return numpy.named(dtype)


def read_dlpack(x: Any) -> tuple[DeviceArray, DType]:
    """Return ``x``, an array on a GPU, as a DeviceArray; see :func:`.dlpack.borrow`.

    Raises:
        DeviceError: ``x`` is not on a GPU.
        DtypeError, InvalidArgumentError: the framework does not lend ``x``, or transports do not
            support its element type.
    """
    lent = dlpack.borrow(x)
    if lent.device[0] not in (dlpack.CUDA, dlpack.CUDA_MANAGED):
        raise DeviceError(
            f"{type(x).__name__}: the array is on DLPack device {lent.device}; pass an array on "
            "an NVIDIA GPU or on the CPU."
        )
    device = cuda.device(lent.device[1])
    array = DeviceArray(
        lent.address,
        lent.shape,
        lent.dtype.storage,
        device,
        device.stream(0),
        strides=lent.strides,
        owner=lent.owner,
        writeable=lent.writeable,
    )
    return array, lent.dtype


def _read(x: Any) -> tuple[DeviceArray, DType]:
    """Return a DeviceArray for an object with ``__cuda_array_interface__``."""
    name = type(x).__name__
    interface = x.__cuda_array_interface__
    if interface.get("version", 0) < 2:
        raise InvalidArgumentError(
            f"{name}: version {interface.get('version')} of __cuda_array_interface__ is not "
            "supported; version 2 is the minimum. Use a newer release of the array's framework."
        )
    if interface.get("mask") is not None:
        raise InvalidArgumentError(f"{name}: masks do not travel; fill the masked elements.")
    dtype = dtypes.from_numpy(_numpy_dtype(x, interface["typestr"]))
    address, read_only = interface["data"]
    handle = _handle(name, interface.get("stream"))
    device = cuda.device(_ordinal(name, address or 0, handle))
    array = DeviceArray(
        address or 0,
        tuple(interface["shape"]),
        dtype.storage,
        device,
        device.stream(handle),
        strides=interface.get("strides"),
        owner=x,
        writeable=not read_only,
    )
    return array, dtype


def _numpy_dtype(x: Any, typestr: str) -> np.dtype[Any]:
    """Return the dtype of ``x``; for a type of ml_dtypes, ``typestr`` has no name."""
    with contextlib.suppress(TypeError):
        dtype = np.dtype(typestr)
        if dtype.kind != "V" or not hasattr(x, "dtype"):
            return dtype
    named: np.dtype[Any] = np.dtype(x.dtype)
    return named


def _ordinal(name: str, address: int, handle: int) -> int:
    if not address:
        # An empty array has no address, but it has a stream.
        return cuda.owner_of_stream(handle) or 0
    ordinal = cuda.owner_of(address)
    if ordinal is None:
        raise DeviceError(
            f"{name}: its __cuda_array_interface__ gives an address in host memory; pass a NumPy "
            "array over it, or copy it to a GPU."
        )
    return ordinal


def _handle(name: str, stream: Any) -> int:
    if stream is None:
        return 0
    if isinstance(stream, bool) or not isinstance(stream, int) or stream < 1:
        raise InvalidArgumentError(
            f"{name}: stream {stream!r} in its __cuda_array_interface__ is not valid; allowed are "
            "None, 1 for the legacy default stream, 2 for the per-thread one, or a handle."
        )
    return 0 if stream == dlpack.LEGACY else stream

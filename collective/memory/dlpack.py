"""DLPack, the protocol by which frameworks lend each other arrays, for arrays on GPUs.

NumPy supports DLPack for the CPU. For GPUs, this module reads capsules itself, and makes capsules
by changing those of NumPy. A capsule holds a C structure that describes the lent array. The taker
renames the capsule, and calls the structure's deleter when it no longer needs the memory.

Source: dmlc/dlpack, include/dlpack/dlpack.h, versions 0.8 and 1.1. The Python side is in the
array API standard, under ``__dlpack__``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_void_p, py_object
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from collective.errors import DtypeError, InvalidArgumentError

from . import device_layout, dtypes
from .dtypes import BY_NAME, DType

if TYPE_CHECKING:
    from collective.cuda import Stream

    from .device_array import DeviceArray

# Values of DLDeviceType. Managed memory moves between host and GPU by itself; this package treats
# it as GPU memory.
CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
#: Number of the legacy default stream in the protocol; 2 is the default stream of a thread.
LEGACY = 1
_READ_ONLY, _IS_COPIED = 1, 2
_VERSION = (1, 1)

# Whether NumPy can make capsules of version 1: NumPy 2.1 is the first that can.
_SPEAKS_1 = np.lib.NumpyVersion(np.__version__) >= "2.1.0.dev0"

# Values of DLDataTypeCode, by DType.kind, or by DType.name for the types whose kind is ambiguous.
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_CODES |= {"bfloat16": 4, "float8_e4m3fn": 10, "float8_e5m2": 12}


class _Tensor(Structure):
    """DLTensor, with the fields of DLDevice and DLDataType inline."""

    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(Structure):
    """DLManagedTensor, the structure before version 1."""

    _fields_ = [("tensor", _Tensor), ("context", c_void_p), ("deleter", c_void_p)]
    name = b"dltensor"
    used = b"used_dltensor"


class _Versioned(Structure):
    """DLManagedTensorVersioned, the structure from version 1 on."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", c_void_p),
        ("deleter", c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]
    name = b"dltensor_versioned"
    used = b"used_dltensor_versioned"


def _c(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of Python's C API, which runs with the GIL held."""
    # Make a new function object: the attributes of ctypes.pythonapi are shared with other modules,
    # which may set other argument types.
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_is_capsule = _c("PyCapsule_IsValid", c_int32, c_void_p, c_char_p)
_pointer_in = _c("PyCapsule_GetPointer", c_void_p, c_void_p, c_char_p)
_rename = _c("PyCapsule_SetName", c_int32, py_object, c_char_p)
_Deleter = ctypes.PYFUNCTYPE(None, c_void_p)


# -- reading -------------------------------------------------------------------------------


class Borrowed:
    """Memory borrowed from a framework, given back when this object is dropped."""

    __slots__ = ("_address", "_deleter")

    def __init__(self, address: int, deleter: int | None) -> None:
        self._address = address
        # Call the deleter with the GIL held, as Python does when it frees a capsule: not every
        # deleter takes the GIL by itself.
        self._deleter = _Deleter(deleter) if deleter else None

    def __del__(self) -> None:
        if self._deleter is not None:
            self._deleter(self._address)


class Lent(NamedTuple):
    """Contents of a capsule: a lent array.

    Attributes:
        address: address of the first element.
        strides: strides in bytes.
        device: device type and number, as in DLPack.
        owner: object that keeps the memory alive.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    device: tuple[int, int]
    writeable: bool
    owner: Any


def take(capsule: Any, element: Callable[[Any], DType] | None = None) -> Lent:
    """Take the array out of a capsule, on any device; the capsule is used up then.

    Args:
        capsule: the capsule.
        element: function that returns the type for ``code``, ``bits`` and ``lanes`` of a DLTensor,
            for an adapter that takes types which transports do not support.

    Raises:
        InvalidArgumentError: the object is no DLPack capsule, or a used one, or one of a later
            major version.
        DtypeError: transports do not support the element type.
    """
    for kind in (_Versioned, _Managed):
        if _is_capsule(id(capsule), kind.name):
            break
    else:
        raise InvalidArgumentError(
            f"dlpack: {capsule!r} is no unused DLPack capsule; export the array again."
        )
    address = _pointer_in(id(capsule), kind.name)
    managed: Any = kind.from_address(address)
    versioned = kind is _Versioned
    if versioned and managed.major != _VERSION[0]:
        raise InvalidArgumentError(
            f"dlpack: version {managed.major}.{managed.minor}; {_VERSION[0]} is understood here."
        )
    tensor = managed.tensor
    dtype = (element or _dtype)(tensor)
    # A null pointer cannot be sliced, not even to nothing.
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    if tensor.ndim and tensor.strides:
        strides = tuple(s * dtype.itemsize for s in tensor.strides[: tensor.ndim])
    else:
        strides = device_layout.c_strides(shape, dtype.itemsize)
    # From here on this package must give the memory back.
    _rename(capsule, kind.used)
    return Lent(
        (tensor.data or 0) + tensor.byte_offset,
        shape,
        strides,
        dtype,
        (tensor.device_type, tensor.device_id),
        not (versioned and managed.flags & _READ_ONLY),
        Borrowed(address, managed.deleter),
    )


def borrow(x: Any) -> Lent:
    """Borrow an array from a framework that supports DLPack, without copying it.

    An array on a GPU is used on the legacy default stream. This function names that stream to the
    framework, which makes the stream wait for its work on other streams. The protocol has nothing
    for the other direction. So later work on the array must be on a stream that waits for the
    legacy default stream.

    Raises:
        DtypeError, InvalidArgumentError: the framework does not lend the array, or transports do
            not support its element type.
    """
    try:
        try:
            capsule = x.__dlpack__(stream=LEGACY, max_version=_VERSION)
        except TypeError:  # older than version 1
            capsule = x.__dlpack__(stream=LEGACY)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"{type(x).__name__}: cannot be seen through DLPack: {error}"
        ) from error
    return take(capsule)


def _type_of(dtype: DType) -> tuple[int, int]:
    """Return the DLPack type code and number of bits of a dtype."""
    return _CODES[dtype.name if dtype.name in _CODES else dtype.kind], 8 * dtype.itemsize


_TYPES = {_type_of(dtype): dtype for dtype in BY_NAME.values()}


def _dtype(tensor: _Tensor) -> DType:
    dtype = _TYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise DtypeError(
            f"dlpack: elements of code {tensor.code}, {tensor.bits} bits and {tensor.lanes} "
            f"lanes cannot travel; one of {', '.join(BY_NAME)}. Convert them."
        )
    return dtype


# -- lending -------------------------------------------------------------------------------


def export(
    array: DeviceArray,
    *,
    stream: Any = None,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[int, int] | None = None,
    copy: bool | None = None,
    dtype: DType | None = None,
) -> Any:
    """Return a capsule that lends ``array``, the result of its ``__dlpack__``.

    Args:
        array: the array to lend; it stays alive until the taker has called the deleter.
        stream: number, as in the standard, of the stream on which the taker uses the array. The
            taker's stream waits for the work on the array's stream; −1 for no waiting.
        max_version: the newest version that the taker can read.
        dl_device: the device on which the taker wants the array.
        copy: True to lend a copy, False to forbid a copy.
        dtype: the element type, if NumPy has no name for it.

    Raises:
        BufferError: the request is not possible; the standard demands this class. The memory may be
            read-only and the taker not support the flag. Strides may not be whole elements. Or the
            taker may want another device.
        InvalidArgumentError: ``stream`` is no valid stream number.
    """
    if dl_device is not None and tuple(map(int, dl_device)) != device_of(array):
        raise BufferError(
            f"dlpack: the array is on {device_of(array)}, not on {tuple(map(int, dl_device))}. "
            "Copy it there yourself; array.to_host() is for the CPU."
        )
    from collective import cuda

    taker = None if stream == -1 else _stream(array, 1 if stream is None else stream)
    versioned = _SPEAKS_1 and max_version is not None and max_version[0] >= _VERSION[0]
    dtype = dtype or dtypes.from_numpy(array.dtype)
    if copy:
        array = array.copy()
    if not array.writeable and not versioned:
        raise BufferError(
            "dlpack: the array is read-only, which versions before 1 cannot express. Pass "
            "max_version=(1, 0), or copy=True."
        )
    if taker is not None:
        taker.wait_for(cuda.effective_stream(array.stream))
    flags = (0 if array.writeable else _READ_ONLY) | (_IS_COPIED if copy else 0)
    return lend(
        Lent(
            array.address,
            array.shape,
            array.strides,
            dtype,
            device_of(array),
            array.writeable,
            array,
        ),
        flags if versioned else None,
    )


def device_of(array: DeviceArray) -> tuple[int, int]:
    """Return the device of ``array``, as its ``__dlpack_device__`` does."""
    return CUDA, array.device.ordinal


def _stream(array: DeviceArray, number: Any) -> Stream:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InvalidArgumentError(
            f"dlpack: stream {number!r} is not valid; allowed are −1 for no waiting, 1 or None for "
            "the legacy default stream, 2 for the per-thread one, or a handle. 0 is ambiguous."
        )
    return array.device.stream(0 if number == LEGACY else number)


class _Shell:
    """Source of the address and layout of a NumPy array, which also keeps the memory's owner."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, lent: Lent) -> None:
        self.owner = lent.owner
        width = lent.dtype.itemsize
        self.__array_interface__ = {
            "version": 3,
            "shape": lent.shape,
            "typestr": np.dtype("c16" if width == 16 else f"u{width}").str,
            "strides": lent.strides,
            "data": (lent.address, False),
        }


def lend(lent: Lent, flags: int | None) -> Any:
    """Return a new capsule.

    NumPy makes the capsule, because its deleter is C code. Such a deleter may run while an
    exception is being handled, in threads that Python did not make, and after the interpreter has
    ended. NumPy does not read the memory. This function then writes the true address, device and
    element type into the structure.

    Args:
        lent: the array to lend; its owner stays alive until the taker has called the deleter.
        flags: flags of version 1. With None, or with a NumPy older than 2.1, the capsule is of the
            version before.
    """
    array: Any = np.asarray(_Shell(lent))
    versioned = flags is not None and _SPEAKS_1
    capsule = array.__dlpack__(max_version=_VERSION) if versioned else array.__dlpack__()
    kind = _Versioned if versioned else _Managed
    managed: Any = kind.from_address(_pointer_in(id(capsule), kind.name))
    if versioned:
        managed.flags = flags
    tensor = managed.tensor
    tensor.data, tensor.byte_offset = lent.address, 0
    tensor.device_type, tensor.device_id = lent.device
    tensor.code, tensor.bits = _type_of(lent.dtype)
    return capsule

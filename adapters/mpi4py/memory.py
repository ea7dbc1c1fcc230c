"""Memory of any object, as an array of bytes.

The other modules see memory only in this form: a flat NumPy array of ``uint8`` over the object's
own memory, with the format of its elements. The object may have the buffer protocol, DLPack or
``__cuda_array_interface__``. Memory of a GPU is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import operator
import warnings
from functools import cache
from typing import Any

import numpy as np

from collective import CollectiveError
from collective.inner import DType, cuda
from collective.memory import dlpack

from .exceptions import refuse
from .handles import Constant

#: A flat array of bytes.
Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_EMPTY: Bytes = np.empty(0, np.uint8)


def raw(address: int, nbytes: int, owner: Any = None) -> Bytes:
    """Return the memory at an address; it must stay, unless ``owner`` keeps it alive."""
    if not nbytes:
        return _EMPTY
    block: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    block.owner = owner
    return np.frombuffer(block, np.uint8)


def address_of(array: np.ndarray[Any, Any]) -> int:
    """Return the address of an array's first element."""
    return int(array.__array_interface__["data"][0])


def bytes_of(obj: Any, writable: bool) -> Bytes:
    """Return the memory of an object as bytes. See :func:`described`."""
    return described(obj, writable)[0]


def described(obj: Any, writable: bool) -> tuple[Bytes, str]:
    """Return the memory of an object as bytes, and the format of its elements.

    Raises:
        TypeError: the object has no memory.
        BufferError: the memory is not contiguous, or read-only and to be written.
        MissingPartError: the memory is a GPU's.
    """
    if obj is None or isinstance(obj, Constant):
        return _EMPTY, "B"
    try:
        view = memoryview(obj)
    except TypeError:
        if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
            return _of_dlpack(obj, writable)
        if hasattr(obj, "__cuda_array_interface__"):
            return _of_cuda_interface(obj, writable)
        text = f"message: expecting buffer or list/tuple, not {type(obj).__name__}"
        raise TypeError(text) from None
    except ValueError as error:  # NumPy: the dtype has no format
        raise BufferError(str(error)) from None
    if writable and view.readonly:
        raise BufferError(f"message: the memory of {type(obj).__name__} is read-only")
    if not view.nbytes:
        return _EMPTY, view.format or "B"
    if view.c_contiguous:
        return np.frombuffer(view, np.uint8), view.format or "B"
    if not view.f_contiguous:
        raise BufferError(
            "message: the array is not contiguous; send np.ascontiguousarray(x), or describe its "
            "elements by a datatype such as Create_vector"
        )
    array = obj if isinstance(obj, np.ndarray) else np.asarray(view)
    return array.T.reshape(-1).view(np.uint8), view.format or "B"


def _of_dlpack(obj: Any, writable: bool) -> tuple[Bytes, str]:
    kind, _ = map(operator.index, obj.__dlpack_device__())
    options = {} if kind == dlpack.CPU else {"stream": -1}
    try:
        capsule = obj.__dlpack__(max_version=(1, 0), **options)
    except TypeError:  # older than version 1
        capsule = obj.__dlpack__(**options)
    try:
        lent = dlpack.take(capsule, _element)
    except CollectiveError as error:
        raise BufferError(f"message: {error}") from None
    # The deleter may use memory of the lender and of the capsule, so it runs first: a tuple drops
    # its last item first.
    owner = obj, capsule, lent.owner
    dtype = lent.dtype.storage
    memory = _lent(lent.address, lent.shape, lent.strides, dtype.itemsize, owner)
    memory.flags.writeable = lent.writeable
    return described(memory, writable)[0], "B" if dtype.kind == "V" else dtype.char


def _element(tensor: Any) -> DType:
    """Return the type of a DLTensor's elements: any of NumPy's, also long double, or bytes."""
    if tensor.ndim < 0 or (tensor.ndim and not tensor.shape):
        raise BufferError(f"message: DLPack's array has {tensor.ndim} dimensions without a shape")
    if any(extent < 0 for extent in tensor.shape[: tensor.ndim] if tensor.ndim):
        raise BufferError("message: DLPack's array has a negative extent")
    kind = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}.get(tensor.code)
    if kind == "f" and tensor.lanes == 2:  # complex, also of long double
        kind = "c"
    elif tensor.lanes > 1:
        kind = None
    dtype = np.dtype(f"{kind or 'V'}{tensor.bits * (tensor.lanes or 1) // 8}")
    return DType(dtype.name, dtype, dtype.kind, -1)


def _of_cuda_interface(obj: Any, writable: bool) -> tuple[Bytes, str]:
    interface = obj.__cuda_array_interface__
    address, readonly = interface["data"]
    text, shape, strides = interface["typestr"], interface["shape"], interface.get("strides")
    if not isinstance(text, str):
        raise TypeError(f"__cuda_array_interface__: typestr is {text!r}")
    if text[0] not in "<|=":
        raise BufferError(f"message: {text!r} has foreign byte order")
    if interface.get("mask") is not None:
        raise BufferError("__cuda_array_interface__: an array with a mask is no buffer")
    fields = interface.get("descr")
    if fields is not None and list(fields) != [("", text)]:
        warnings.warn(
            "__cuda_array_interface__: descr has fields, which travel as bytes",
            RuntimeWarning,
            stacklevel=2,
        )
    itemsize = int(text[2:]) * (4 if text[1] == "U" else 1)
    memory = _lent(address, shape, strides, itemsize, obj)
    memory.flags.writeable = not readonly
    return described(memory, writable)[0], "B" if text[1] == "V" else text[1:]


def _lent(address: int, shape: Any, strides: Any, itemsize: int, owner: Any) -> Any:
    """Return an array of another library, with elements of so many bytes."""
    nbytes = max(0, math.prod(shape) * itemsize)
    _refuse_gpu(address, nbytes)
    memory, dtype = raw(address, nbytes, owner), np.dtype((np.void, itemsize))
    try:
        return np.ndarray(shape, dtype, memory, strides=tuple(strides) if strides else None)
    except ValueError as error:  # a negative extent, or strides of an array with gaps
        raise BufferError(f"message: no contiguous array: {error}; send a copy") from None


@cache
def _has_driver() -> bool:
    """Return whether there is a driver. Without one, all memory is the host's."""
    with contextlib.suppress(CollectiveError):
        cuda.owner_of(0)
        return True
    return False


def _refuse_gpu(address: int, nbytes: int) -> None:
    ordinal = cuda.owner_of(address) if nbytes and _has_driver() else None
    if ordinal is not None:
        refuse(
            f"a message in memory of GPU {ordinal}",
            "it moves bytes of the host",
            "Copy the array to the host, or use collective's own calls, which take it as it is.",
        )


class buffer(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes of memory, such as ``Alloc_mem`` returns.

    Args:
        buf: object with memory; by default an empty buffer.
    """

    obj: Any
    format = "B"

    def __new__(cls, *buf: Any) -> Any:
        """Return a buffer of an object's memory."""
        return cls.frombuffer(*buf) if buf else np.empty(0, np.uint8).view(cls)

    def __array_finalize__(self, origin: Any) -> None:
        self.obj = getattr(origin, "obj", None)

    @staticmethod
    def allocate(nbytes: int, clear: bool = False) -> buffer:
        """Return new memory.

        Raises:
            TypeError, ValueError: ``nbytes`` is no integer, or negative.
        """
        nbytes = operator.index(nbytes)
        if nbytes < 0:
            raise ValueError(f"allocate: negative length {nbytes}")
        # At least one byte, so that the memory has an address.
        memory = np.zeros(max(nbytes, 1), np.uint8)[:nbytes]
        return _buffer(memory, memory)

    @staticmethod
    def frombuffer(obj: Any, readonly: bool = False) -> buffer:
        """Return the memory of an object."""
        try:
            if obj is None:
                raise TypeError
            memory = bytes_of(obj, False)
        except TypeError:
            raise TypeError(f"buffer: {type(obj).__name__} has no memory") from None
        return _buffer(memory, obj, readonly)

    @staticmethod
    def fromaddress(address: int, nbytes: int, readonly: bool = False) -> buffer:
        """Return the memory at an address."""
        if nbytes < 0:
            raise ValueError(f"fromaddress: negative length {nbytes}")
        if nbytes and not address:
            raise ValueError("fromaddress: null address with a length")
        return _buffer(raw(address, nbytes), None, readonly)

    @property
    def address(self) -> int:
        """Address of the first byte, 0 of an empty buffer without memory."""
        return address_of(self) if self.nbytes or self.obj is not None else 0

    @property
    def readonly(self) -> bool:
        """Whether the memory must not be written."""
        return not self.flags.writeable

    def _plain(self) -> memoryview:
        array: Any = self.view(np.ndarray)
        return memoryview(array)

    def cast(self, format: str, shape: Any = None) -> memoryview:  # noqa: A002
        """Return a memoryview with another format."""
        view = self._plain()
        return view.cast(format) if shape is None else view.cast(format, shape)  # type: ignore[call-overload,no-any-return]

    def tobytes(self, order: Any = None) -> bytes:
        """Return a copy as bytes."""
        return bytes(self._plain())

    def toreadonly(self) -> buffer:
        """Return the same memory, read-only."""
        return _buffer(self, self.obj, True)

    def release(self) -> None:
        """Let the memory go; the buffer is empty then."""
        self.obj = None
        nothing: Any = (1, (0,), np.dtype(np.uint8), False, b"")
        self.__setstate__(nothing)

    def __getitem__(self, item: Any) -> Any:
        value = super().__getitem__(item)
        return value if isinstance(value, buffer) else int(value)

    def __setitem__(self, item: Any, value: Any) -> None:
        if not self.flags.writeable:
            raise TypeError("buffer: the memory is read-only")
        if isinstance(item, slice):
            data: Any = value if isinstance(value, int) else bytes_of(value, False)
            if not isinstance(value, int) and len(data) != len(range(*item.indices(len(self)))):
                raise ValueError(f"buffer: {len(data)} bytes for a slice of another length")
            super().__setitem__(item, data)
        else:
            super().__setitem__(item, value)

    def __delitem__(self, item: Any) -> None:
        raise NotImplementedError("buffer: its length is fixed")

    def __eq__(self, other: object) -> Any:
        return self is other or self._plain() == other

    def __ne__(self, other: object) -> Any:
        return not self == other

    def __bool__(self) -> bool:
        return len(self) > 0

    __hash__ = None


def _buffer(memory: Bytes, obj: Any, readonly: bool = False) -> buffer:
    array: buffer = memory.view(buffer)
    array.obj = obj
    if readonly:
        array.flags.writeable = False
    return array

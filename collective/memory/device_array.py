"""Array in GPU memory, in the form that the calls use.

A DeviceArray has the methods and functions of NumPy that the calls use, with NumPy's meaning. So
the same code works on both kinds of arrays. The elements are bytes with a dtype; this module does
no arithmetic.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from collective import cuda
from collective.cuda import Device, Stream
from collective.errors import DeviceError, DtypeError, ShapeError

from . import device_copies, device_layout, dlpack
from .device_copies import Space

Array = np.ndarray[Any, Any]
Ints = tuple[int, ...]


class Flags:
    """Properties of an array's memory, as in ``numpy.ndarray.flags``.

    :attr:`DeviceArray.flags` makes this object without an ``__init__``, for speed: every call needs
    some flags.
    """

    __slots__ = ("_array",)

    _array: DeviceArray

    @property
    def c_contiguous(self) -> bool:
        """Whether the elements lie in C order without gaps."""
        return self._array._strides is None

    @property
    def writeable(self) -> bool:
        """Whether elements may be written."""
        return self._array.writeable

    @property
    def aligned(self) -> bool:
        """Whether the address of each element is a multiple of the dtype's alignment."""
        array = self._array
        unit = array.dtype.alignment
        return not array.address % unit and all(not stride % unit for stride in array.strides)

    @property
    def carray(self) -> bool:
        """Whether the array is contiguous, writeable and aligned."""
        array = self._array
        return (
            array._strides is None and array.writeable and not array.address % array.dtype.alignment
        )


class DeviceArray:
    """Array of elements in GPU memory.

    Work on the elements is enqueued on :attr:`effective_stream`. An operation on two arrays with
    different streams runs after all earlier work on both streams, and before all later work on
    both.

    Args:
        address: address of the element whose indices are all 0.
        shape: shape, as in NumPy.
        dtype: NumPy dtype of the elements' storage.
        device: the GPU.
        stream: stream on which the elements are ready, and on which they will be used.
        strides: strides in bytes, one for each axis; None for C order without gaps.
        owner: object that keeps the memory alive, such as the framework's array.
        writeable: whether elements may be written.
        space: allocator for arrays derived from this one; None for CUDA's own.
    """

    __array_ufunc__ = None

    __slots__ = (
        "__weakref__",
        "_strides",
        "address",
        "device",
        "dtype",
        "owner",
        "shape",
        "space",
        "stream",
        "writeable",
    )

    def __init__(
        self,
        address: int,
        shape: Ints,
        dtype: Any,
        device: Device,
        stream: Stream,
        *,
        strides: Ints | None = None,
        owner: Any = None,
        writeable: bool = True,
        space: Space | None = None,
    ) -> None:
        self.address = address
        self.shape = shape
        self.dtype = dtype = np.dtype(dtype)
        self.device = device
        self.stream = stream
        if strides is not None and device_layout.is_contiguous(shape, strides, dtype.itemsize):
            strides = None
        self._strides = strides
        self.owner = owner
        self.writeable = writeable
        self.space: Space = device_copies.PLAIN if space is None else space

    @classmethod
    def contiguous(
        cls,
        address: int,
        shape: Ints,
        dtype: np.dtype[Any],
        device: Device,
        stream: Stream,
        owner: Any,
        space: Space,
    ) -> DeviceArray:
        """Return a writeable array in C order without gaps, in half the time of the constructor.

        Every call on a framework's arrays makes some of these arrays.

        Args:
            address, shape, dtype, device, stream, owner, space: as in the class.
        """
        array: DeviceArray = _new(cls)
        array.address = address
        array.shape = shape
        array.dtype = dtype
        array.device = device
        array.stream = stream
        array._strides = None
        array.owner = owner
        array.writeable = True
        array.space = space
        return array

    def _derived(
        self, address: int, shape: Ints, strides: Ints | None, dtype: np.dtype[Any]
    ) -> DeviceArray:
        """Return a view; ``strides`` is None for a contiguous one."""
        view: DeviceArray = _new(DeviceArray)
        view.address = address
        view.shape = shape
        view.dtype = dtype
        view.device = self.device
        view.stream = self.stream
        if strides is not None and device_layout.is_contiguous(shape, strides, dtype.itemsize):
            strides = None
        view._strides = strides
        view.owner = self.owner
        view.writeable = self.writeable
        view.space = self.space
        return view

    # -- properties -----------------------------------------------------------------------

    @property
    def effective_stream(self) -> Stream:
        """Stream on which this thread uses the array: its own, or that of ``cuda.on``."""
        return cuda.effective_stream(self.stream)

    @property
    def strides(self) -> Ints:
        """Bytes from one element to the next along each axis."""
        found = self._strides
        return device_layout.c_strides(self.shape, self.dtype.itemsize) if found is None else found

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Size of one element in bytes."""
        return int(self.dtype.itemsize)

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes."""
        return math.prod(self.shape) * int(self.dtype.itemsize)

    @property
    def flags(self) -> Flags:
        """Properties of the memory."""
        flags: Flags = _new(Flags)
        flags._array = self
        return flags

    @property
    def bounds(self) -> tuple[int, int]:
        """Address of the first byte, and the end of the last one."""
        if self._strides is None:
            return self.address, self.address + math.prod(self.shape) * self.dtype.itemsize
        return device_layout.bounds(self.address, self.shape, self._strides, self.dtype.itemsize)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array of no dimensions")
        return self.shape[0]

    def __iter__(self) -> Iterator[DeviceArray]:
        return (self[index] for index in range(len(self)))

    def __bool__(self) -> bool:
        raise _unreadable(self)

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype} {self.shape} on {self.device})"

    # -- views ----------------------------------------------------------------------------

    @property
    def T(self) -> DeviceArray:
        """View with the axes in reverse order."""
        return self.transpose(tuple(range(len(self.shape)))[::-1])

    def transpose(self, order: Ints) -> DeviceArray:
        """Return a view with the axes in ``order``."""
        strides = self.strides
        return self._derived(
            self.address,
            tuple(self.shape[axis] for axis in order),
            tuple(strides[axis] for axis in order),
            self.dtype,
        )

    def ravel(self) -> DeviceArray:
        """Return the elements in C order along one axis: a view if contiguous, else a copy."""
        if self._strides is None and len(self.shape) == 1:
            return self
        packed = self if self._strides is None else self.copy()
        return packed._derived(packed.address, (math.prod(self.shape),), None, self.dtype)

    def reshape(self, *shape: Any) -> DeviceArray:
        """Return the elements in another shape: a view where possible, else a copy."""
        if shape == (-1,) and self._strides is None:
            return self.ravel()
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        new = device_layout.resolved(wanted, self.size)
        if self._strides is None:
            return self._derived(self.address, new, None, self.dtype)
        strides = device_layout.reshaped(self.shape, self._strides, new)
        if strides is None:
            return self.copy().reshape(new)
        return self._derived(self.address, new, strides, self.dtype)

    def view(self, dtype: Any) -> DeviceArray:
        """Return the same bytes as elements of another dtype.

        Raises:
            ShapeError: the last axis has gaps, or does not hold a whole number of elements.
        """
        new = np.dtype(dtype)
        old, width = self.dtype.itemsize, new.itemsize
        if width == old:
            return self._derived(self.address, self.shape, self._strides, new)
        strides = self._strides
        length = self.shape[-1] if self.shape else 0
        row = length * old
        gaps = strides is not None and strides[-1] != old and length != 1
        if not self.shape or row % width or gaps:
            raise ShapeError(
                f"view: {self.dtype} {self.shape} as {new}; the last axis must be contiguous "
                "and hold a whole number of elements."
            )
        strides = None if strides is None else (*strides[:-1], width)
        return self._derived(self.address, (*self.shape[:-1], row // width), strides, new)

    def broadcast_to(self, shape: Ints) -> DeviceArray:
        """Return a read-only view in which elements repeat to fill ``shape``."""
        strides = device_layout.broadcast(self.shape, self.strides, shape)
        view = self._derived(self.address, shape, strides, self.dtype)
        view.writeable = False
        return view

    def __getitem__(self, key: Any) -> DeviceArray:
        if type(key) is slice and self._strides is None and len(self.shape) == 1:
            start, stop, step = key.indices(self.shape[0])
            if step == 1:
                dtype = self.dtype
                address = self.address + start * dtype.itemsize
                return self._derived(address, (max(stop - start, 0),), None, dtype)
        offset, shape, strides = device_layout.indexed(key, self.shape, self.strides)
        return self._derived(self.address + offset, shape, strides, self.dtype)

    # -- new memory and copies --------------------------------------------------------------

    def allocate(self, shape: int | Ints, dtype: Any = None) -> DeviceArray:
        """Return a new uninitialised array on the same GPU, from the same framework."""
        wanted = (shape,) if isinstance(shape, int) else shape
        kind = self.dtype if dtype is None else np.dtype(dtype)
        stream = self.effective_stream
        nbytes = math.prod(wanted) * kind.itemsize
        address, owner = self.space.empty(nbytes, self.device, stream)
        return DeviceArray(
            address, wanted, kind, self.device, stream, owner=owner, space=self.space
        )

    def copy(self) -> DeviceArray:
        """Return a contiguous copy."""
        copied = self.allocate(self.shape)
        copied[...] = self
        return copied

    def __setitem__(self, key: Any, value: Any) -> None:
        device_copies.assign(self[key], value)

    def to_host(self, out: Array | None = None) -> Array:
        """Copy the elements to host memory, and wait until they are there.

        Args:
            out: array of the same shape and dtype. By default a new array is made, in page-locked
                memory unless the array is large. Other copies use the page-locked memory again
                when the new array has been dropped.

        Returns:
            ``out``, or a new array.
        """
        return device_copies.to_host(self, out)

    def fill_from_host(self, source: Array) -> None:
        """Copy elements from host memory, and wait until they are there.

        Args:
            source: array of the same shape and dtype.
        """
        device_copies.fill_from_host(self, source)

    # -- protocols ------------------------------------------------------------------------

    def __array_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        function = _FUNCTIONS.get(func)
        if function is None:
            return NotImplemented
        return function(*args, **kwargs)

    def __array__(self, *_: Any, **__: Any) -> Array:
        raise _unreadable(self)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address if self.size else 0, not self.writeable),
            "version": 3,
            "strides": self._strides,
            # The driver's handle of the default stream is 0, which the interface forbids.
            "stream": self.effective_stream.handle or 1,
        }

    def __dlpack__(self, **options: Any) -> Any:
        return dlpack.export(self, **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.device_of(self)


_new = object.__new__


def _unreadable(array: DeviceArray) -> DeviceError:
    return DeviceError(
        f"array: {array!r} cannot be read from the host, and no copy is made silently. Use "
        "to_host()."
    )


# -- functions of NumPy that the calls use ---------------------------------------------------------

# Function of NumPy -> implementation for arrays on GPUs (NEP 18).
_FUNCTIONS: dict[Any, Callable[..., Any]] = {}


def _for(function: Any) -> Callable[[Any], Any]:
    def register(implementation: Any) -> Any:
        _FUNCTIONS[function] = implementation
        return implementation

    return register


@_for(np.concatenate)
def _concatenate(arrays: Iterable[Any], axis: int = 0, out: Any = None) -> Any:
    """Join arrays along the first axis, the only one along which calls join."""
    if axis != 0:
        return NotImplemented
    arrays = list(arrays)
    first = arrays[0]
    for array in arrays:
        _check_device("concatenate", array)
        if array.ndim != first.ndim or not first.ndim or array.shape[1:] != first.shape[1:]:
            raise ShapeError(
                f"concatenate: shapes {first.shape} and {array.shape} differ beside axis 0."
            )
        if array.dtype != first.dtype:
            raise DtypeError(f"concatenate: dtypes {first.dtype} and {array.dtype}.")
    shape = (sum(array.shape[0] for array in arrays), *first.shape[1:])
    if out is None:
        out = first.allocate(shape)
    else:
        _check_device("concatenate: out", out)
        if out.shape != shape:
            raise ShapeError(f"concatenate: out has shape {out.shape}; the result has {shape}.")
    start = 0
    for array in arrays:
        out[start : start + array.shape[0]] = array
        start += array.shape[0]
    return out


def _check_device(what: str, array: Any) -> None:
    if not isinstance(array, DeviceArray):
        raise DeviceError(
            f"{what}: {type(array).__name__} together with arrays of a GPU; elements are never "
            "copied between a GPU and the host silently. Use to_host() or fill_from_host()."
        )


@_for(np.may_share_memory)
def _may_share_memory(a: Any, b: Any) -> bool:
    """Tell whether address ranges overlap; GPUs and the host share one address space."""
    (low, high), (start, stop) = _bounds(a), _bounds(b)
    return low < stop and start < high


def _bounds(array: Any) -> tuple[int, int]:
    if isinstance(array, DeviceArray):
        return array.bounds
    host = np.asarray(array)
    address = host.__array_interface__["data"][0]
    return device_layout.bounds(address, host.shape, host.strides, host.itemsize)


@_for(np.copyto)
def _copyto(dst: Any, src: Any) -> None:
    _check_device("copyto", dst)
    dst[...] = src


@_for(np.moveaxis)
def _moveaxis(a: DeviceArray, source: Any, destination: Any) -> DeviceArray:
    # NumPy moves the axes of an array whose lengths are the numbers of its axes.
    numbered = np.empty(tuple(range(a.ndim)))
    try:
        return a.transpose(np.moveaxis(numbered, source, destination).shape)
    except ValueError as error:
        raise ShapeError(f"moveaxis: {error}.") from None


@_for(np.empty_like)
def _empty_like(prototype: DeviceArray) -> DeviceArray:
    return prototype.allocate(prototype.shape)


@_for(np.split)
def _split(ary: DeviceArray, indices_or_sections: Sequence[int]) -> list[DeviceArray]:
    """Cut an array before some of its rows."""
    cuts = [0, *map(operator.index, indices_or_sections), len(ary)]
    return [ary[start:stop] for start, stop in itertools.pairwise(cuts)]

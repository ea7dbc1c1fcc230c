"""Conversion of a framework's array to NumPy over the same memory, and back.

The type of an object decides its adapter. An adapter is imported with the first such object, so
the package imports only frameworks that the user has. Behind an adapter, all arrays are NumPy
arrays, or, in GPU memory, a :class:`~collective.memory.device_array.DeviceArray` in their place.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from collective.errors import DeviceError, DtypeError, InvalidArgumentError
from collective.install import hint

from . import dtypes
from .dtypes import FOREIGN, DType

if TYPE_CHECKING:
    from collective.cuda import Device, Stream

    from .buffer import Spot

Array = np.ndarray[Any, Any]


class Adapter:
    """Base class of the adapters of frameworks. ``view`` and ``wrap`` copy no elements.

    Attributes:
        name: name of the framework, for ``like=``.
        immutable: whether the framework's arrays never change. Then nothing may write to the memory
            of an array after :meth:`wrap`, and the memory for results comes from :meth:`empty`.
    """

    name: ClassVar[str]
    immutable: ClassVar[bool] = False

    def accepts(self, x: Any) -> bool:
        """Tell whether ``x``, of a type of this framework, is an array."""
        return True

    def view(self, x: Any) -> tuple[Any, DType]:
        """Return a NumPy array over ``x``'s memory, of ``dtype.storage``, with ``x``'s strides.

        For an array on a GPU, return a DeviceArray. Its stream is the one on which the framework
        enqueues the next work of the calling thread.

        Raises:
            DtypeError, DeviceError, InvalidArgumentError: ``x`` has no such view.
        """
        raise NotImplementedError

    def output(self, x: Any) -> tuple[Any, DType]:
        """Return what :meth:`view` returns, for writing.

        Raises:
            InvalidArgumentError: ``x`` is read-only.
        """
        return self.view(x)

    def spot(self, x: Any) -> Spot | None:
        """Return the place of a plain array on a GPU; None for all other arrays.

        This costs less than :meth:`view`, so it is tried first. Its result has no information
        that :meth:`view` would not return.
        """
        return None

    def wrap(self, array: Any, dtype: DType) -> Any:
        """Return the framework's array over ``array``'s memory.

        If a framework's array owns that memory already, for example after :meth:`empty`, return
        that array.
        """
        raise NotImplementedError

    def is_plain(self, x: Any) -> bool:
        """Tell whether ``x`` is an array as calls return: see :meth:`unchanged`."""
        return True

    def unchanged(self, x: Any) -> Any:
        """Return the result of a call that does not change ``x``, such as a broadcast at its root.

        All ranks get the same kind of array from a call. It is of the framework's own class, and
        neither of a subclass nor a parameter. Its elements are in C order, the program may write to
        them unless the framework's arrays never change, and it requires no gradient. The result is
        ``x`` itself if it is such an array. If not, the result shares the memory of ``x`` where
        order and writability allow it.
        """
        if self.is_plain(x):
            return x
        array, dtype = self.view(x)
        return self.wrap(array if array.flags.carray else array.copy(), dtype)

    def empty(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        device: Device | None,
        stream: Stream | None = None,
    ) -> Any:
        """Return memory for a result from the framework's own allocator, as :meth:`view` does.

        Args:
            device: the GPU. None is the framework's default place: the CPU, or a GPU for frameworks
                that have arrays only on GPUs.
            stream: the stream that uses the memory after the stream now in force. The allocator
                does not reuse the memory before the work on ``stream`` is done. For frameworks
                without a current stream, this is the stream of the array.
        """
        if device is None:
            return np.empty(shape, dtype.storage)
        return _plain().empty(shape, dtype, device, stream)

    def current_stream(self, device: Device, stream: Stream | None = None) -> Stream:
        """Return the stream on which the framework enqueues the next work of this thread.

        Args:
            stream: stream of the arrays in the call. If the framework has no current stream, the
                result is ``stream``, or the legacy default stream.
        """
        return stream or device.stream(0)

    def used_on(self, x: Any, stream: Stream) -> None:
        """Keep ``x``'s memory from other uses until the work enqueued on ``stream`` is done.

        Call this before ``x`` is dropped. It has no effect if the framework's allocator has no such
        function. Then the caller that enqueues the work must keep ``x`` until the work is done.

        Args:
            x: the framework's array, or a DeviceArray over its memory.
        """


class NumpyAdapter(Adapter):
    """Adapter of NumPy's arrays, including arrays of the types of ml_dtypes."""

    name = "numpy"

    def __init__(self) -> None:
        self._foreign: dict[str, np.dtype[Any]] = {}

    def view(self, x: Any) -> tuple[Array, DType]:
        dtype = dtypes.BY_NUMPY.get(x.dtype) or dtypes.from_numpy(x.dtype)
        if dtype.storage is not x.dtype and dtype.name in FOREIGN:
            self._foreign[dtype.name] = x.dtype
            return np.asarray(x).view(dtype.storage), dtype
        return x if type(x) is np.ndarray else np.asarray(x), dtype

    def is_plain(self, x: Any) -> bool:
        return type(x) is np.ndarray and x.flags.carray

    def output(self, x: Any) -> tuple[Array, DType]:
        array, dtype = self.view(x)
        if not isinstance(x, np.ndarray) or not array.flags.writeable:
            raise InvalidArgumentError("out: the array is read-only; pass a writable one.")
        return array, dtype

    def wrap(self, array: Any, dtype: DType) -> Any:
        return array.view(self.named(dtype)) if dtype.name in FOREIGN else array

    def empty(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        device: Device | None,
        stream: Stream | None = None,
    ) -> Any:
        if device is not None:
            raise DeviceError(
                f"numpy: NumPy has no arrays on cuda:{device.ordinal}; pass out= or like= of a "
                "framework that has GPU arrays, or like='cuda'."
            )
        return np.empty(shape, dtype.storage)

    def named(self, dtype: DType) -> np.dtype[Any]:
        """Return the NumPy dtype of that name, from ml_dtypes where NumPy has none.

        Raises:
            DtypeError: ml_dtypes is not installed.
        """
        if dtype.name not in FOREIGN:
            return dtype.storage
        foreign = self._foreign.get(dtype.name)
        if foreign is None:
            try:
                module = importlib.import_module("ml_dtypes")
                foreign = self._foreign[dtype.name] = np.dtype(getattr(module, dtype.name))
            except (ImportError, AttributeError):
                raise DtypeError(
                    f"numpy: NumPy has no {dtype}; pass out= or like= of a framework that has it, "
                    "or `pip install -U ml_dtypes`."
                ) from None
        return foreign


class NumpyScalarAdapter(NumpyAdapter):
    """Adapter of NumPy's scalars: a result without dimensions becomes a scalar again."""

    def is_plain(self, x: Any) -> bool:
        return True

    def wrap(self, array: Any, dtype: DType) -> Any:
        return super().wrap(array, dtype)[()]


class ProducerAdapter(Adapter):
    """Adapter of arrays that are read through a protocol, from frameworks without an adapter."""

    def is_plain(self, x: Any) -> bool:
        array, dtype = self.view(x)
        return array.flags.c_contiguous and isinstance(self.wrap(array, dtype), type(x))


class DLPackAdapter(ProducerAdapter):
    """Adapter of any other array that supports DLPack, on the CPU or on a GPU.

    Results have the same type if the array's namespace (``x.__array_namespace__()``) or its module
    has a ``from_dlpack`` that takes a NumPy array. If not, results are NumPy arrays or DeviceArrays
    on every rank, also at the root of a broadcast. Arrays in page-locked host memory count as
    arrays on the CPU.
    """

    name = "dlpack"

    def __init__(self, x: Any) -> None:
        self._root = type(x).__module__.partition(".")[0]
        self._from_dlpack = _importer(x, self._root)

    def view(self, x: Any) -> tuple[Any, DType]:
        device = x.__dlpack_device__()
        if device[0] not in _HOST:
            return self._elsewhere(x, device)
        try:
            array = np.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError) as error:
            raise DtypeError(
                f"{type(x).__name__}: cannot be seen through DLPack: {error}"
            ) from error
        return array, dtypes.from_numpy(array.dtype)

    def _elsewhere(self, x: Any, device: Any) -> tuple[Any, DType]:
        if device[0] not in _NVIDIA:
            raise DeviceError(
                f"{type(x).__name__}: the array is on DLPack device {tuple(map(int, device))}; "
                "pass an array on the CPU or on an NVIDIA GPU."
            )
        adapter = importlib.import_module("collective.memory.device_adapter")
        return adapter.read_dlpack(x)  # type: ignore[no-any-return]

    def output(self, x: Any) -> tuple[Any, DType]:
        array, dtype = self.view(x)
        if not array.flags.writeable:
            raise InvalidArgumentError(
                f"out: {type(x).__name__} gives read-only memory through DLPack; pass a "
                "writable array, of NumPy or CuPy for example, and convert it."
            )
        # A producer may export a copy, in which the result would be lost.
        on_host = isinstance(array, np.ndarray) and array.size
        if on_host and not np.may_share_memory(array, self.view(x)[0]):
            raise InvalidArgumentError(
                f"out: {type(x).__name__} gives a copy of its memory through DLPack; pass an "
                "array whose memory can be written, of NumPy for example, and convert it."
            )
        return array, dtype

    def wrap(self, array: Any, dtype: DType) -> Any:
        if not isinstance(array, np.ndarray):
            return _plain().hand_back(array, dtype, self._root)
        if dtype.name in FOREIGN:
            return _NUMPY.wrap(array, dtype)  # NumPy cannot export this type through DLPack
        if self._from_dlpack is not None:
            # A framework may refuse an array, for example its element type, by any of these errors.
            with contextlib.suppress(TypeError, ValueError, BufferError, RuntimeError):
                return self._from_dlpack(array)
        return array

    def used_on(self, x: Any, stream: Stream) -> None:
        _plain().used_on(x, stream)


def _importer(x: Any, root: str) -> Callable[[Any], Any] | None:
    """Return the function that makes arrays like ``x`` of NumPy's; None if there is none."""
    if root == "tensorflow":
        take = importlib.import_module("tensorflow").experimental.dlpack.from_dlpack
        return lambda array: take(array.__dlpack__())
    modules = [sys.modules.get(root)]
    if hasattr(x, "__array_namespace__"):
        modules.insert(0, x.__array_namespace__())
    functions = (getattr(module, "from_dlpack", None) for module in modules)
    return next(filter(None, functions), None)


# Device types of DLPack: kDLCPU and kDLCUDAHost, then kDLCUDA and kDLCUDAManaged.
_HOST, _NVIDIA = (1, 3), (2, 13)
_NUMPY = NumpyAdapter()
_SCALARS = NumpyScalarAdapter()
# Root module of a framework -> module and class of its adapter. Add adapters of further frameworks
# here.
_FRAMEWORKS = {
    "chainer": ("collective.adapters.chainer.arrays", "ChainerAdapter"),
    "cupy": ("collective.adapters.cupy.arrays", "CupyAdapter"),
    "jax": ("collective.adapters.jax.arrays", "JaxAdapter"),
    "torch": ("collective.adapters.torch.arrays", "TorchAdapter"),
}
# Adapter of GPU memory that belongs to no framework; "cuda" is not the name of a module.
_DEVICE = {"cuda": ("collective.memory.device_adapter", "CudaArrayAdapter")}
#: Cache of the adapters by type; :func:`adapter_of` finds the adapters of new types.
known: dict[type, Adapter] = {np.ndarray: _NUMPY}
_by_name: dict[str, Adapter] = {"numpy": _NUMPY}


def adapter_of(x: Any, what: str = "array", name: str = "") -> Adapter:
    """Return the adapter for ``x``.

    Args:
        what, name: the operation and, if it is not the input, the argument, for errors.

    Raises:
        InvalidArgumentError: ``x`` is no array.
    """
    adapter = known.get(type(x))
    if adapter is None:
        adapter = known[type(x)] = _find(x, what, name)
    return adapter


def is_array(x: Any) -> bool:
    """Tell whether ``x`` is an array of a known kind."""
    try:
        adapter_of(x)
    except InvalidArgumentError:
        return False
    return True


def adapter_like(like: Any) -> Adapter:
    """Return the adapter of an array, or of a name.

    Args:
        like: ``"numpy"``; ``"torch"``, ``"jax"``, ``"cupy"``, ``"chainer"``; ``"cuda"`` for arrays
            of no framework in GPU memory; or an array.
    """
    if not isinstance(like, str):
        return adapter_of(like)
    if like not in _by_name:
        if like not in _FRAMEWORKS and like not in _DEVICE:
            known = ", ".join(sorted({"numpy", *_FRAMEWORKS, *_DEVICE}))
            raise InvalidArgumentError(f"like: {like!r}; one of {known}, or an array.")
        _by_name[like] = _load(like)
    return _by_name[like]


def _plain() -> Any:
    """Return the adapter of GPU memory that belongs to no framework."""
    return adapter_like("cuda")


def _find(x: Any, what: str, name: str) -> Adapter:
    if isinstance(x, np.ndarray) and type(x) is not np.ndarray:
        for lost in filter(partial(hasattr, x), _MEANINGS):
            raise InvalidArgumentError(
                f"{what}: {name or 'x'} is {_a_thing_like(x)}, whose {lost} would be lost. Pass a "
                "plain array (x.filled(…) of a masked one), or send it as an object with "
                "pickle=True."
            )
    if isinstance(x, (np.ndarray, np.generic)):
        return _NUMPY if isinstance(x, np.ndarray) else _SCALARS
    for cls in type(x).__mro__:
        root = cls.__module__.partition(".")[0]
        if root in _FRAMEWORKS and (adapter := adapter_like(root)).accepts(x):
            return adapter
        if cls.__module__ == "collective.memory.device_array":
            return adapter_like("cuda")
    # Try DLPack first: it tells on which device the array is, and it orders streams.
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return DLPackAdapter(x)
    if hasattr(x, "__cuda_array_interface__"):
        adapter_of_type: Adapter = _plain().of(type(x))
        return adapter_of_type
    thing, instead = _a_thing_like(x), "" if name else f" ({_instead(x, what)})"
    raise InvalidArgumentError(
        f"{what}: {f'{name} is {thing}, not an array' if name else f'{thing} is not an array'}. "
        "Pass a NumPy array, a PyTorch tensor, a JAX array, a CuPy array, a Chainer variable, any "
        "array that supports DLPack or __cuda_array_interface__, or a list or dict of them"
        f"{instead}."
    )


# Attributes by which a subclass of NumPy's array gives its elements another meaning: numpy.ma has
# masks, Astropy and unyt have units. Results are plain arrays, which have neither.
_MEANINGS = ("mask", "unit", "units")
# Call that carries objects between the same ranks as an operation carries arrays.
_OBJECT_CALLS = {
    **dict.fromkeys(("all_reduce", "scan", "all_gather"), "all_gather_object"),
    **dict.fromkeys(("reduce", "gather"), "gather_object"),
    **dict.fromkeys(("broadcast", "scatter", "send", "recv"), "{}_object"),
    "sendrecv": "send_object and recv_object",
}
_NUMBERS = (bool, int, float, complex)
_PLAIN = (*_NUMBERS, type(None), str, bytes, bytearray, set, frozenset)


def _a_thing_like(x: Any) -> str:
    """Return a noun phrase for the type of an object."""
    if x is None:
        return "None"
    name = "array.array" if type(x).__module__ == "array" else type(x).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _instead(x: Any, what: str) -> str:
    """Return what the program may pass, or call, if its object is not an array."""
    if isinstance(x, Iterator):
        return "for the arrays of this iterator: list(x)"
    if hasattr(x, "parameters") and hasattr(x, "state_dict"):
        return "for a module: x.state_dict(), as in broadcast(s := x.state_dict(), out=s)"
    if type(x).__module__ == "array" or isinstance(x, memoryview):
        return "for its elements: numpy.asarray(x)"
    calls = _OBJECT_CALLS.get(what, "the *_object calls").format(what)
    objects = f"for objects: {calls}{'' if isinstance(x, _PLAIN) else ' with pickle=True'}"
    return f"for a number: numpy.asarray(x); {objects}" if isinstance(x, _NUMBERS) else objects


def _load(framework: str) -> Adapter:
    module, name = {**_FRAMEWORKS, **_DEVICE}[framework]
    try:
        adapter: Adapter = getattr(importlib.import_module(module), name)()
    except ImportError as error:
        raise InvalidArgumentError(
            f"like: {framework!r} cannot be imported here: {error}. "
            f"Try `{hint(framework)}`, or like='numpy'."
        ) from error
    return adapter


# -- Python's own numbers, as arrays of no dimensions and back -------------------------------------

_OF_NUMBERS = {
    bool: dtypes.BY_NAME["bool"],
    int: dtypes.BY_NAME["int64"],
    float: dtypes.BY_NAME["float64"],
    complex: dtypes.BY_NAME["complex128"],
}


class _Numbers(Adapter):
    """Adapter of ``bool``, ``int`` of 64 bits, ``float`` and ``complex``; gathers return lists."""

    name = "number"

    def view(self, x: Any) -> tuple[Any, DType]:
        dtype = _OF_NUMBERS[type(x)]
        try:
            return np.array(x, dtype.storage), dtype
        except OverflowError:
            raise DtypeError(
                f"number: {x} takes more than 64 bits; use the *_object calls, which carry "
                "integers of any length, or a float."
            ) from None

    def wrap(self, array: Any, dtype: DType) -> Any:
        return array.tolist()


#: The adapter of Python's numbers. :func:`adapter_of` does not return it:
#: in calls where a number has no obvious meaning, a number does not count as an array.
NUMBERS = _Numbers()


def is_number(x: Any) -> bool:
    """Tell whether ``x`` is one of Python's numbers, and not of a subclass such as an IntEnum."""
    return type(x) in _OF_NUMBERS


# -- arrays of another device, through host memory -------------------------------------------------
#
# This is for transports that only reach the CPU, and for operations that a transport lacks on the
# GPU. The array is copied to page-locked memory, and the call works on the copy. Then the result is
# copied to the GPU, into memory of the caller's framework. The host waits for both copies.


class Distant:
    """Array on a device whose memory no transport reaches; calls work on its copy on the host.

    Attributes:
        shape, dtype: shape, and NumPy's dtype that stores the elements.
        device: the device, as its framework names it.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: Any) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device

    def to_host(self) -> Array:
        """Return the elements in host memory."""
        raise NotImplementedError

    def fill_from_host(self, values: Array) -> None:
        """Copy the elements to the device. Later changes of ``values`` are not allowed."""
        raise NotImplementedError


class Staged(Adapter):
    """Adapter that turns results in host memory into arrays on a GPU or another device.

    Args:
        adapter: adapter of the caller's framework.
        device: the device for the results; also an attribute.
    """

    name = "staged"

    def __init__(self, adapter: Adapter, device: Any) -> None:
        self._adapter = adapter
        self.device = device

    def unchanged(self, x: Any) -> Any:
        return self._adapter.unchanged(x)

    def wrap(self, array: Array, dtype: DType) -> Any:
        result: Any = self._adapter.empty(array.shape, dtype, self.device)
        result.fill_from_host(array)
        return self._adapter.wrap(result, dtype)

"""From a framework's array to NumPy over the same memory, and back.

An adapter is chosen by the type of the object and imported when the first such object
comes by, so nothing is imported that the user has not. Everything behind it is NumPy, or, in
the memory of a GPU, a :class:`~collective.memory.device_array.DeviceArray`, which stands in for it.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from collective.errors import DeviceError, DtypeError, InvalidArgumentError
from collective.install import hint

from . import dtypes
from .dtypes import FOREIGN, DType

if TYPE_CHECKING:
    from collective.cuda import Device, Stream

    from .buffer import Spot

__all__ = [
    "Adapter", "NumpyAdapter", "ProducerAdapter", "adapter_like", "adapter_of", "is_array",
    "known",
]  # fmt: skip

Array = np.ndarray[Any, Any]


class Adapter:
    """What a framework's adapter does. ``view`` and ``wrap`` copy nothing."""

    name: ClassVar[str]

    def accepts(self, x: Any) -> bool:
        """Tell whether ``x``, of a type of this framework, is an array."""
        return True

    def view(self, x: Any) -> tuple[Any, DType]:
        """Return NumPy over ``x``'s memory, of ``dtype.storage``, with ``x``'s strides.

        Of an array on a GPU, a DeviceArray; its stream is the one on which the framework
        enqueues what the calling thread does next.

        Raises:
            DtypeError, DeviceError, InvalidArgumentError: ``x`` cannot be seen so.
        """
        raise NotImplementedError

    def output(self, x: Any) -> tuple[Any, DType]:
        """Return the same, for writing to.

        Raises:
            InvalidArgumentError: ``x`` is read-only.
        """
        return self.view(x)

    def spot(self, x: Any) -> Spot | None:
        """Return where a plain array on a GPU is, None for all others: what is asked first.

        It costs less than :meth:`view`, and says no more than what that would.
        """
        return None

    def wrap(self, array: Any, dtype: DType) -> Any:
        """Return the framework's array over ``array``'s memory.

        Where that is the memory of one such array, from :meth:`empty` say, it is that array.
        """
        raise NotImplementedError

    def unchanged(self, x: Any) -> Any:
        """Return the result of a call that leaves ``x`` as it is, as a broadcast does at its root.

        That is ``x``, unless the other ranks get arrays of another type for one like ``x``.
        """
        return x

    def empty(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        device: Device | None,
        stream: Stream | None = None,
    ) -> Any:
        """Return memory for a result, of the framework's own allocator, as :meth:`view` does.

        Args:
            device: the GPU; None is where the framework makes arrays by itself: the CPU, but
                for those that know GPUs only.
            stream: on which it will be used when the stream in force is no longer: the memory
                is not another's before what is there then is done. For frameworks that have no
                current stream, the array's.
        """
        if device is None:
            return np.empty(shape, dtype.storage)
        return _plain().empty(shape, dtype, device, stream)

    def current_stream(self, device: Device, stream: Stream | None = None) -> Stream:
        """Return the stream on which the framework enqueues what this thread does next.

        Args:
            stream: of the arrays in question. Where the framework has no current stream that
                is known here, it is that, or the legacy default stream.
        """
        return stream or device.stream(0)

    def used_on(self, x: Any, stream: Stream) -> None:
        """Keep ``x``'s memory from other uses until what is enqueued on ``stream`` is done.

        To be told before ``x`` is dropped. Without effect where the framework's allocator
        knows no such thing: there, whoever enqueues keeps ``x`` until the work is done.

        Args:
            x: the framework's array, or a DeviceArray over its memory.
        """


class NumpyAdapter(Adapter):
    """NumPy's arrays; those of ml_dtypes' types too."""

    name = "numpy"

    def __init__(self) -> None:
        self._foreign: dict[str, np.dtype[Any]] = {}

    def view(self, x: Any) -> tuple[Array, DType]:
        dtype = dtypes.BY_NUMPY.get(x.dtype) or dtypes.from_numpy(x.dtype)
        if dtype.storage is not x.dtype and dtype.name in FOREIGN:
            self._foreign[dtype.name] = x.dtype
            return np.asarray(x).view(dtype.storage), dtype
        return x if type(x) is np.ndarray else np.asarray(x), dtype

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
                f"numpy: it has no arrays on cuda:{device.ordinal}; pass out= or like= of a "
                "framework that has, or like='cuda'."
            )
        return np.empty(shape, dtype.storage)

    def named(self, dtype: DType) -> np.dtype[Any]:
        """Return NumPy's dtype of that name, of ml_dtypes where NumPy has none.

        Raises:
            DtypeError: ml_dtypes is not installed.
        """
        if dtype.name not in FOREIGN:
            return dtype.storage
        found = self._foreign.get(dtype.name)
        if found is None:
            try:
                module = importlib.import_module("ml_dtypes")
                found = self._foreign[dtype.name] = np.dtype(getattr(module, dtype.name))
            except (ImportError, AttributeError):
                raise DtypeError(
                    f"numpy: it has no {dtype}; pass out= or like= of a framework that has, "
                    "or `pip install -U ml_dtypes`."
                ) from None
        return found


class NumpyScalarAdapter(NumpyAdapter):
    """NumPy's scalars: a result of no dimensions is one again."""

    def wrap(self, array: Any, dtype: DType) -> Any:
        return super().wrap(array, dtype)[()]


class ProducerAdapter(Adapter):
    """Arrays of frameworks that have no adapter of their own, seen through a protocol."""

    def unchanged(self, x: Any) -> Any:
        array, dtype = self.view(x)
        result = self.wrap(array, dtype)
        if isinstance(result, type(x)):
            return x
        # The other ranks may write to their results.
        return result if array.flags.writeable else self.wrap(array.copy(), dtype)


class DLPackAdapter(ProducerAdapter):
    """Any other array that speaks DLPack, on the CPU or on a GPU.

    Results are of the same type if its module has ``from_dlpack``; if not, NumPy's arrays or
    DeviceArrays: on every rank, the root of a broadcast included. What is in page-locked host
    memory is taken as on the CPU.
    """

    name = "dlpack"

    def __init__(self, cls: type) -> None:
        self._root = cls.__module__.partition(".")[0]
        self._from_dlpack = getattr(sys.modules.get(self._root), "from_dlpack", None)

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
                f"{type(x).__name__}: it is on DLPack device {tuple(map(int, device))}; pass an "
                "array on the CPU or on a GPU of NVIDIA's."
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
        return array, dtype

    def wrap(self, array: Any, dtype: DType) -> Any:
        if not isinstance(array, np.ndarray):
            return _plain().hand_back(array, dtype, self._root)
        if dtype.name in FOREIGN:
            return _NUMPY.wrap(array, dtype)  # NumPy cannot hand it on
        return array if self._from_dlpack is None else self._from_dlpack(array)

    def used_on(self, x: Any, stream: Stream) -> None:
        _plain().used_on(x, stream)


# DLPack's kDLCPU and kDLCUDAHost; kDLCUDA and kDLCUDAManaged.
_HOST, _NVIDIA = (1, 3), (2, 13)
_NUMPY = NumpyAdapter()
_SCALARS = NumpyScalarAdapter()
# Module root -> where its adapter is. Adapters of further frameworks are added here.
_FRAMEWORKS = {
    "chainer": ("collective.adapters.chainer.arrays", "ChainerAdapter"),
    "cupy": ("collective.adapters.cupy.arrays", "CupyAdapter"),
    "torch": ("collective.adapters.torch.arrays", "TorchAdapter"),
}
# Where memory of GPUs is seen without a framework; no module's name.
_DEVICE = {"cuda": ("collective.memory.device_adapter", "CudaArrayAdapter")}
#: The adapters of the types that have come by; :func:`adapter_of` finds those of others.
known: dict[type, Adapter] = {np.ndarray: _NUMPY}
_by_name: dict[str, Adapter] = {"numpy": _NUMPY}


def adapter_of(x: Any) -> Adapter:
    """Return the adapter for ``x``.

    Raises:
        InvalidArgumentError: ``x`` is no array.
    """
    found = known.get(type(x))
    if found is None:
        found = known[type(x)] = _find(x)
    return found


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
        like: ``"numpy"``; ``"torch"``, ``"cupy"``, ``"chainer"``; ``"cuda"`` for arrays of no
            framework in the memory of a GPU; or an array.
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
    """Return the adapter of GPUs' memory that belongs to no framework."""
    return adapter_like("cuda")


def _find(x: Any) -> Adapter:
    if isinstance(x, np.ma.MaskedArray):
        raise InvalidArgumentError("numpy.ma: masks do not travel; send x.filled(…) or objects.")
    if isinstance(x, (np.ndarray, np.generic)):
        return _NUMPY if isinstance(x, np.ndarray) else _SCALARS
    for cls in type(x).__mro__:
        root = cls.__module__.partition(".")[0]
        if root in _FRAMEWORKS and (adapter := adapter_like(root)).accepts(x):
            return adapter
        if cls.__module__ == "collective.memory.device_array":
            return adapter_like("cuda")
    # DLPack first: it tells where the array is, and orders streams.
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return DLPackAdapter(type(x))
    if hasattr(x, "__cuda_array_interface__"):
        found: Adapter = _plain().of(type(x))
        return found
    raise InvalidArgumentError(
        f"array: {type(x).__name__} is none; pass a NumPy array, a PyTorch tensor, a CuPy array, "
        "a Chainer variable, anything that speaks DLPack or has __cuda_array_interface__, or a "
        "list or dict of them. A number is taken by reductions, broadcast and gathers; elsewhere "
        "use numpy.asarray(x). For other objects use the *_object calls."
    )


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

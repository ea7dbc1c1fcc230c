"""From a framework's array to NumPy over the same memory, and back.

An adapter is chosen by the type of the object and imported when the first such object
comes by, so nothing is imported that the user has not. Everything behind it is NumPy.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any, ClassVar

import numpy as np

from collective import dtypes
from collective.dtypes import DType
from collective.errors import DeviceError, DtypeError, InvalidArgumentError

__all__ = ["Adapter", "NumpyAdapter", "adapter_like", "adapter_of", "is_array"]

Array = np.ndarray[Any, Any]


class Adapter:
    """What a framework's adapter does. ``view`` and ``wrap`` copy nothing."""

    name: ClassVar[str]

    def accepts(self, x: Any) -> bool:
        """Tell whether ``x``, of a type of this framework, is an array."""
        return True

    def view(self, x: Any) -> tuple[Array, DType]:
        """Return NumPy over ``x``'s memory, of ``dtype.storage``, with ``x``'s strides.

        Raises:
            DtypeError, DeviceError, InvalidArgumentError: ``x`` cannot be seen so.
        """
        raise NotImplementedError

    def output(self, x: Any) -> tuple[Array, DType]:
        """Return the same, for writing to.

        Raises:
            InvalidArgumentError: ``x`` is read-only.
        """
        return self.view(x)

    def wrap(self, array: Array, dtype: DType) -> Any:
        """Return the framework's array over ``array``'s memory."""
        raise NotImplementedError


class NumpyAdapter(Adapter):
    """NumPy's arrays and scalars; ml_dtypes' bfloat16 too."""

    name = "numpy"

    def __init__(self, bfloat16: np.dtype[Any] | None = None) -> None:
        self._bfloat16 = bfloat16

    def view(self, x: Any) -> tuple[Array, DType]:
        dtype = dtypes.from_numpy(x.dtype)
        if dtype.storage is not x.dtype and dtype.name == "bfloat16":
            self._bfloat16 = x.dtype
            return np.asarray(x).view(np.uint16), dtype
        return x if type(x) is np.ndarray else np.asarray(x), dtype

    def output(self, x: Any) -> tuple[Array, DType]:
        array, dtype = self.view(x)
        if not isinstance(x, np.ndarray) or not array.flags.writeable:
            raise InvalidArgumentError("out: the array is read-only; pass a writable one.")
        return array, dtype

    def wrap(self, array: Array, dtype: DType) -> Array:
        if dtype.name != "bfloat16":
            return array
        if self._bfloat16 is None:
            try:
                self._bfloat16 = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
            except ImportError:
                raise DtypeError(
                    "numpy: it has no bfloat16; pass out= or like= of a framework that has, "
                    "or `pip install ml_dtypes`."
                ) from None
        return array.view(self._bfloat16)


class DLPackAdapter(Adapter):
    """Any other CPU array that speaks DLPack.

    Results come back as the same type if its module has ``from_dlpack``, as NumPy if not.
    """

    name = "dlpack"

    def __init__(self, cls: type) -> None:
        module = sys.modules.get(cls.__module__.partition(".")[0])
        self._from_dlpack = getattr(module, "from_dlpack", None)

    def view(self, x: Any) -> tuple[Array, DType]:
        device = x.__dlpack_device__()
        if device[0] != 1:  # kDLCPU
            raise DeviceError(
                f"{type(x).__name__}: it is on DLPack device {tuple(map(int, device))}; this "
                "transport reaches the CPU only. Copy it there."
            )
        try:
            array = np.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError) as error:
            raise DtypeError(
                f"{type(x).__name__}: cannot be seen through DLPack: {error}"
            ) from error
        return array, dtypes.from_numpy(array.dtype)

    def output(self, x: Any) -> tuple[Array, DType]:
        array, dtype = self.view(x)
        if not array.flags.writeable:
            raise InvalidArgumentError(
                f"out: {type(x).__name__} gives read-only memory through DLPack; pass a NumPy "
                "array and convert it."
            )
        return array, dtype

    def wrap(self, array: Array, dtype: DType) -> Any:
        if dtype.name == "bfloat16":
            return _NUMPY.wrap(array, dtype)  # NumPy cannot hand it on
        return array if self._from_dlpack is None else self._from_dlpack(array)


_NUMPY = NumpyAdapter()
# Module root -> where its adapter is. Adapters of further frameworks are added here.
_FRAMEWORKS = {"torch": ("collective.adapters.torch.arrays", "TorchAdapter")}
_by_type: dict[type, Adapter] = {np.ndarray: _NUMPY}
_by_name: dict[str, Adapter] = {"numpy": _NUMPY}


def adapter_of(x: Any) -> Adapter:
    """Return the adapter for ``x``.

    Raises:
        InvalidArgumentError: ``x`` is no array.
    """
    found = _by_type.get(type(x))
    if found is None:
        found = _by_type[type(x)] = _find(x)
    return found


def is_array(x: Any) -> bool:
    """Tell whether ``x`` is an array of a known kind."""
    try:
        adapter_of(x)
    except InvalidArgumentError:
        return False
    return True


def adapter_like(like: Any) -> Adapter:
    """Return the adapter of an array, or of a framework's name (``"numpy"``, ``"torch"``)."""
    if not isinstance(like, str):
        return adapter_of(like)
    if like not in _by_name:
        if like not in _FRAMEWORKS:
            known = ", ".join(sorted({"numpy", *_FRAMEWORKS}))
            raise InvalidArgumentError(f"like: {like!r}; one of {known}, or an array.")
        _by_name[like] = _load(like)
    return _by_name[like]


def _find(x: Any) -> Adapter:
    if isinstance(x, np.ma.MaskedArray):
        raise InvalidArgumentError("numpy.ma: masks do not travel; send x.filled(…) or objects.")
    if isinstance(x, (np.ndarray, np.generic)):
        return _NUMPY
    for cls in type(x).__mro__:
        root = cls.__module__.partition(".")[0]
        if root in _FRAMEWORKS and (adapter := adapter_like(root)).accepts(x):
            return adapter
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return DLPackAdapter(type(x))
    raise InvalidArgumentError(
        f"array: {type(x).__name__} is none; pass a NumPy array, a PyTorch tensor, anything "
        "that speaks DLPack, or a list or dict of them. For a number use numpy.asarray(x), "
        "for other objects the *_object calls."
    )


def _load(framework: str) -> Adapter:
    module, name = _FRAMEWORKS[framework]
    try:
        adapter: Adapter = getattr(importlib.import_module(module), name)()
    except ImportError as error:
        raise InvalidArgumentError(
            f"like: {framework!r} cannot be imported here: {error}. "
            f"Try `pip install collective[{framework}]`, or like='numpy'."
        ) from error
    return adapter

"""The frameworks whose arrays the checks pass: how to make an array, and how to read it."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np

from collective import InvalidArgumentError
from collective.inner import BY_NAME
from collective.memory.dtypes import FOREIGN

Array = np.ndarray[Any, Any]


class ArrayFramework:
    """NumPy, and the base of the other frameworks.

    Attributes:
        name: name in options and reports.
        like: name of the framework for ``like=``.
        on_gpu: whether the arrays are in the memory of a GPU.
        backwards: whether the arrays may have negative strides.
        takes_ml_dtypes: whether the arrays may have dtypes of ml_dtypes.
        immutable: whether the arrays never change, so that calls cannot write to them.
    """

    name: ClassVar[str] = "numpy"
    like: ClassVar[str] = "numpy"
    on_gpu: ClassVar[bool] = False
    backwards: ClassVar[bool] = True
    takes_ml_dtypes: ClassVar[bool] = True
    immutable: ClassVar[bool] = False

    def unavailable(self) -> str:
        """Return why the framework cannot be used here, or "". May import the framework."""
        return ""

    def settle(self, local_rank: int) -> None:
        """Import what the framework needs, and choose this rank's GPU if its arrays are on one."""
        self.unavailable()

    def dtypes(self) -> frozenset[str]:
        """Return the dtypes that the framework's arrays can have."""
        foreign = frozenset(FOREIGN)
        if self.takes_ml_dtypes and importlib.util.find_spec("ml_dtypes") is not None:
            kinds = importlib.import_module("ml_dtypes")
            foreign = frozenset(name for name in FOREIGN if not hasattr(kinds, name))
        return frozenset(BY_NAME) - foreign

    def make(self, whole: Array, dtype: str, part: tuple[slice, ...]) -> Any:
        """Return the ``part`` of a new array with the contents of ``whole``.

        Args:
            whole: contiguous array, in the storage of ``dtype``.
            part: a slice for each axis.
        """
        array = self.wrap(whole.copy(), dtype)
        # Indexing an array without dimensions by an empty tuple would return a scalar.
        return array[part] if part else array

    def wrap(self, array: Array, dtype: str) -> Any:
        """Return the framework's array of ``dtype`` for ``array``, in the storage of ``dtype``.

        On the CPU the result shares the memory of ``array``.
        """
        if dtype not in FOREIGN:
            return array
        return array.view(np.dtype(getattr(importlib.import_module("ml_dtypes"), dtype)))

    def read(self, x: Any) -> Array:
        """Return a copy of an array, as NumPy's array in the storage of its dtype."""
        return np.array(self.stored(x))

    def stored(self, x: Any) -> Array:
        """Return an array as NumPy's, in the storage of its dtype; on the CPU, without a copy."""
        array, name = np.asarray(x), self.dtype_of(x)
        return array.view(FOREIGN[name]) if name in FOREIGN else array

    def dtype_of(self, x: Any) -> str:
        """Return the name of the array's dtype."""
        return str(x.dtype).rpartition(".")[2]

    @property
    def type(self) -> Any:
        """Class of the arrays that calls return, or a tuple of classes."""
        return np.ndarray, np.generic

    def owns(self, x: Any) -> bool:
        """Tell whether ``x`` is an array of the framework, in the right memory (CPU or GPU)."""
        return isinstance(x, self.type)

    def fill(self, x: Any, source: Any) -> None:
        """Overwrite an array with another array of the framework."""
        x[...] = source


class TorchFramework(ArrayFramework):
    """PyTorch's tensors on the CPU."""

    name = "torch"
    like = "torch"
    backwards = False

    def unavailable(self) -> str:
        return _missing("torch")

    def settle(self, local_rank: int) -> None:
        # The ranks share the CPU: more threads than one each would compete for its cores.
        importlib.import_module("torch").set_num_threads(1)

    def dtypes(self) -> frozenset[str]:
        torch = importlib.import_module("torch")
        return frozenset(name for name in BY_NAME if hasattr(torch, name))

    def stored(self, x: Any) -> Array:
        name = self.dtype_of(x)
        torch = importlib.import_module("torch")
        x = x.detach().cpu()
        if name not in FOREIGN:
            return np.asarray(x.numpy())
        bits = torch.int16 if name == "bfloat16" else torch.uint8
        return np.asarray(x.view(bits).numpy().view(FOREIGN[name]))

    @property
    def type(self) -> Any:
        return importlib.import_module("torch").Tensor

    def owns(self, x: Any) -> bool:
        return super().owns(x) and x.is_cuda == self.on_gpu

    def wrap(self, array: Array, dtype: str) -> Any:
        torch = importlib.import_module("torch")
        if dtype not in FOREIGN:
            return torch.from_numpy(array)
        bits = array.view(np.int16) if array.itemsize == 2 else array
        return torch.from_numpy(bits).view(getattr(torch, dtype))


class JaxFramework(ArrayFramework):
    """JAX's arrays on the CPU."""

    name = "jax"
    like = "jax"
    immutable = True

    def unavailable(self) -> str:
        return _missing("jax")

    def make(self, whole: Array, dtype: str, part: tuple[slice, ...]) -> Any:
        copy = whole.copy()
        # Slicing a JAX array would compile a program for each slice, so slice the NumPy array.
        return self.wrap(copy[part] if part else copy, dtype)

    def wrap(self, array: Array, dtype: str) -> Any:
        jax = importlib.import_module("jax")
        with jax.enable_x64(True):
            return jax.device_put(super().wrap(array, dtype))

    @property
    def type(self) -> Any:
        return importlib.import_module("jax").Array


class TorchCudaFramework(TorchFramework):
    """PyTorch's tensors on the current GPU."""

    name = "torch.cuda"
    on_gpu = True

    def unavailable(self) -> str:
        missing = _missing("torch")
        if missing or importlib.import_module("torch").cuda.is_available():
            return missing
        return "PyTorch finds no GPU here"

    def settle(self, local_rank: int) -> None:
        torch = importlib.import_module("torch")
        torch.cuda.set_device(local_rank % torch.cuda.device_count())

    def wrap(self, array: Array, dtype: str) -> Any:
        return super().wrap(array, dtype).cuda()


class CupyFramework(ArrayFramework):
    """CuPy's arrays."""

    name = "cupy"
    like = "cupy"
    on_gpu = True
    takes_ml_dtypes = False  # CuPy has no kernels that fill arrays of these dtypes

    def unavailable(self) -> str:
        missing = _missing("cupy")
        if missing:
            return missing
        cupy = importlib.import_module("cupy")
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            return f"CuPy finds no GPU here: {error}"
        return "" if count else "CuPy finds no GPU here"

    def settle(self, local_rank: int) -> None:
        cupy = importlib.import_module("cupy")
        cupy.cuda.Device(local_rank % cupy.cuda.runtime.getDeviceCount()).use()

    def stored(self, x: Any) -> Array:
        return np.asarray(importlib.import_module("cupy").asnumpy(x))

    @property
    def type(self) -> Any:
        return importlib.import_module("cupy").ndarray

    def wrap(self, array: Array, dtype: str) -> Any:
        return importlib.import_module("cupy").asarray(array)


class CudaFramework(ArrayFramework):
    """Memory of a GPU that belongs to no framework: the library's own ``DeviceArray``."""

    name = "cuda"
    like = "cuda"
    on_gpu = True
    takes_ml_dtypes = False

    def __init__(self) -> None:
        # Ranks that are threads share this object.
        self._chosen = threading.local()

    def settle(self, local_rank: int) -> None:
        from collective.inner import cuda

        self._chosen.ordinal = local_rank % max(1, cuda.device_count())

    def unavailable(self) -> str:
        from collective import CollectiveError
        from collective.inner import cuda

        try:
            return "" if cuda.device_count() else "no GPU here"
        except CollectiveError as error:
            return str(error)

    def stored(self, x: Any) -> Array:
        return np.asarray(x.copy().to_host())

    @property
    def type(self) -> Any:
        from collective.inner import DeviceArray

        return DeviceArray

    def wrap(self, array: Array, dtype: str) -> Any:
        from collective.inner import cuda
        from collective.memory.device_adapter import CudaArrayAdapter

        array_on_gpu = CudaArrayAdapter().empty(
            array.shape, BY_NAME[dtype], cuda.device(getattr(self._chosen, "ordinal", 0))
        )
        array_on_gpu.fill_from_host(array)
        return array_on_gpu


class ChainerFramework(ArrayFramework):
    """``chainer.Variable`` over NumPy's arrays."""

    name = "chainer"
    like = "chainer"
    takes_ml_dtypes = False

    def unavailable(self) -> str:
        missing = _missing("chainer")
        if missing:
            return missing
        try:
            self._chainer()
        except ImportError as error:
            return f"chainer cannot be imported: {error}"
        return ""

    def _chainer(self) -> Any:
        # The adapter makes `import chainer` work beside a current NumPy.
        importlib.import_module("collective.adapters.chainer")
        return importlib.import_module("chainer")

    def make(self, whole: Array, dtype: str, part: tuple[slice, ...]) -> Any:
        copy = whole.copy()
        # Slicing a variable would copy, so slice the NumPy array.
        return self.wrap(copy[part] if part else copy, dtype)

    def wrap(self, array: Array, dtype: str) -> Any:
        return self._chainer().Variable(array, requires_grad=False)

    def stored(self, x: Any) -> Array:
        return np.asarray(x.array)

    @property
    def type(self) -> Any:
        return self._chainer().Variable

    def fill(self, x: Any, source: Any) -> None:
        x.array[...] = source.array


_FRAMEWORKS: dict[str, type[ArrayFramework]] = {
    kind.name: kind
    for kind in (
        ArrayFramework, TorchFramework, JaxFramework, ChainerFramework, CupyFramework,
        TorchCudaFramework, CudaFramework,
    )
}  # fmt: skip
NAMES = tuple(_FRAMEWORKS)


@cache
def framework(name: str) -> ArrayFramework:
    """Return the framework called ``name``.

    Raises:
        InvalidArgumentError: there is no such framework; the text lists the known names.
    """
    if name not in _FRAMEWORKS:
        raise InvalidArgumentError(
            f"framework: unknown name {name!r}; the names are {', '.join(NAMES)}."
        )
    return _FRAMEWORKS[name]()


def encoded(numbers: Array, dtype: str) -> Array:
    """Return numbers rounded to ``dtype``, to nearest and ties to even, in its storage.

    Raises:
        ValueError: ``dtype`` has eight bits, and NumPy cannot round to it.
    """
    numbers = np.asarray(numbers)
    if dtype not in FOREIGN:
        return numbers.astype(BY_NAME[dtype].storage)
    if dtype != "bfloat16":
        raise ValueError(f"cannot round to {dtype}")
    bits = numbers.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def widened(stored: Array, dtype: str) -> Array:
    """Return the exact values of ``stored`` in a dtype that NumPy computes with.

    Numbers of bfloat16 become float32; all others are returned as they are.
    """
    if dtype != "bfloat16":
        return stored
    return (stored.astype(np.uint32) << 16).view(np.float32)


def unavailable(names: Sequence[str]) -> dict[str, str]:
    """Return, for each name, why the framework cannot be used here; "" if it can."""
    return {name: framework(name).unavailable() for name in names}


def _missing(module: str) -> str:
    return "" if importlib.util.find_spec(module) is not None else f"{module} is not installed"

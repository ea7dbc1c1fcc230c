"""The frameworks whose arrays are passed in: how one is made, and how it is read."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np

from collective.errors import InvalidArgumentError
from collective.memory.dtypes import BY_NAME, FOREIGN

__all__ = ["NAMES", "ArrayFramework", "framework", "unavailable"]

Array = np.ndarray[Any, Any]


class ArrayFramework:
    """NumPy, and what others have in common with it.

    Attributes:
        name: as in options and reports.
        like: its name for ``like=``.
        on_gpu: whether its arrays are in the memory of a GPU.
        backwards: whether its arrays may have negative strides.
        takes_ml_dtypes: whether its arrays may be of dtypes of ml_dtypes.
    """

    name: ClassVar[str] = "numpy"
    like: ClassVar[str] = "numpy"
    on_gpu: ClassVar[bool] = False
    backwards: ClassVar[bool] = True
    takes_ml_dtypes: ClassVar[bool] = True

    def unavailable(self) -> str:
        """Return why it cannot be used here, or nothing. May import it."""
        return ""

    def settle(self, local_rank: int) -> None:
        """Import what it needs, and choose the GPU of this rank where arrays are on one."""
        self.unavailable()

    def dtypes(self) -> frozenset[str]:
        """Return the dtypes that its arrays can have."""
        foreign = frozenset(FOREIGN)
        if self.takes_ml_dtypes and importlib.util.find_spec("ml_dtypes") is not None:
            kinds = importlib.import_module("ml_dtypes")
            foreign = frozenset(name for name in FOREIGN if not hasattr(kinds, name))
        return frozenset(BY_NAME) - foreign

    def make(self, whole: Array, dtype: str, part: tuple[slice, ...]) -> Any:
        """Return the ``part`` of an array with the contents of ``whole``, with memory of its own.

        Args:
            whole: contiguous, in the storage of ``dtype``.
            part: a slice an axis.
        """
        made = self._wrap(whole.copy(), dtype)
        # An empty index would make a scalar of an array without dimensions.
        return made[part] if part else made

    def read(self, x: Any) -> Array:
        """Return what is in an array, in the storage of its dtype."""
        return np.array(x).view(BY_NAME[self.dtype_of(x)].storage)

    def dtype_of(self, x: Any) -> str:
        """Return the dtype's name."""
        return str(x.dtype).rpartition(".")[2]

    def owns(self, x: Any) -> bool:
        """Tell whether ``x`` is an array of it, where it belongs."""
        return isinstance(x, (np.ndarray, np.generic))

    def fill(self, x: Any, source: Any) -> None:
        """Overwrite an array with another of it."""
        x[...] = source

    def _wrap(self, array: Array, dtype: str) -> Any:
        if dtype not in FOREIGN:
            return array
        return array.view(np.dtype(getattr(importlib.import_module("ml_dtypes"), dtype)))


class TorchFramework(ArrayFramework):
    """PyTorch's tensors on the CPU."""

    name = "torch"
    like = "torch"
    backwards = False

    def unavailable(self) -> str:
        return _missing("torch")

    def dtypes(self) -> frozenset[str]:
        torch = importlib.import_module("torch")
        return frozenset(name for name in BY_NAME if hasattr(torch, name))

    def read(self, x: Any) -> Array:
        name = self.dtype_of(x)
        torch = importlib.import_module("torch")
        x = x.detach().cpu()
        bits = {"bfloat16": torch.int16}.get(name, torch.uint8) if name in FOREIGN else x.dtype
        # Views of other types want contiguous memory.
        return np.array(x.contiguous().view(bits).numpy()).view(BY_NAME[name].storage)

    def owns(self, x: Any) -> bool:
        torch = importlib.import_module("torch")
        return isinstance(x, torch.Tensor) and x.is_cuda == self.on_gpu

    def _wrap(self, array: Array, dtype: str) -> Any:
        torch = importlib.import_module("torch")
        if dtype not in FOREIGN:
            return torch.from_numpy(array)
        bits = array.view(np.int16) if array.itemsize == 2 else array
        return torch.from_numpy(bits).view(getattr(torch, dtype))


class TorchCudaFramework(TorchFramework):
    """PyTorch's tensors on the GPU that is current."""

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

    def _wrap(self, array: Array, dtype: str) -> Any:
        return super()._wrap(array, dtype).cuda()


class CupyFramework(ArrayFramework):
    """CuPy's arrays."""

    name = "cupy"
    like = "cupy"
    on_gpu = True
    takes_ml_dtypes = False  # which have no kernels that would fill them

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

    def read(self, x: Any) -> Array:
        return np.asarray(importlib.import_module("cupy").asnumpy(x))

    def owns(self, x: Any) -> bool:
        return isinstance(x, importlib.import_module("cupy").ndarray)

    def _wrap(self, array: Array, dtype: str) -> Any:
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
        from collective import cuda

        self._chosen.ordinal = local_rank % max(1, cuda.device_count())

    def unavailable(self) -> str:
        from collective import cuda
        from collective.errors import CollectiveError

        try:
            return "" if cuda.device_count() else "no GPU here"
        except CollectiveError as error:
            return str(error)

    def read(self, x: Any) -> Array:
        return np.array(x.copy().to_host())

    def owns(self, x: Any) -> bool:
        from collective.memory.device_array import DeviceArray

        return isinstance(x, DeviceArray)

    def _wrap(self, array: Array, dtype: str) -> Any:
        from collective import cuda
        from collective.memory.device_adapter import CudaArrayAdapter

        made = CudaArrayAdapter().empty(
            array.shape, BY_NAME[dtype], cuda.device(getattr(self._chosen, "ordinal", 0))
        )
        made.fill_from_host(array)
        return made


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
        # It makes `import chainer` work beside today's NumPy.
        importlib.import_module("collective.adapters.chainer")
        return importlib.import_module("chainer")

    def make(self, whole: Array, dtype: str, part: tuple[slice, ...]) -> Any:
        copy = whole.copy()
        return self._chainer().Variable(copy[part] if part else copy)

    def read(self, x: Any) -> Array:
        return np.array(x.array)

    def owns(self, x: Any) -> bool:
        return isinstance(x, self._chainer().Variable)

    def fill(self, x: Any, source: Any) -> None:
        x.array[...] = source.array


_FRAMEWORKS: dict[str, type[ArrayFramework]] = {
    each.name: each
    for each in (
        ArrayFramework, TorchFramework, ChainerFramework, CupyFramework, TorchCudaFramework,
        CudaFramework,
    )
}  # fmt: skip
NAMES = tuple(_FRAMEWORKS)


@cache
def framework(name: str) -> ArrayFramework:
    """Return the framework called ``name``.

    Raises:
        InvalidArgumentError: there is none; lists the known ones.
    """
    if name not in _FRAMEWORKS:
        raise InvalidArgumentError(f"framework: {name!r}; one of {', '.join(NAMES)}.")
    return _FRAMEWORKS[name]()


def unavailable(names: Sequence[str]) -> dict[str, str]:
    """Return, for each of some frameworks, why it cannot be used here; nothing if it can."""
    return {name: framework(name).unavailable() for name in names}


def _missing(module: str) -> str:
    return "" if importlib.util.find_spec(module) is not None else f"{module} is not installed"

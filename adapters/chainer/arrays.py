"""Chainer's variables as the arrays that they hold: NumPy arrays on the CPU, CuPy's on GPUs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import chainer
import numpy as np

from collective import DeviceError, InvalidArgumentError
from collective.inner import Adapter, DType, adapter_like, pass_over

if TYPE_CHECKING:
    from collective.inner import cuda

_NUMPY = adapter_like("numpy")
_cupy = partial(adapter_like, "cupy")
pass_over(chainer)


class ChainerAdapter(Adapter):
    """Adapter for ``chainer.Variable`` and ``Parameter``.

    These collectives are not differentiable. They use a variable's array, and return a new
    ``Variable`` that requires no gradient. :mod:`collective.adapters.chainer.functional` has the
    differentiable collectives.
    """

    name = "chainer"

    def accepts(self, x: Any) -> bool:
        return isinstance(x, chainer.Variable)

    def view(self, x: Any) -> tuple[Any, DType]:
        array = array_of(x)
        return _adapter_of(array).view(array)

    def is_plain(self, x: Any) -> bool:
        array = array_of(x)
        ours = type(x) is chainer.Variable and x.name is None and not x.requires_grad
        return ours and _adapter_of(array).is_plain(array)

    def output(self, x: Any) -> tuple[Any, DType]:
        array = array_of(x)
        return _adapter_of(array).output(array)

    def wrap(self, array: Any, dtype: DType) -> Any:
        inner = _NUMPY if isinstance(array, np.ndarray) else _cupy()
        return chainer.Variable(inner.wrap(array, dtype), requires_grad=False)

    def empty(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        device: cuda.Device | None,
        stream: cuda.Stream | None = None,
    ) -> Any:
        if device is None:
            return np.empty(shape, dtype.storage)
        return _cupy().empty(shape, dtype, device, stream)

    def current_stream(self, device: cuda.Device, stream: cuda.Stream | None = None) -> cuda.Stream:
        return _cupy().current_stream(device, stream)

    def used_on(self, x: Any, stream: cuda.Stream) -> None:
        if isinstance(x, chainer.Variable):
            x = x.array
        if not isinstance(x, np.ndarray):
            _cupy().used_on(x, stream)


def array_of(x: Any, what: str = "chainer") -> Any:
    """Return a variable's array.

    Raises:
        InvalidArgumentError: the variable has no array yet; the error names the operation ``what``.
    """
    array = x.array
    if array is None:
        raise InvalidArgumentError(
            f"{what}: {type(x).__name__} {x.name or ''!r} is not initialized and has no array. "
            "Call its initialize(shape), or its link once, on every rank."
        )
    return array


def _adapter_of(array: Any) -> Adapter:
    if isinstance(array, np.ndarray):
        return _NUMPY
    if type(array).__module__.partition(".")[0] == "cupy":
        return _cupy()
    raise DeviceError(
        f"chainer: the variable holds a {type(array).__module__}.{type(array).__name__} (expected "
        "an array of NumPy or CuPy). Use x.to_device('@numpy') or x.to_device('@cupy:0')."
    )

"""JAX's arrays as NumPy arrays over the same memory, and results as JAX arrays."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from collective import DeviceError, DtypeError, InvalidArgumentError
from collective.inner import Adapter, DType, adapter_like, native, pass_over
from collective.memory.arrays import Distant
from collective.memory.buffer import aligned

_NUMPY = adapter_like("numpy")
# The class of all arrays that have values; without it C makes no calls on JAX's arrays.
_CONCRETE = getattr(importlib.import_module("jax._src.array"), "ArrayImpl", None)
pass_over(jax)


class JaxAdapter(Adapter):
    """Adapter for ``jax.Array``, with the elements of an array on one device.

    The memory of arrays on the first CPU device, and on NVIDIA GPUs, is used as it is. Arrays on
    other devices are copied to the host, and the results are copied to the device of the input.

    A JAX array never changes. So it cannot be an ``out``, and every result has memory of its own.
    """

    name = "jax"
    immutable = True

    def accepts(self, x: Any) -> bool:
        return isinstance(x, jax.Array)

    def view(self, x: Any) -> tuple[Any, DType]:
        if isinstance(x, jax.core.Tracer):
            raise InvalidArgumentError(
                "jax: the call is inside a function that JAX transforms (jit, grad, vmap, …), so "
                "that its array has no values yet. Make the call outside the function, or use "
                "collective.adapters.jax.functional inside it."
            )
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
            raise DtypeError(
                f"jax: arrays of {x.dtype} cannot be sent. Pass jax.random.key_data(x), and wrap "
                "the result by jax.random.wrap_key_data."
            )
        device = _device_of(x.sharding)
        if device is not None:
            return _elsewhere(x, device)
        return _NUMPY.view(_values_of(x))

    def output(self, x: Any) -> tuple[Any, DType]:
        raise InvalidArgumentError(
            "out: JAX arrays are immutable, so a call cannot write to one. Leave out= away and use "
            "the return value of the call."
        )

    def unchanged(self, x: Any) -> Any:
        if not x.weak_type:
            return x
        # The dtype of a Python number is weak: beside another array it gives way to that array's.
        with jax.enable_x64(True):  # otherwise 64 bits become 32
            return x.astype(x.dtype)

    def wrap(self, array: Any, dtype: DType) -> Any:
        if isinstance(array, _JaxDistant):
            return array.array
        if not isinstance(array, np.ndarray):
            return adapter_like("cuda").hand_back(array, dtype, "jax")  # type: ignore[attr-defined]
        return _wrap(_NUMPY.wrap(array, dtype))

    def empty(self, shape: tuple[int, ...], dtype: DType, device: Any, stream: Any = None) -> Any:
        if device is None:
            return aligned(shape, dtype.storage)
        if isinstance(device, jax.Device):
            return _JaxDistant(shape, dtype, device)
        return super().empty(shape, dtype, device, stream)

    def used_on(self, x: Any, stream: Any) -> None:
        adapter_like("cuda").used_on(x, stream)


class _JaxDistant(Distant):
    """Array on a device whose memory transports do not reach: a TPU, or a further CPU device.

    Attributes:
        array: the JAX array; None before the memory is filled.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: DType, device: Any, array: Any = None
    ) -> None:
        super().__init__(shape, dtype.storage, device)
        self._element_type = dtype
        self.array = array

    def to_host(self) -> np.ndarray[Any, Any]:
        host: np.ndarray[Any, Any] = _values_of(self.array).view(self.dtype)
        return host

    def fill_from_host(self, values: np.ndarray[Any, Any]) -> None:
        self.array = _maker(self.device)(_NUMPY.wrap(values, self._element_type))


def _values_of(x: Any) -> np.ndarray[Any, Any]:
    """Return the elements as a read-only NumPy array, when they have been computed.

    While the NumPy array exists, XLA does not reuse the memory, even if ``x`` is donated.
    """
    try:
        return np.asarray(x)
    except RuntimeError as error:
        if not x.is_deleted():
            raise  # the computation of x failed
        raise InvalidArgumentError(
            f"jax: the array was deleted, by x.delete() or by a function to which it was donated "
            f"({error}). Pass an array that exists."
        ) from None


@functools.lru_cache(maxsize=256)
def _device_of(sharding: Any) -> Any:
    """Return the device of an array; None for the CPU device whose memory is used as it is."""
    devices = sharding.device_set
    if len(devices) > 1:
        raise InvalidArgumentError(
            f"jax: the array is spread over {len(devices)} devices by {sharding} (expected an "
            "array on one device). Pass the parts of this process, as "
            "[shard.data for shard in x.addressable_shards], or copy the array to one device by "
            "jax.device_put."
        )
    (device,) = devices
    if device.process_index != jax.process_index():
        raise InvalidArgumentError(
            f"jax: the array is on {device} of process {device.process_index}, and this is process "
            f"{jax.process_index()}. Pass an array on a device of this process."
        )
    return None if device == _home() else device


@functools.cache
def _home() -> Any:
    """Return the device for arrays in host memory; None if JAX may not use the CPU."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def _elsewhere(x: Any, device: Any) -> tuple[Any, DType]:
    """Return a view of an array that is not on the first CPU device."""
    if x.is_deleted():
        _values_of(x)  # raises the error for a deleted array
    if device.platform == "gpu":
        seen: tuple[Any, DType] = importlib.import_module(
            "collective.memory.device_adapter"
        ).read_dlpack(x)
        return seen
    _, dtype = _NUMPY.view(np.empty(0, x.dtype))
    return _JaxDistant(x.shape, dtype, device, x), dtype


def _read(x: Any) -> Any:
    """Return an array's elements for a call in C; None if Python must make the call."""
    return np.asarray(x) if _device_of(x.sharding) is None else None


def _wrap(array: np.ndarray[Any, Any]) -> Any:
    """Return the JAX array for a result in host memory."""
    return _home_maker()(array)


@functools.cache
def _home_maker() -> Callable[[np.ndarray[Any, Any]], Any]:
    """Return the function that makes arrays from NumPy's on the device for host memory."""
    home = _home()
    if home is None:
        raise DeviceError(
            "jax: a result is in host memory, but JAX may not use the CPU. Add cpu to "
            "JAX_PLATFORMS, or pass like='numpy'."
        )
    return _maker(home)


@functools.cache
def _maker(device: Any) -> Callable[[np.ndarray[Any, Any]], Any]:
    """Return the function that makes arrays on a device from NumPy's, without a copy if possible.

    JAX's public functions take 60 to 100 µs. The function beneath them takes 8 µs, but it is
    private: if it is missing or works otherwise, ``jax.device_put`` does the same.
    """
    sharding, devices = jax.sharding.SingleDeviceSharding(device), (device,)
    committed = device != _home() or jax.default_backend() != "cpu"
    try:
        client = importlib.import_module("jax._src.lib").xla_client
        put, zero_copy = client.batched_device_put, client.HostBufferSemantics.ZERO_COPY
        shaped = functools.lru_cache(maxsize=256)(jax.core.ShapedArray)

        def make(array: np.ndarray[Any, Any]) -> Any:
            # The last three arguments are force_copy, the semantics and enable_x64. To pass them by
            # name takes longer. Without x64, XLA would read elements of eight bytes as elements of
            # four.
            return put(
                shaped(array.shape, array.dtype), sharding, (array,), devices, committed, False,
                zero_copy, True,
            )  # fmt: skip

        probe = make(np.arange(3.0))
        if probe.dtype == np.float64 and probe.tolist() == [0.0, 1.0, 2.0]:
            return make
    except (ImportError, AttributeError, TypeError):
        pass
    return functools.partial(_put, device if committed else None)


def _put(device: Any, array: np.ndarray[Any, Any]) -> Any:
    """Make an array by public functions; None is the default device."""
    with jax.enable_x64(True):
        return jax.device_put(array, device)


if _CONCRETE is not None:
    native.see_frozen(_CONCRETE, _read, _wrap, "sharding")

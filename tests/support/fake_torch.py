"""Fake PyTorch tensors on GPUs, over the memory and the streams of the ABI fake.

Use :func:`cuda_of_torch` in tests of GPU tensors without a GPU. A CPU build of PyTorch has the
tensor classes and no CUDA. Here a tensor reports the device cuda:0, and its elements are in the
fake's device memory. Before each operation the tensor waits for the current stream; then PyTorch
itself computes on the CPU. Work on another stream is not visible, as on a GPU.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from collective.memory import dlpack
from tests.fakes import Fake, FakeArray, current_stream

__all__ = ["CudaTensor", "PretendedCuda", "on_gpu"]

_thread = threading.local()


def current_handle(ordinal: int) -> int:
    """Return the handle of the thread's current stream on a GPU."""
    chosen: int | None = getattr(_thread, "streams", {}).get(ordinal)
    return current_stream(ordinal) if chosen is None else chosen


class PretendedStream:
    """Fake of torch.cuda.ExternalStream."""

    def __init__(self, handle: int, device: int) -> None:
        self.cuda_stream = handle
        self.device = device


@contextlib.contextmanager
def stream(chosen: PretendedStream):
    """Make a stream current, like torch.cuda.stream."""
    before = getattr(_thread, "streams", {})
    _thread.streams = {**before, chosen.device: chosen.cuda_stream}
    try:
        yield
    finally:
        _thread.streams = before


class _Block:
    """Device memory that NumPy can wrap and keep alive."""

    def __init__(self, owner: Any, memory: np.ndarray) -> None:
        self.owner = owner
        self.__array_interface__ = memory.__array_interface__


def _device_bytes(nbytes: int, ordinal: int) -> torch.Tensor:
    block = FakeArray((nbytes,), "uint8", device=ordinal, stream=current_handle(ordinal))
    Fake().synchronize(block.stream, ordinal)
    return torch.from_numpy(np.asarray(_Block(block, block.memory())))


def _moved(x: torch.Tensor, ordinal: int) -> torch.Tensor:
    """Copy a tensor to device memory, with the same strides."""
    if not x.numel():
        return x
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride()))
    copy = _device_bytes(extent * x.element_size(), ordinal).view(x.dtype)
    copy = copy.as_strided(x.shape, x.stride())
    return copy.copy_(x) if 0 not in x.stride() else copy.fill_(x.flatten()[0])


class CudaTensor(torch.Tensor):
    """Tensor on a GPU; it holds a CPU tensor in the fake's memory."""

    @staticmethod
    def __new__(cls, held: torch.Tensor, ordinal: int = 0) -> CudaTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=f"cuda:{ordinal}",
        )
        torch._C._set_conj(tensor, held.is_conj())
        torch._C._set_neg(tensor, held.is_neg())
        tensor.held, tensor.ordinal, tensor.used_on = held, ordinal, []
        return tensor

    def __repr__(self) -> str:
        return f"CudaTensor({self.held}, cuda:{self.ordinal})"

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def record_stream(self, stream: PretendedStream) -> None:
        self.used_on.append(stream.cuda_stream)

    # In PyTorch these methods guard the device before they dispatch, which fails in a CPU build.
    def __getitem__(self, key: Any) -> CudaTensor:
        return CudaTensor(self.held[key], self.ordinal)

    def copy_(self, src: torch.Tensor, non_blocking: bool = False) -> CudaTensor:
        torch.ops.aten.copy_.default(self, src, non_blocking)
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        ordinal = next(a.ordinal for a in args if isinstance(a, cls))
        Fake().synchronize(current_handle(ordinal), ordinal)

        def held(x: Any) -> Any:
            return x.held if isinstance(x, cls) else x

        def wrapped(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            shares = {a.held.untyped_storage().data_ptr() for a in args if isinstance(a, cls)}
            if x.untyped_storage().data_ptr() not in shares:
                x = _moved(x, ordinal)
            return cls(x, ordinal)

        result = func(*tree_map(held, args), **tree_map(held, kwargs or {}))
        for a in args:
            if isinstance(a, cls) and result is a.held:
                return a  # The operation was in place.
        return tree_map(wrapped, result)

    @property
    def values(self) -> torch.Tensor:
        """Elements after the work of all streams is done."""
        Fake().cuda("cuCtxPushCurrent_v2", Fake().context(self.ordinal))
        Fake().cuda("cuCtxSynchronize")
        Fake().cuda("cuCtxPopCurrent_v2", None)
        return self.held.clone()


def on_gpu(x: torch.Tensor, ordinal: int = 0) -> CudaTensor:
    """Return a tensor on a GPU with the same elements and strides."""
    return CudaTensor(_moved(x, ordinal), ordinal)


class PretendedCuda(TorchFunctionMode):
    """Mode in which torch.empty allocates GPU memory, as in a build with CUDA."""

    allocated: int = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.empty and str(kwargs.get("device", "")).startswith("cuda"):
            ordinal = torch.device(kwargs.pop("device")).index
            self.allocated += 1
            shape, kind = args[0], kwargs["dtype"]
            count = int(np.prod(shape, dtype=int))
            held = _device_bytes(count * kind.itemsize, ordinal) if count else torch.empty(0)
            return CudaTensor(held.view(kind).reshape(shape), ordinal)
        return func(*args, **kwargs)


def from_dlpack(capsule: Any) -> CudaTensor:
    """Return a tensor for a capsule of GPU memory, like torch.utils.dlpack.from_dlpack."""
    lent = dlpack.take(capsule)
    assert lent.device[0] == dlpack.CUDA
    names = {"uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32}
    names |= {"int64": torch.int64, "complex128": torch.complex128}
    array = np.lib.stride_tricks.as_strided(
        np.asarray(_Block(lent.owner, _raw(lent))), lent.shape, lent.strides
    )
    held = torch.from_numpy(array)
    assert held.dtype is names[lent.dtype.name]
    return CudaTensor(held, lent.device[1])


def _raw(lent: dlpack.Lent) -> np.ndarray:
    import ctypes

    extent = lent.dtype.itemsize + sum((n - 1) * s for n, s in zip(lent.shape, lent.strides))
    raw = (ctypes.c_uint8 * extent).from_address(lent.address)
    size = lent.dtype.itemsize
    return np.frombuffer(raw, lent.dtype.storage, extent // size)


@contextlib.contextmanager
def cuda_of_torch(monkeypatch):
    """Replace torch's CUDA functions by fakes for the body of a ``with``."""
    from collective.adapters.torch import cuda_arrays

    monkeypatch.setattr(cuda_arrays, "_current_handle", current_handle)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "ExternalStream", PretendedStream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda ordinal: PretendedStream(0, ordinal))
    monkeypatch.setattr(torch.utils.dlpack, "from_dlpack", from_dlpack)
    with PretendedCuda() as mode:
        yield mode

"""CuPy over the memory and the streams of the ABI fake; for tests of CuPy arrays without a GPU.

CuPy itself is real. The parts that need CUDA's runtime are fakes: the current device and stream,
allocation, and the kernel that copies between strides. NumPy makes that copy here when the current
stream is done. The transports are for ranks with such arrays, in processes that use nothing else.
"""

from __future__ import annotations

import contextlib
import os
import threading
import types
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

from collective.adapters.cupy import arrays
from collective.backends.mpi import MpiBackend
from collective.backends.nccl import NcclBackend
from collective.backends.shm import ShmBackend
from collective.contract.world import World
from collective.memory.arrays import adapter_of
from tests.fakes import Fake, FakeArray, current_stream, environment

__all__ = ["Mpi", "Nccl", "Runtime", "Shm", "of", "over", "pretend", "values_of"]


class Runtime(threading.local):
    """Fake of CUDA's runtime for CuPy: the current device and stream of a thread.

    Attributes:
        kernels: device, stream and dtype of each kernel that this thread has started.
    """

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, int] = {}
        self.kernels: list[tuple[int, int, Any]] = []

    def handle(self, ordinal: int) -> int:
        return self.streams.get(ordinal, current_stream(ordinal))

    def get_current_stream(self, ordinal: int = -1):
        return types.SimpleNamespace(ptr=self.handle(self.device if ordinal < 0 else ordinal))

    @contextlib.contextmanager
    def using_device(self, ordinal: int):
        before, self.device = self.device, ordinal
        try:
            yield
        finally:
            self.device = before

    @contextlib.contextmanager
    def using(self, handle: int, ordinal: int | None = None):
        # CuPy refuses the stream of a device that is not current.
        ordinal = self.device if ordinal is None else ordinal
        assert ordinal == self.device
        before = self.streams
        self.streams = {**before, ordinal: handle}
        try:
            yield
        finally:
            self.streams = before

    def empty(self, shape, dtype):
        return over(FakeArray(shape, dtype, None, self.device, self.handle(self.device)))


def pretend(put: Callable[[Any, str, Any], None] = setattr) -> Runtime:
    """Give CuPy a fake runtime, for good, or until the end of a MonkeyPatch (``put``)."""
    runtime = Runtime()

    class Device:
        def __init__(self, ordinal=None):
            self.id = runtime.device if ordinal is None else ordinal

        def __enter__(self):
            self._context = runtime.using_device(self.id)
            self._context.__enter__()

        def __exit__(self, *error):
            return self._context.__exit__(*error)

    class Copying(cupy.ndarray):
        def __setitem__(self, key, value):
            assert key is Ellipsis
            stream = runtime.handle(runtime.device)
            Fake().synchronize(stream, runtime.device)
            runtime.kernels.append((runtime.device, stream, self.dtype))
            np.copyto(_on_host(self), _on_host(value))

    real = arrays._over

    def over_memory(array, kind):
        plain = real(array, kind)
        return Copying(plain.shape, plain.dtype, plain.data, strides=plain.strides)

    put(cupy.cuda, "get_current_stream", runtime.get_current_stream)
    put(cupy.cuda, "Device", Device)
    put(cupy.cuda, "ExternalStream", runtime.using)
    put(cupy.cuda, "Stream", types.SimpleNamespace(null=runtime.using(0)))
    put(cupy, "empty", runtime.empty)
    put(arrays, "_over", over_memory)
    return runtime


def _on_host(x: cupy.ndarray) -> np.ndarray:
    """Return a NumPy array over the memory of ``x``, without waiting for a stream."""
    interface = {
        "shape": x.shape, "strides": x.strides, "typestr": x.dtype.str,
        "data": (x.data.ptr, False), "version": 3,
    }  # fmt: skip
    return np.asarray(types.SimpleNamespace(__array_interface__=interface))


def over(x: FakeArray, dtype=None) -> cupy.ndarray:
    """Return a CuPy array over the memory of a FakeArray."""
    memory = cupy.cuda.UnownedMemory(x.address, max(x._nbytes, 1), x, device_id=x.device)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(x.shape, x.dtype if dtype is None else dtype, pointer, strides=x.strides)


def of(values, device: int = 0) -> cupy.ndarray:
    """Return a CuPy array on a fake GPU with these values."""
    x = FakeArray.of(values, device)
    Fake().synchronize(x.stream, device)
    return over(x)


def values_of(x) -> np.ndarray:
    """Return the values of a CuPy array, after its stream is done."""
    return adapter_of(x).view(x)[0].to_host()


# -- ranks ----------------------------------------------------------------------------------


class _OnTheFake:
    @classmethod
    def connect(cls, world: World, timeout: float) -> Any:
        os.environ.update(environment(delay_us=200))
        pretend()
        return super().connect(world, timeout)  # type: ignore[misc]


class Shm(_OnTheFake, ShmBackend):
    """``shm``, which moves GPU arrays through page-locked memory."""


class Nccl(_OnTheFake, NcclBackend):
    """``nccl`` over the fake."""


class Mpi(_OnTheFake, MpiBackend):
    """``mpi``, which moves GPU arrays through page-locked memory."""

    name = "mpi-staged"

"""CuPy over the memory and the streams of the ABI fake.

CuPy itself is real. What needs CUDA's runtime is pretended: which device and stream are current,
allocation, and the kernel that copies between strides, which NumPy does here once the stream is
done that is current. The transports are for ranks with such arrays, in processes that use nothing
else.
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
from collective.backends.mpi.cuda_aware import CudaAwareMpi
from collective.backends.nccl import NcclBackend
from collective.backends.shm import ShmBackend
from collective.contract.world import World
from collective.memory.arrays import adapter_of
from tests.fakes import Fake, FakeArray, current_stream, environment

__all__ = ["AwareMpi", "Mpi", "Nccl", "Runtime", "Shm", "of", "over", "pretend", "values_of"]


class Runtime(threading.local):
    """What CuPy asks CUDA's runtime for: the device and the stream that are current.

    Attributes:
        kernels: that this thread has started: their device, stream and type.
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
    """Give CuPy a runtime, for good or for as long as the ``setattr`` of a MonkeyPatch does."""
    made = Runtime()

    class Device:
        def __init__(self, ordinal=None):
            self.id = made.device if ordinal is None else ordinal

        def __enter__(self):
            self._context = made.using_device(self.id)
            self._context.__enter__()

        def __exit__(self, *error):
            return self._context.__exit__(*error)

    class Copying(cupy.ndarray):
        def __setitem__(self, key, value):
            assert key is Ellipsis
            stream = made.handle(made.device)
            Fake().synchronize(stream, made.device)
            made.kernels.append((made.device, stream, self.dtype))
            np.copyto(_on_host(self), _on_host(value))

    real = arrays._over

    def over_memory(array, kind):
        plain = real(array, kind)
        return Copying(plain.shape, plain.dtype, plain.data, strides=plain.strides)

    put(cupy.cuda, "get_current_stream", made.get_current_stream)
    put(cupy.cuda, "Device", Device)
    put(cupy.cuda, "ExternalStream", made.using)
    put(cupy.cuda, "Stream", types.SimpleNamespace(null=made.using(0)))
    put(cupy, "empty", made.empty)
    put(arrays, "_over", over_memory)
    return made


def _on_host(x: cupy.ndarray) -> np.ndarray:
    """Return the fake's memory as it is."""
    interface = {
        "shape": x.shape, "strides": x.strides, "typestr": x.dtype.str,
        "data": (x.data.ptr, False), "version": 3,
    }  # fmt: skip
    return np.asarray(types.SimpleNamespace(__array_interface__=interface))


def over(x: FakeArray, dtype=None) -> cupy.ndarray:
    """Return CuPy over a FakeArray's memory."""
    memory = cupy.cuda.UnownedMemory(x.address, max(x._nbytes, 1), x, device_id=x.device)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    return cupy.ndarray(x.shape, x.dtype if dtype is None else dtype, pointer, strides=x.strides)


def of(values, device: int = 0) -> cupy.ndarray:
    x = FakeArray.of(values, device)
    Fake().synchronize(x.stream, device)
    return over(x)


def values_of(x) -> np.ndarray:
    return adapter_of(x).view(x)[0].to_host()


# -- ranks ----------------------------------------------------------------------------------


class _OnTheFake:
    @classmethod
    def connect(cls, world: World, timeout: float) -> Any:
        os.environ.update(environment(delay_us=200))
        pretend()
        return super().connect(world, timeout)  # type: ignore[misc]


class Shm(_OnTheFake, ShmBackend):
    """Through page-locked memory."""


class Nccl(_OnTheFake, NcclBackend):
    """NCCL's own."""


class Mpi(_OnTheFake, MpiBackend):
    """Through page-locked memory, as on a library that knows no GPUs."""

    name = "mpi-staged"


class AwareMpi(_OnTheFake, CudaAwareMpi):
    """On a library that takes the memory of GPUs."""

    name = "mpi-aware"

"""Transports whose arrays are taken for a GPU's: the conformance suite's are NumPy's.

The memory of the ABI fake is the host's, so NumPy's can pass for it. In the processes of such
ranks the adapters give the memory of the host's arrays as a GPU's, without copies.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import numpy as np
from fakes import environment

from collective import cuda
from collective.backends.shm import ShmBackend
from collective.communicator import calls
from collective.communicator.calls import Calls
from collective.communicator.point_to_point import PointToPoint
from collective.contract.work import Work
from collective.contract.world import World
from collective.memory import arrays
from collective.memory.arrays import Adapter, NumpyAdapter
from collective.memory.device_array import DeviceArray
from collective.memory.dtypes import DType

__all__ = ["StagedShm", "pretend", "wait_before_reading"]

Array = np.ndarray[Any, Any]


class OnGpu(Adapter):
    """Arrays of the host as those of a GPU, over an adapter that sees them as they are."""

    def __init__(self, host: Adapter, ordinal: int) -> None:
        self.name = host.name  # type: ignore[misc]
        self._host = host
        self._ordinal = ordinal

    def accepts(self, x: Any) -> bool:
        return self._host.accepts(x)

    def _on_gpu(self, array: Array) -> DeviceArray:
        device = cuda.device(self._ordinal)
        return DeviceArray(
            array.ctypes.data, array.shape, array.dtype, device, device.stream(0),
            strides=array.strides, owner=array, writeable=array.flags.writeable,
        )  # fmt: skip

    def view(self, x: Any) -> tuple[Any, DType]:
        array, dtype = self._host.view(x)
        return self._on_gpu(array), dtype

    def output(self, x: Any) -> tuple[Any, DType]:
        array, dtype = self._host.output(x)
        return self._on_gpu(array), dtype

    def empty(self, shape: Any, dtype: DType, device: Any, stream: Any = None) -> Any:
        model = self._on_gpu(np.empty(0, dtype.storage))
        return model.allocate(shape)

    def current_stream(self, device: cuda.Device, stream: Any = None) -> cuda.Stream:
        return device.stream(0)

    def wrap(self, array: Any, dtype: DType) -> Any:
        if isinstance(array, np.ndarray):
            return self._host.wrap(array, dtype)
        raw = (ctypes.c_char * array.nbytes).from_address(array.address)
        raw._kept = array  # as long as NumPy's array lives
        flat = np.frombuffer(raw, dtype.storage) if array.size else np.empty(0, dtype.storage)
        return self._host.wrap(flat.reshape(array.shape), dtype)


def pretend(ordinal: int) -> None:
    """In this process, take arrays of the host for those of GPU ``ordinal`` from now on."""
    if isinstance(arrays.adapter_like("numpy"), OnGpu):
        return
    find, load = arrays._find, arrays._load

    def on_gpu(adapter: Adapter) -> Adapter:
        return adapter if isinstance(adapter, OnGpu) else OnGpu(adapter, ordinal)

    arrays._find = lambda x: on_gpu(find(x))
    arrays._load = lambda framework: on_gpu(load(framework))
    numpy = OnGpu(NumpyAdapter(), ordinal)
    arrays._by_type.clear()
    arrays._by_name.clear()
    arrays._by_type[np.ndarray] = arrays._by_name["numpy"] = arrays._by_name["cuda"] = numpy


def wait_before_reading(ordinal: int) -> None:
    """Have calls wait for the stream of their results, as a program does before it reads."""
    if hasattr(Calls._go, "__wrapped__"):
        return
    stream, process = cuda.device(ordinal).stream(0), os.getpid()

    def waiting(method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            if os.getpid() == process:  # a forked child has no GPU, and may have no results
                stream.synchronize()
            return result

        # In reports of where a call was made this frame passes for the library's own.
        call.__code__ = call.__code__.replace(co_filename=calls.__file__)
        return call

    Calls._go = waiting(Calls._go)  # type: ignore[method-assign]
    PointToPoint._post = waiting(PointToPoint._post)  # type: ignore[method-assign]
    Work.wait = waiting(Work.wait)  # type: ignore[method-assign]


class StagedShm(ShmBackend):
    """Shared memory for arrays of GPUs, which go through the host's."""

    name = "shm-staged"

    @classmethod
    def connect(cls, world: World, timeout: float) -> StagedShm:
        os.environ.update(environment(host_pointers=1, log=0))
        pretend(world.local_rank)
        wait_before_reading(world.local_rank)
        return super().connect(world, timeout)

"""Programs of ranks with GPUs of the ABI fake: a communicator, and arrays on streams.

Use these helpers in tests of ``nccl`` as a program sees it. The arrays are in the fake's device
memory. The fake does its work late, and not at all during :func:`held`. A program that reads
without waiting reads poison.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from collective import cuda
from collective.memory import device_layout
from collective.memory.arrays import adapter_like
from collective.memory.device_array import DeviceArray
from collective.memory.dtypes import FOREIGN, named
from tests.fakes import POISON, Fake, FakeArray
from tests.support.nccl_processes import FAR, FakeNccl

__all__ = [
    "FAR",
    "MAKERS",
    "Both",
    "Framework",
    "Gpus",
    "calls_of_nccl",
    "copied",
    "enqueue_copy",
    "error_of",
    "framework",
    "held",
    "is_poison",
    "new_stream",
    "of_device",
    "of_fake",
    "ordinal_of",
    "peek",
    "read",
    "room",
    "settled",
    "until",
    "warm",
]

Array = np.ndarray[Any, Any]
# Calls of NCCL that move data.
_MOVES = ("ncclAll", "ncclBroadcast", "ncclReduce", "ncclSend", "ncclRecv")


class Gpus(FakeNccl):
    """``nccl`` alone: each rank has a GPU."""

    knobs: ClassVar[dict[str, int]] = {"delay_us": 300}


class Both(Gpus):
    """The backend ``"cpu:shm,cuda:nccl"``."""

    options: ClassVar[dict[str, str]] = {"host": "shm", "devices": "cpu,cuda"}


def ordinal_of(comm: Any) -> int:
    """Return the ordinal of this rank's GPU."""
    ordinal: int = comm.inner.transport.device.ordinal
    return ordinal


def new_stream(comm: Any) -> int:
    """Return the handle of a new stream on this rank's GPU."""
    return Fake().stream(ordinal_of(comm))


def of_fake(comm: Any, values: Any, stream: int | None = None) -> FakeArray:
    """Return an array of an unknown framework, with ``__cuda_array_interface__``."""
    return FakeArray.of(values, ordinal_of(comm), stream)


def of_device(comm: Any, values: Any, stream: int | None = None) -> DeviceArray:
    """Return a DeviceArray with the strides of ``values``."""
    array = np.asarray(values)
    device = comm.inner.transport.device
    on = device.new_stream() if stream is None else device.stream(stream)
    low, high = device_layout.bounds(0, array.shape, array.strides, array.itemsize)
    memory = adapter_like("cuda").empty((high - low,), named("uint8"), device, on)
    result = DeviceArray(
        memory.address - low,
        array.shape,
        array.dtype,
        device,
        on,
        strides=array.strides,
        owner=memory.owner,
    )
    result.fill_from_host(array)
    return result


MAKERS = {"fake": of_fake, "device": of_device}


def peek(x: Any) -> Array:
    """Return the present contents of memory, without waiting for a stream."""
    if isinstance(x, FakeArray):
        return x.peek()
    low, high = x.bounds
    memory = (ctypes.c_uint8 * (high - low)).from_address(low)
    if not x.size:
        return np.empty(x.shape, x.dtype)
    return np.ndarray(x.shape, x.dtype, memory, x.address - low, x.strides).copy()


def read(x: Any) -> Array:
    """Wait for the array's own stream only; return the contents of memory then."""
    if isinstance(x, np.ndarray):
        return x
    if isinstance(x, DeviceArray):
        Fake().synchronize(x.stream.handle, x.device.ordinal)
    else:
        Fake().synchronize(x.stream, x.device)
    return peek(x)


def is_poison(x: Any) -> bool:
    """Return whether the array still contains only poison."""
    return set(np.ascontiguousarray(peek(x)).view(np.uint8).ravel().tolist()) == {POISON}


def copied(comm: Any, x: Any, stream: int) -> FakeArray:
    """Enqueue a copy of a contiguous array on a stream, as a program's next step; return it."""
    copy = FakeArray(x.shape, x.dtype, device=ordinal_of(comm), stream=stream)
    enqueue_copy(comm, copy, x, stream)
    return copy


def enqueue_copy(comm: Any, dst: Any, src: Any, stream: int) -> None:
    """Enqueue a copy of all bytes of a contiguous array."""
    nbytes = int(np.prod(src.shape, dtype=int)) * np.dtype(src.dtype).itemsize
    cuda.copy(dst.address, src.address, nbytes, comm.inner.transport.device.stream(stream))


def room(comm: Any, kind: str, shape: tuple[int, ...], stream: int) -> Any:
    """Return an uninitialised array, without waiting for a stream."""
    if kind == "fake":
        return FakeArray(shape, "float32", device=ordinal_of(comm), stream=stream)
    device = comm.inner.transport.device
    return adapter_like("cuda").empty(shape, named("float32"), device, device.stream(stream))


@contextlib.contextmanager
def held() -> Iterator[Fake]:
    """Stop all data movement from starting on this rank's GPU, for the length of a block."""
    fake = Fake()
    with fake.turned("hold", 1):
        yield fake


def warm(comm: Any) -> None:
    """Create NCCL's communicator, so that later calls do not wait for the peers."""
    Fake().clear_log()
    Fake().reset_error()  # An earlier test may have failed.
    x = of_fake(comm, np.ones(1, np.float32))
    comm.all_reduce(x, out=x)
    assert read(x)[0] == comm.size
    comm.barrier()
    settled(comm)


def settled(comm: Any) -> None:
    """Wait until all work of the GPU is done, and check that it did nothing forbidden."""
    fake = Fake()
    with fake.active(ordinal_of(comm)):
        fake.cuda("cuCtxSynchronize")
    wrong = [line for line in fake.log() if line.startswith(("use after", "freed twice"))]
    assert not wrong, wrong


def calls_of_nccl() -> list[str]:
    """Return the calls in the fake's log that enqueue work of NCCL."""
    return [line for line in Fake().log() if line.startswith(_MOVES)]


def error_of(function: Any, *args: Any, **options: Any) -> BaseException:
    """Return the exception of a call; fail if there is none."""
    try:
        function(*args, **options)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def until(condition: Any, seconds: float = FAR) -> None:
    """Wait until a condition is true that another rank or thread fulfils."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.002)


class Framework:
    """Array library, used as a program on a GPU uses it; see :func:`framework`."""

    def __init__(self, comm: Any, name: str) -> None:
        self.comm, self.name = comm, name
        self.stream: int | None = None  # stream of its arrays, or None for the current stream

    def of(self, values: Any) -> Any:
        """Return an array on the GPU, contiguous if and only if ``values`` is."""
        if self.name == "torch":
            import torch

            from tests.support.fake_torch import on_gpu

            array = np.asarray(values)
            if array.dtype.name in FOREIGN:
                bits = torch.from_numpy(array.view(f"u{array.itemsize}").view(f"i{array.itemsize}"))
                return on_gpu(bits.view(getattr(torch, array.dtype.name)), ordinal_of(self.comm))
            return on_gpu(torch.from_numpy(array), ordinal_of(self.comm))
        return MAKERS[self.name](self.comm, values, self.stream)

    def read(self, x: Any) -> Array:
        """Return the elements as a program reads them that waits for the right streams."""
        if self.name == "torch" and not isinstance(x, (np.ndarray, DeviceArray, FakeArray)):
            stream = x.device.index
            from tests.support.fake_torch import current_handle

            Fake().synchronize(current_handle(stream), stream)
            held = x.held.contiguous()
            if held.dtype.itemsize < 4 and held.dtype.is_floating_point:
                import ml_dtypes
                import torch

                name = str(held.dtype).rpartition(".")[2]
                kind = np.dtype(getattr(ml_dtypes, name, None) or name)
                bits = held.view(torch.int16 if kind.itemsize == 2 else torch.uint8).numpy().copy()
                return bits.view(kind)
            return held.numpy().copy()
        return read(x).copy()

    @property
    def result(self) -> type:
        """Type of results: a framework without an adapter gets a DeviceArray."""
        if self.name == "torch":
            from tests.support.fake_torch import CudaTensor

            return CudaTensor
        return DeviceArray

    def check(self, got: Any, expected: Any, rtol: float = 0.0) -> None:
        """Check a result's type, GPU, shape and elements."""
        assert type(got) is self.result, type(got)
        where = got.device.index if self.name == "torch" else got.device.ordinal
        assert where == ordinal_of(self.comm)
        expected = np.asarray(expected)
        assert tuple(got.shape) == expected.shape, (tuple(got.shape), expected.shape)
        elements = self.read(got).astype(expected.dtype)
        np.testing.assert_allclose(elements, expected, rtol=rtol)


@contextlib.contextmanager
def framework(comm: Any, name: str) -> Iterator[Framework]:
    """Yield a library for the length of a block: ``"fake"``, ``"device"`` or ``"torch"``."""
    with contextlib.ExitStack() as stack:
        if name == "torch":
            import pytest

            from tests.support.fake_torch import cuda_of_torch

            patch = stack.enter_context(pytest.MonkeyPatch.context())
            mode = stack.enter_context(cuda_of_torch(patch))
            _in_all_threads(mode, patch)
        yield Framework(comm, name)


def _in_all_threads(mode: Any, patch: Any) -> None:
    """Use the fake allocator in the library's threads, too: a torch mode holds for one thread."""
    import torch

    plain = torch.empty

    def empty(*args: Any, **options: Any) -> Any:
        if str(options.get("device", "")).startswith("cuda"):
            return mode.__torch_function__(torch.empty, (), args, options)
        return plain(*args, **options)

    patch.setattr(torch, "empty", empty)

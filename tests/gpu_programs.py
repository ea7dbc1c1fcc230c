"""Ranks with GPUs of the ABI fake, as a program sees them: a communicator and arrays on streams.

The arrays are real ones in the fake's device memory. The fake does its work late, and not at all
while it is held: whoever reads without having waited reads poison.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from fakes import POISON, Fake, FakeArray
from nccl_places import FakeNccl

from collective import cuda
from collective.arrays import adapter_like
from collective.device_array import DeviceArray
from collective.dtypes import from_numpy, named

__all__ = [
    "FAR",
    "MAKERS",
    "Both",
    "Gpus",
    "calls_of_nccl",
    "copied",
    "error_of",
    "held",
    "is_poison",
    "new_stream",
    "of_device",
    "of_fake",
    "ordinal_of",
    "peek",
    "read",
    "settled",
    "until",
    "warm",
]

Array = np.ndarray[Any, Any]
# A deadline in seconds that nothing gets to unless it hangs.
FAR = 20.0
# Calls of NCCL that move data.
_MOVES = ("ncclAll", "ncclBroadcast", "ncclReduce", "ncclSend", "ncclRecv", "ncclGather(",
          "ncclScatter(")  # fmt: skip


class Gpus(FakeNccl):
    """``nccl`` alone: ranks with a GPU each."""

    knobs: ClassVar[dict[str, int]] = {"delay_us": 300}


class Both(Gpus):
    """``"cpu:shm,cuda:nccl"``."""

    options: ClassVar[dict[str, str]] = {"host": "shm", "devices": "cpu,cuda"}


def ordinal_of(comm: Any) -> int:
    ordinal: int = comm._backend.device.ordinal
    return ordinal


def new_stream(comm: Any) -> int:
    """Return the handle of a stream of this rank's GPU."""
    return Fake().stream(ordinal_of(comm))


def of_fake(comm: Any, values: Any, stream: int | None = None) -> FakeArray:
    """Return an array of an unknown framework, by ``__cuda_array_interface__``."""
    return FakeArray.of(values, ordinal_of(comm), stream)


def of_device(comm: Any, values: Any, stream: int | None = None, dtype: str = "") -> DeviceArray:
    """Return one of CUDA's own memory, with the strides of ``values`` where it has gaps."""
    array = np.asarray(values)
    device = comm._backend.device
    on = device.new_stream() if stream is None else device.stream(stream)
    kind = named(dtype) if dtype else from_numpy(array.dtype)
    made: DeviceArray = adapter_like("cuda").empty(array.shape, kind, device, on)
    if array.size:
        made.fill_from_host(np.ascontiguousarray(array))
    return made


MAKERS = {"fake": of_fake, "device": of_device}


def _where(x: Any) -> tuple[int, int, int]:
    """Return address, stream handle and device."""
    if isinstance(x, DeviceArray):
        return x.address, x.stream.handle, x.device.ordinal
    return x.address, x.stream, x.device


def peek(x: Any) -> Array:
    """Return what is in memory now, without waiting for anything."""
    if isinstance(x, FakeArray):
        return x.peek()
    if not x.size:
        return np.empty(x.shape, x.dtype)
    assert x.flags.c_contiguous
    raw = (ctypes.c_uint8 * x.nbytes).from_address(x.address)
    return np.ctypeslib.as_array(raw).copy().view(x.dtype).reshape(x.shape)


def read(x: Any) -> Array:
    """Wait for the array's own stream, and for nothing else; return what is there then."""
    if isinstance(x, np.ndarray):
        return x
    _, stream, device = _where(x)
    Fake().synchronize(stream, device)
    return peek(x)


def is_poison(x: Any) -> bool:
    """Tell whether nothing has been written to an array yet."""
    return set(np.ascontiguousarray(peek(x)).view(np.uint8).ravel().tolist()) == {POISON}


def copied(comm: Any, x: Any, stream: int) -> FakeArray:
    """Enqueue a copy of a contiguous array on a stream, as the program's next step."""
    made = FakeArray(x.shape, x.dtype, device=ordinal_of(comm), stream=stream)
    address = _where(x)[0]
    nbytes = int(np.prod(x.shape, dtype=int)) * np.dtype(x.dtype).itemsize
    cuda.copy(made.address, address, nbytes, comm._backend.device.stream(stream))
    return made


@contextlib.contextmanager
def held() -> Iterator[Fake]:
    """Let nothing that moves data begin on this rank's GPU, for the length of a block."""
    fake = Fake()
    with fake.turned("hold", 1):
        yield fake


def warm(comm: Any) -> None:
    """Make NCCL's communicator, so that later calls do not wait for the peers."""
    Fake().clear_log()
    Fake().reset_error()  # of a test that failed before
    x = of_fake(comm, np.ones(1, np.float32))
    comm.all_reduce(x, out=x)
    assert read(x)[0] == comm.size
    comm.barrier()
    settled(comm)


def settled(comm: Any) -> None:
    """Wait until all that is on the GPU is over, and see that it did nothing forbidden."""
    fake = Fake()
    with fake.active(ordinal_of(comm)):
        fake.cuda("cuCtxSynchronize")
    wrong = [line for line in fake.log() if line.startswith(("use after", "freed twice"))]
    assert not wrong, wrong


def calls_of_nccl() -> list[str]:
    """Return the calls in the fake's log that enqueue something of NCCL's."""
    return [line for line in Fake().log() if line.startswith(_MOVES)]


def error_of(function: Any, *args: Any, **options: Any) -> BaseException:
    """Return what a call raises."""
    try:
        function(*args, **options)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def until(condition: Any, seconds: float = FAR) -> None:
    """Wait for something that another rank or thread does."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)

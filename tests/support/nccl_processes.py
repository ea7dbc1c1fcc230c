"""Ranks of ``nccl`` over the ABI fake in separate processes, and calls for its tests.

Use :func:`pools` for a fixture with ranks, and :class:`Caller` in a function that a rank runs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

from collective import Communicator
from collective.backends.nccl import NcclBackend
from collective.contract.world import World
from collective.cuda import Stream
from collective.deadline import Deadline
from collective.memory.buffer import Buffer
from collective.memory.device_array import DeviceArray
from collective.memory.device_copies import PlainSpace
from collective.memory.dtypes import DType, from_numpy, named
from collective.request import Request
from collective.testing import RankPool
from tests.fakes import compiler, environment

__all__ = ["FAR", "Caller", "FakeNccl", "Pools", "needs_compiler", "pools", "read", "side_by_side"]

# A deadline in seconds that only a hanging call reaches.
FAR = 20.0

needs_compiler = pytest.mark.skipif(compiler() is None, reason="the ABI fake needs a C compiler")


class FakeNccl(NcclBackend):
    """The transport on the fake, in processes that use nothing else.

    Attributes:
        version: version code of NCCL.
        knobs: settings of the fake.
        options: options of the transport, beside those of its world.
    """

    version: ClassVar[int] = 22907
    knobs: ClassVar[dict[str, int]] = {"delay_us": 200}
    options: ClassVar[dict[str, str]] = {}

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> FakeNccl:
        os.environ.update(environment(cls.version, **cls.knobs))
        return super().connect(replace(world, options={**world.options, **cls.options}), deadline)


class Caller:
    """Transport, GPU and stream of a rank, with calls as a communicator makes them."""

    def __init__(self, of: Communicator | Any, stream: Stream | None = None) -> None:
        self.backend: Any = of.inner.transport if isinstance(of, Communicator) else of
        self.rank, self.size = self.backend.rank, self.backend.size
        self.device = self.backend.device
        self.stream = stream or self.device.new_stream()

    def on(self, stream: Stream) -> Caller:
        return Caller(self.backend, stream)

    def buffer(self, values: Any, dtype: str | None = None) -> Buffer:
        """Return a buffer on the GPU with these values."""
        array = np.asarray(values)
        kind: DType = from_numpy(array.dtype) if dtype is None else named(dtype)
        made = self.empty(array.size, kind)
        made.array.fill_from_host(array.ravel().astype(kind.storage, copy=False))
        return made

    def empty(self, count: int, kind: DType | str) -> Buffer:
        """Return an uninitialised buffer on the GPU."""
        kind = named(kind) if isinstance(kind, str) else kind
        nbytes = count * kind.itemsize
        address, owner = PlainSpace().empty(nbytes, self.device, self.stream)
        array = DeviceArray(address, (count,), kind.storage, self.device, self.stream, owner=owner)
        return Buffer(array, kind)

    def call(self, name: str, src: Any, dst: Any, timeout: float = FAR, **asked: Any) -> Any:
        """Make a collective call as a communicator does, which also records the call."""
        if "op" in asked:
            asked |= {"dtype": src.dtype, "shape": (src.count,)}
        recorder, request = self.backend.channel.recorder, Request(name, **asked)
        if recorder is not None:
            recorder.begin(request)
        result = self.backend.plan(request)(src, dst, Deadline(timeout))
        if recorder is not None:
            recorder.end()
        return result

    def finish(self, timeout: float = FAR) -> None:
        """Wait for the stream, or raise its error."""
        self.backend.synchronize_event(self.stream.record(), "wait", Deadline(timeout))


def read(buffer: Buffer) -> np.ndarray[Any, Any]:
    """Return the contents of a GPU buffer after the work of its stream."""
    return np.array(buffer.array.to_host())


class Pools:
    """Pools of ranks in processes, one pool for each number of ranks, kept until the end."""

    def __init__(self, kind: type[NcclBackend], timeout: float = 40.0) -> None:
        self._kind, self._timeout = kind, timeout
        self._made: dict[int, RankPool] = {}

    def __enter__(self) -> Pools:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._made.values():
            pool.close()

    def __call__(self, size: int, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run a function on ``size`` ranks, and return the results."""
        if size not in self._made:
            self._made[size] = RankPool(size, self._kind, timeout=self._timeout)
        return self._made[size].run(function, *args, **options)

    def run(self, function: Callable[..., Any], *args: Any, size: int = 2, **options: Any) -> Any:
        """Run a function on ranks; :func:`on_ranks` calls this method."""
        return self(size, function, *args, **options)


def pools(kind: type[NcclBackend], timeout: float = 40.0) -> Any:
    """Return a fixture of pools that live as long as a module's tests."""

    @pytest.fixture(scope="module")
    def made() -> Iterator[Pools]:
        with Pools(kind, timeout) as open_pools:
            yield open_pools

    return made


def side_by_side(*functions: Callable[[], Any]) -> list[Any]:
    """Run functions in threads; return their results, or raise the first exception."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results

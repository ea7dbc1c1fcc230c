"""The calls of each library, as its users write them, behind one small interface.

This module runs in the ranks, in the environment of the library. So it imports only NumPy at first,
and everything else when it is needed. Every reduction is a sum.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from collective.testing.frameworks import ArrayFramework, encoded, framework

__all__ = ["BenchLibrary", "Call", "Memcpy", "Ours", "Unsupported"]

Array = np.ndarray[Any, Any]
# A function without arguments that makes one call; its result may be anything.
Call = Callable[[], Any]


class Unsupported(Exception):
    """Raised for an operation that a library does not have."""


class BenchLibrary(ABC):
    """Library as one rank sees it. The ranks are connected when the object has been made.

    Attributes:
        rank, size: this rank, and number of ranks.
        version: name and version, as the library reports them.
        framework: framework of the arrays that the library gets.
        refusals: exceptions for an operation that the library cannot do; it raises them on all
            ranks and before anything is sent.
    """

    rank: int
    size: int
    version: str
    framework: ArrayFramework = framework("numpy")
    refusals: tuple[type[Exception], ...] = (Exception,)

    def use(self, name: str) -> None:
        """Use the arrays of another framework from now on.

        Raises:
            Unsupported: the framework cannot be used here.
        """
        found = framework(name)
        reason = found.unavailable()
        if reason:
            raise Unsupported(reason)
        self.framework = found

    def new(self, count: int, memory: str, dtype: str = "float32") -> Any:
        """Return an array of ``count`` zeros.

        Args:
            count: number of elements.
            memory: ``"ordinary"``, or ``"symmetric"`` if the library has symmetric memory.
            dtype: name of the dtype.

        Raises:
            Unsupported: the framework has no such dtype.
        """
        if dtype not in self.framework.dtypes():
            raise Unsupported(f"{self.framework.name} has no {dtype}")
        return self.framework.make(encoded(np.zeros(count, np.int64), dtype), dtype, _ALL)

    def numpy(self, x: Any) -> Array:
        """Return NumPy's array over the memory of an array on the CPU."""
        array: Array = np.asarray(x)
        return array

    @abstractmethod
    def calls(self, x: Any, y: Any) -> dict[str, Call]:
        """Return each operation on input ``x`` and output ``y``.

        ``all_reduce`` and ``broadcast`` work in place, on ``x``. ``send_recv`` sends
        ``x`` to the neighbour and waits until the neighbour's answer is in ``y``.
        """

    def call(self, operation: str, x: Any, y: Any) -> Call:
        """Return one operation.

        Raises:
            Unsupported: the library does not have it.
        """
        call = self.calls(x, y).get(operation)
        if call is None:
            raise Unsupported(f"{self.version} has no {operation}")
        return call

    def result(self, x: Any, y: Any, returned: Any) -> Any:
        """Return the array with the result of a call: ``y``, or ``x`` if the call is in place."""
        return x if y is None else y

    def synchronize(self) -> None:
        """Wait until the work that was enqueued on the GPU is done."""
        name = self.framework.name
        if name.startswith("torch"):
            import torch

            torch.cuda.synchronize()
        else:
            import cupy

            cupy.cuda.Device().synchronize()

    @abstractmethod
    def close(self) -> None:
        """Leave the other ranks."""

    def _ping_pong(self, send: Callable[[int], object], recv: Callable[[int], Any]) -> Call:
        """Return a round trip between ranks 0 and 1, 2 and 3, …; an odd last rank is idle."""
        peer = self.rank ^ 1

        def ping() -> Any:
            send(peer)
            return recv(peer)

        def pong() -> Any:
            received = recv(peer)
            send(peer)
            return received

        if peer >= self.size:
            return lambda: None
        return pong if self.rank % 2 else ping

    @property
    def _ring(self) -> tuple[int, int]:
        """The ranks that this rank sends to and receives from in ``sendrecv``."""
        return (self.rank + 1) % self.size, (self.rank - 1) % self.size


_ALL = (slice(None),)


class Ours(BenchLibrary):
    """The library ``collective``, over one of its transports."""

    def __init__(self, comm: Any) -> None:
        import collective
        from collective.errors import DeviceError, DtypeError, UnsupportedError

        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.version = f"collective {collective.__version__} ({comm.backend})"
        self.refusals = (UnsupportedError, DtypeError, DeviceError)

    def new(self, count: int, memory: str, dtype: str = "float32") -> Any:
        made = super().new(count if memory == "ordinary" else 1, memory, dtype)
        if memory == "ordinary":
            return made
        symmetric = self.comm.empty(count, dtype, like=made)
        self.framework.fill(symmetric, made)
        return symmetric

    def calls(self, x: Any, y: Any) -> dict[str, Call]:
        comm = self.comm
        dst, src = self._ring
        return {
            "all_reduce": lambda: comm.all_reduce(x, out=x),
            "broadcast": lambda: comm.broadcast(x, out=x),
            "reduce": lambda: comm.reduce(x, out=y),
            "scatter": lambda: comm.scatter(x, out=y),
            "gather": lambda: comm.gather(x, out=y),
            "all_gather": lambda: comm.all_gather(x, out=y),
            "reduce_scatter": lambda: comm.reduce_scatter(x, out=y),
            "all_to_all": lambda: comm.all_to_all(x, out=y),
            "scan": lambda: comm.scan(x, out=y),
            "sendrecv": lambda: comm.sendrecv(x, dst, src, out=y),
            "send_recv": self._ping_pong(
                lambda peer: comm.send(x, peer), lambda peer: comm.recv(y, peer)
            ),
            "barrier": lambda: comm.barrier(),
        }

    def close(self) -> None:
        self.comm.close()


class Memcpy(BenchLibrary):
    """Copy of memory without communication: each rank copies its own, all at the same time."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.version = f"NumPy {np.__version__} (copyto)"

    def calls(self, x: Any, y: Any) -> dict[str, Call]:
        return {"copy": lambda: np.copyto(y, x)}

    def close(self) -> None:
        """Do nothing: there is no connection to other ranks."""

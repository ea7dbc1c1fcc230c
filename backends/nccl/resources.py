"""What a communicator has beside itself: operators of its own, and memory that it knows."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from collective.algorithms.arithmetic import float32_to_bfloat16
from collective.memory.dtypes import DType

from .enqueue import NcclCalls
from .joining import Poll
from .library import NcclLibrary
from .prototypes import SCALAR_ON_HOST, WINDOW_SYMMETRIC

if TYPE_CHECKING:
    from collective.cuda import Device

__all__ = ["Resources", "patient"]

# Factors of premul_sum that are kept; a program whose factor varies makes one a call.
_FACTORS = 60


def patient() -> None:
    """Look at nothing, and wait for as long as it takes."""


class Resources(NcclCalls):
    """A communicator's operators and memory.

    Attributes:
        device: the GPU of this rank.
    """

    def __init__(self, library: NcclLibrary, rank: int, size: int, device: Device) -> None:
        super().__init__(library, rank, size)
        self.device = device
        self._factors: dict[tuple[float, str], int] = {}

    def _living(self, name: str) -> int:
        """Return the handle, or raise what calls get once it is gone."""
        raise NotImplementedError

    def _finish(self, code: int, name: str, poll: Poll) -> None:
        """Wait for what a result code says is in progress, or raise what it says."""
        raise NotImplementedError

    def premul_sum(self, factor: float, dtype: DType) -> int:
        """Return the operator that sums ``factor * x`` (``ncclRedOpCreatePreMulSum``).

        Args:
            factor: rounded to ``dtype``.
            dtype: floating; of the arrays.
        """
        key = (factor, dtype.name)
        found = self._factors.get(key)
        if found is None:
            if len(self._factors) >= _FACTORS:
                self._forget_factor(next(iter(self._factors)))
            code = self.library.dtype(dtype)
            scalar = _scalar(factor, dtype)
            made = ctypes.c_int()
            create = self.library.function("ncclRedOpCreatePreMulSum")
            address = scalar.__array_interface__["data"][0]
            with self._lock:
                raw = self._living("premul_sum")
                result = create(ctypes.byref(made), address, code, SCALAR_ON_HOST, raw)
            self._finish(result, "ncclRedOpCreatePreMulSum", patient)
            found = self._factors[key] = made.value
        return found

    def _forget_factors(self) -> None:
        for key in list(self._factors):
            self._forget_factor(key)

    def _forget_factor(self, key: tuple[float, str]) -> None:
        op = self._factors.pop(key)
        with self._lock:
            if self._raw:
                self.library.function("ncclRedOpDestroy")(op, self._raw)

    def register(self, address: int, nbytes: int) -> int:
        """Let NCCL use memory without copies (``ncclCommRegister``); return a handle."""
        return self._written("ncclCommRegister", patient, address, nbytes)

    def deregister(self, handle: int) -> None:
        """Take back :meth:`register`; nothing if the communicator is gone."""
        self._released("ncclCommDeregister", handle)

    def window(self, address: int, nbytes: int, poll: Poll = patient) -> int:
        """Register memory that all ranks have alike (``ncclCommWindowRegister``).

        Collective: every rank, with as many bytes, of :meth:`mem_alloc`.

        Args:
            poll: as for :meth:`create`.

        Returns:
            A handle for :meth:`close_window`.
        """
        return self._written("ncclCommWindowRegister", poll, address, nbytes, WINDOW_SYMMETRIC)

    def close_window(self, handle: int) -> None:
        """Take back :meth:`window`; nothing if the communicator is gone."""
        self._released("ncclCommWindowDeregister", handle)

    def _written(self, name: str, poll: Poll, address: int, nbytes: int, *flags: int) -> int:
        function = self.library.function(name)
        handle = ctypes.c_void_p()
        with self.device.active(), self._lock:
            code = function(self._living(name), address, nbytes, ctypes.byref(handle), *flags)
        self._finish(code, name, poll)
        return handle.value or 0

    def _released(self, name: str, handle: int) -> None:
        with self.device.active(), self._lock:
            if not self._raw:
                return
            code = self.library.function(name)(self._raw, handle)
        self._finish(code, name, patient)

    def mem_alloc(self, nbytes: int) -> int:
        """Return the address of memory that NCCL can register best (``ncclMemAlloc``)."""
        address = ctypes.c_void_p()
        with self.device.active():
            code = self.library.function("ncclMemAlloc")(ctypes.byref(address), nbytes)
        self.library.check(code, f"ncclMemAlloc of {nbytes} bytes on cuda:{self.device.ordinal}")
        return address.value or 0

    def mem_free(self, address: int) -> None:
        """Free what :meth:`mem_alloc` returned, also after the communicator is gone."""
        with self.device.active():
            code = self.library.function("ncclMemFree")(address)
        self.library.check(code, f"ncclMemFree on cuda:{self.device.ordinal}")


def _scalar(factor: float, dtype: DType) -> np.ndarray[Any, Any]:
    """Return one element of ``dtype``, as its bits are in memory."""
    if dtype.name == "bfloat16":
        return float32_to_bfloat16(np.array([factor], np.float32))
    return np.array([factor], dtype.storage)

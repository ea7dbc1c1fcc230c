"""NCCL's operations on one communicator, as calls with plain integers.

Pointers, streams and NCCL's codes are ints; counts are numbers of elements. A call returns once the
operation is on its stream. In a group no operation starts before the group's end, and the result of
the end counts.

All-to-all, gather and scatter are grouped messages. The methods with ``_v`` take one count per
rank.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from collective.algorithms.arithmetic import float32_to_bfloat16
from collective.memory.dtypes import DType

from .library import NcclLibrary
from .prototypes import ITEMSIZES, SCALAR_ON_HOST, WINDOW_SYMMETRIC

if TYPE_CHECKING:
    from collective.cuda import Device

#: Function that checks the deadline and the ranks' health, and raises to give up.
Poll = Callable[[], None]

# Number of premul_sum operators that are cached. A program whose factor varies makes one per call.
_FACTORS = 60


def patient() -> None:
    """Check nothing: the poll function of waits without a deadline."""


class NcclCalls:
    """Operations that a communicator enqueues; :class:`~.engine.NcclComm` creates and frees it.

    Attributes:
        library: the NCCL library of the communicator.
        rank: this rank in the communicator.
        size: number of ranks of the communicator.
        device: the GPU of this rank.
    """

    def __init__(self, library: NcclLibrary, rank: int, size: int, device: Device) -> None:
        self.library = library
        self.rank = rank
        self.size = size
        self.device = device
        self._factors: dict[tuple[str, str], int] = {}
        # The communicator's handle: 0 before it is made and after it is gone.
        self._raw = 0
        self._depth = 0
        # The thread that frees the communicator first sets the handle to 0. Then it waits until no
        # call is inside NCCL with the old handle. A call sets _inside before it reads the handle,
        # which costs less than a lock. In a group, a call counts as inside until the group has
        # ended. Rarer calls hold the lock instead.
        self._inside = 0
        self._lock = threading.RLock()
        self._group_start = library.function("ncclGroupStart")
        self._group_end = library.function("ncclGroupEnd")
        self._all_reduce = library.function("ncclAllReduce")
        self._broadcast = library.function("ncclBroadcast")
        self._reduce = library.function("ncclReduce")
        self._reduce_scatter = library.function("ncclReduceScatter")
        self._all_gather = library.function("ncclAllGather")
        self._send = library.function("ncclSend")
        self._recv = library.function("ncclRecv")

    def _refuse(self, code: int, name: str) -> None:
        """Raise the error of a call that a result code other than success means."""
        raise NotImplementedError

    def _living(self, name: str) -> int:
        """Return the handle; raise if the communicator is gone.

        Args:
            name: the call, for the error.
        """
        raise NotImplementedError

    def _finish(self, code: int, name: str, poll: Poll) -> None:
        """Wait for the end of a call that is in progress; raise if its result code is an error."""
        raise NotImplementedError

    def group(self) -> CallGroup:
        """Return a context manager: the calls in its body start together when the body ends."""
        return CallGroup(self)

    def group_start(self) -> None:
        """Begin a group without a ``with`` body; the caller must call :meth:`group_end` later."""
        self._depth += 1
        self._inside = self._depth
        code = self._group_start()
        if code:
            self._leave_group()
            self._refuse(code, "ncclGroupStart")

    def group_end(self) -> None:
        """Start the calls since :meth:`group_start`."""
        code = self._group_end()
        self._leave_group()
        if code:
            self._refuse(code, "ncclGroupEnd")

    def _leave_group(self) -> None:
        self._depth -= 1
        self._inside = self._depth

    # -- one NCCL call each, with no layer between: every microsecond adds to the latency -------

    def all_reduce(self, src: int, dst: int, count: int, dtype: int, op: int, stream: int) -> None:
        """Fold ``count`` elements of all ranks' ``src`` into every ``dst``."""
        self._inside = 1
        code = self._all_reduce(src, dst, count, dtype, op, self._raw, stream)
        self._inside = self._depth
        if code:
            self._refuse(code, "ncclAllReduce")

    def broadcast(self, src: int, dst: int, count: int, dtype: int, root: int, stream: int) -> None:
        """Copy ``src`` of ``root`` into every ``dst``."""
        self._inside = 1
        code = self._broadcast(src, dst, count, dtype, root, self._raw, stream)
        self._inside = self._depth
        if code:
            self._refuse(code, "ncclBroadcast")

    def reduce(
        self, src: int, dst: int, count: int, dtype: int, op: int, root: int, stream: int
    ) -> None:
        """Fold all ranks' ``src`` into ``dst`` of ``root``; elsewhere ``dst`` may be 0."""
        self._inside = 1
        code = self._reduce(src, dst, count, dtype, op, root, self._raw, stream)
        self._inside = self._depth
        if code:
            self._refuse(code, "ncclReduce")

    def reduce_scatter(
        self, src: int, dst: int, count: int, dtype: int, op: int, stream: int
    ) -> None:
        """Fold all ranks' ``src`` of ``size * count`` elements; put part ``rank`` into ``dst``."""
        self._inside = 1
        code = self._reduce_scatter(src, dst, count, dtype, op, self._raw, stream)
        self._inside = self._depth
        if code:
            self._refuse(code, "ncclReduceScatter")

    def all_gather(self, src: int, dst: int, count: int, dtype: int, stream: int) -> None:
        """Concatenate all ranks' ``src`` of ``count`` elements in every ``dst``."""
        self._inside = 1
        code = self._all_gather(src, dst, count, dtype, self._raw, stream)
        self._inside = self._depth
        if code:
            self._refuse(code, "ncclAllGather")

    def send(self, src: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Send ``src`` to rank ``peer``."""
        self._inside = 1
        code = self._send(src, count, dtype, peer, self._raw, stream)
        self._inside = self._depth
        if code:
            self._refuse(code, "ncclSend")

    def recv(self, dst: int, count: int, dtype: int, peer: int, stream: int) -> None:
        """Receive ``dst`` from rank ``peer``."""
        self._inside = 1
        code = self._recv(dst, count, dtype, peer, self._raw, stream)
        self._inside = self._depth
        if code:
            self._refuse(code, "ncclRecv")

    # -- with one count per rank: groups ----------------------------------------------------

    def all_gather_v(
        self, src: int, dst: int, counts: Sequence[int], dtype: int, stream: int
    ) -> None:
        """Concatenate all ranks' ``src``, of ``counts[rank]`` elements, in every ``dst``."""
        with self.group():
            for rank, start, count in _parts(dst, counts, dtype):
                self.broadcast(
                    src if rank == self.rank else start, start, count, dtype, rank, stream
                )

    def reduce_scatter_v(
        self, src: int, dst: int, counts: Sequence[int], dtype: int, op: int, stream: int
    ) -> None:
        """Fold all ranks' ``src`` of ``sum(counts)`` elements; put part ``rank`` into ``dst``."""
        with self.group():
            for rank, start, count in _parts(src, counts, dtype):
                own = dst if rank == self.rank else 0
                self.reduce(start, own, count, dtype, op, rank, stream)

    def all_to_all_v(
        self,
        src: int,
        send_counts: Sequence[int],
        dst: int,
        recv_counts: Sequence[int],
        dtype: int,
        stream: int,
    ) -> None:
        """Send part ``j`` of ``src`` to rank ``j``; concatenate what arrives in ``dst``."""
        with self.group():
            for rank, start, count in _parts(src, send_counts, dtype):
                self.send(start, count, dtype, rank, stream)
            for rank, start, count in _parts(dst, recv_counts, dtype):
                self.recv(start, count, dtype, rank, stream)

    def gather_v(
        self, src: int, dst: int, counts: Sequence[int], dtype: int, root: int, stream: int
    ) -> None:
        """Concatenate all ranks' ``src``, of ``counts[rank]`` elements, in ``dst`` of ``root``."""
        with self.group():
            parts = list(_parts(dst, counts, dtype)) if self.rank == root else []
            own = next((start for rank, start, _ in parts if rank == root), 0)
            if own != src and counts[self.rank]:
                self.send(src, counts[self.rank], dtype, root, stream)
            for rank, start, count in parts:
                if start != src or rank != root:  # else in place: the data is there already
                    self.recv(start, count, dtype, rank, stream)

    def scatter_v(
        self, src: int, dst: int, counts: Sequence[int], dtype: int, root: int, stream: int
    ) -> None:
        """Send part ``j`` of the root's ``src``, ``counts[j]`` elements, to rank ``j``."""
        with self.group():
            parts = list(_parts(src, counts, dtype)) if self.rank == root else []
            own = next((start for rank, start, _ in parts if rank == root), 0)
            for rank, start, count in parts:
                if start != dst or rank != root:  # else in place: the data is there already
                    self.send(start, count, dtype, rank, stream)
            if own != dst and counts[self.rank]:
                self.recv(dst, counts[self.rank], dtype, root, stream)

    # -- NCCL's operators and memory ---------------------------------------------------------

    def premul_sum(self, factor: float, dtype: DType) -> int:
        """Return the operator that sums ``factor * x`` (``ncclRedOpCreatePreMulSum``).

        Args:
            factor: the factor, which is rounded to ``dtype``.
            dtype: dtype of the arrays, a floating-point type.
        """
        key = (float(factor).hex(), dtype.name)  # -0.0 == 0.0, but their products have other signs
        op = self._factors.get(key)
        if op is None:
            if len(self._factors) >= _FACTORS:
                self._forget_factor(next(iter(self._factors)))
            code = self.library.dtype(dtype)
            scalar = _scalar(factor, dtype)
            created = ctypes.c_int()
            create = self.library.function("ncclRedOpCreatePreMulSum")
            address = scalar.__array_interface__["data"][0]
            with self._lock:
                raw = self._living("premul_sum")
                result = create(ctypes.byref(created), address, code, SCALAR_ON_HOST, raw)
            self._finish(result, "ncclRedOpCreatePreMulSum", patient)
            op = self._factors[key] = created.value
        return op

    def _forget_factors(self) -> None:
        for key in list(self._factors):
            self._forget_factor(key)

    def _forget_factor(self, key: tuple[str, str]) -> None:
        op = self._factors.pop(key)
        with self._lock:
            if self._raw:
                self.library.function("ncclRedOpDestroy")(op, self._raw)

    def register(self, address: int, nbytes: int) -> int:
        """Let NCCL use memory without copies (``ncclCommRegister``); return a handle."""
        return self._written("ncclCommRegister", patient, address, nbytes)

    def deregister(self, handle: int) -> None:
        """Undo :meth:`register`; do nothing if the communicator is gone."""
        self._released("ncclCommDeregister", handle)

    def window(self, address: int, nbytes: int, poll: Poll = patient) -> int:
        """Register memory of all ranks as one window (``ncclCommWindowRegister``).

        Collective: every rank, with the same number of bytes, from :meth:`mem_alloc`.

        Args:
            poll: as for :meth:`create`.

        Returns:
            A handle for :meth:`close_window`.
        """
        return self._written("ncclCommWindowRegister", poll, address, nbytes, WINDOW_SYMMETRIC)

    def close_window(self, handle: int) -> None:
        """Undo :meth:`window`; do nothing if the communicator is gone."""
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
        """Free memory from :meth:`mem_alloc`, also after the communicator is gone."""
        with self.device.active():
            code = self.library.function("ncclMemFree")(address)
        self.library.check(code, f"ncclMemFree on cuda:{self.device.ordinal}")


def _scalar(factor: float, dtype: DType) -> np.ndarray[Any, Any]:
    """Return an array with one element: the bits of ``factor`` in ``dtype``."""
    if dtype.name == "bfloat16":
        return float32_to_bfloat16(np.array([factor], np.float32))
    return np.array([factor], dtype.storage)


def _parts(start: int, counts: Sequence[int], dtype: int) -> Iterator[tuple[int, int, int]]:
    """Yield rank, address and count of each part that is not empty."""
    itemsize = ITEMSIZES[dtype]
    for rank, count in enumerate(counts):
        if count:
            yield rank, start, count
        start += count * itemsize


class CallGroup:
    """Context manager whose calls start together at the end of its body.

    If the body raises, the calls made before start nevertheless, since NCCL cannot take them
    back. The other ranks may then wait for the missing calls, so the caller must abort the
    communicator.
    """

    __slots__ = ("_comm",)

    def __init__(self, comm: NcclCalls) -> None:
        self._comm = comm

    def __enter__(self) -> CallGroup:
        self._comm.group_start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        comm = self._comm
        code = comm._group_end()
        comm._leave_group()
        if code and kind is None:
            comm._refuse(code, "ncclGroupEnd")

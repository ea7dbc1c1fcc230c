"""``mpi`` on a library that takes addresses in the memory of GPUs.

MPI knows no streams: it may read a buffer when the stream is done that last wrote to it, and
what it has written is there when its call returns. What needs arithmetic of ours goes through
host memory, as everything does where the library is not CUDA-aware.

MPI gets an address and a length, and is not asked to find them out: through DLPack that takes
mpi4py 9 µs for each array, through ``__cuda_array_interface__`` 2, with an address 0.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from collective.algorithms import arithmetic
from collective.deadline import Deadline
from collective.memory.buffer import Buffer
from collective.memory.device_array import DeviceArray
from collective.memory.dtypes import BY_NAME
from collective.request import Disagreement

from .folds import mpi_op
from .library import leave_unfinished
from .transport import MpiTransport

if TYPE_CHECKING:
    from collective.contract.backend import Plan
    from collective.memory.dtypes import DType
    from collective.ops import ReduceOp
    from collective.request import Request

__all__ = ["CudaAwareMpi"]

_UINT8 = BY_NAME["uint8"]


def _on_gpu(buffer: Any) -> bool:
    """Whether an argument is a buffer in the memory of a GPU."""
    return type(buffer) is Buffer and type(buffer.array) is not np.ndarray


class CudaAwareMpi(MpiTransport):
    """Ranks of an MPI communicator, for arrays of the CPU and of GPUs.

    Some ranks may have this class and others the plain one: where an array is, is each rank's
    own affair.
    """

    capabilities = replace(MpiTransport.capabilities, devices=frozenset({"cpu", "cuda"}))

    def supports(self, what: str, op: ReduceOp, dtype: DType, ordered: bool) -> bool:
        if mpi_op(self._mpi, op, dtype, self.unlike) is None:
            return False
        # Of floats MPI may fold in any order.
        if (ordered or what == "scan") and dtype.kind not in "biu":
            return False
        # Rank 0's result of a scan is of one rank, and ranks have to say the same.
        size = 1 if what == "scan" else self.size
        return arithmetic.pre(op, dtype, size) is None and arithmetic.post(op, dtype, size) is None

    def plan(self, request: Request) -> Plan:
        plan = super().plan(request)
        if request.operation == "barrier":
            return plan
        if request.op is not None:
            return partial(self._folding, plan)
        return partial(self._scattering if request.operation == "scatter" else self._moving, plan)

    def _moving(
        self, plan: Plan, src: Buffer | None, dst: Buffer | None, deadline: Deadline
    ) -> None:
        with self._turn(src, dst):
            plan(src, dst, deadline)

    def _scattering(self, plan: Plan, src: Buffer | None, dst: Buffer, deadline: Deadline) -> None:
        if src is None or not _on_gpu(src) or _on_gpu(dst):
            self._moving(plan, src, dst, deadline)
            return
        # The root's own piece is to be on the host: no copy of the algorithms' goes there.
        piece = Buffer.empty(dst.count, dst.dtype, src.array)
        self._moving(plan, src, piece, deadline)
        array: Any = piece.array
        array.to_host(dst.array)

    def _folding(self, plan: Plan, src: Buffer, dst: Buffer | None, deadline: Deadline) -> None:
        """Fold; through the host where the elements are too many for a call of MPI.

        It is then made of messages and of arithmetic of ours.
        """
        if src.count <= self._most or not _on_gpu(src):
            self._moving(plan, src, dst, deadline)
            return
        given: Any = src.array
        out: Any = None if dst is None else dst.array
        room = None if dst is None else Buffer.empty(dst.count, dst.dtype)
        plan(Buffer(given.to_host(), src.dtype), room, deadline)
        if room is not None:
            out.fill_from_host(room.array)

    def send(self, src: Buffer, dst: int, tag: int, deadline: Deadline) -> None:
        with self._turn(src):
            super().send(self._bytes(src), dst, tag, deadline)

    def recv(self, dst: Buffer, src: int, tag: int, deadline: Deadline) -> int:
        with self._turn(dst):
            return super().recv(self._bytes(dst), src, tag, deadline)

    def sendrecv(
        self, src: Buffer, to: int, dst: Buffer, source: int, tag: int, deadline: Deadline
    ) -> None:
        with self._turn(src, dst):
            super().sendrecv(self._bytes(src), to, self._bytes(dst), source, tag, deadline)

    @contextmanager
    def _turn(self, *buffers: Buffer | None) -> Iterator[None]:
        """Wait for the streams of the buffers on GPUs, and make their GPU's context current.

        It is waited for them before it is waited for the peers: who is late because of its GPU is
        late there, where it is named, and not in the middle of an operation of MPI's.
        """
        arrays: list[Any] = [each.array for each in buffers if each is not None and _on_gpu(each)]
        if not arrays:
            yield
            return
        for stream in {array.effective_stream for array in arrays}:
            stream.synchronize()
        # In a thread of ours no context is current yet, and MPI copies in the one that is.
        with arrays[0].device.active():
            try:
                yield
            except Disagreement:
                raise  # nothing has been moved
            except BaseException:
                # MPI may still use the memory, and holds nothing but its address.
                leave_unfinished(arrays)
                raise

    # -- arguments for MPI ----------------------------------------------------------------

    def _move(
        self, how: int, request: Request, deadline: Deadline, name: str, *arguments: Any
    ) -> None:
        super()._move(how, request, deadline, name, *map(self._addressed, arguments))

    def _addressed(self, argument: Any) -> Any:
        """Return an argument for mpi4py with the address in the place of an array on a GPU."""
        if type(argument) is not tuple or type(argument[0]) is not DeviceArray:
            return argument
        array = argument[0]
        # Memory that was made since the call began is there in its stream's order.
        array.effective_stream.synchronize()
        return self._mpi.buffer.fromaddress(array.address, array.nbytes), *argument[1:]

    def _bytes(self, argument: Any) -> Any:
        """Return a message's buffer as bytes at an address, which only MPI may touch."""
        if not _on_gpu(argument):
            return argument
        if not argument.nbytes:
            return Buffer.empty(0, _UINT8)
        memory = self._mpi.buffer.fromaddress(argument.address, argument.nbytes)
        return Buffer(np.frombuffer(memory, np.uint8), _UINT8)

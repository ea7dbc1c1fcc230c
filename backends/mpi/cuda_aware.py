"""``mpi`` on a library that takes addresses in the memory of GPUs.

MPI knows no streams. It may read a buffer once the stream that last wrote to the buffer is done,
and the data that MPI writes is there when its call returns. Operations that need this library's
arithmetic go through host memory, as all operations do where the MPI library is not CUDA-aware.

MPI gets an address and a length, so that mpi4py need not find them out. For each array mpi4py takes
9 µs through DLPack, 2 µs through ``__cuda_array_interface__``, and 0.3 µs with an address.
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

_UINT8 = BY_NAME["uint8"]


def _on_gpu(buffer: Any) -> bool:
    """Return whether an argument is a buffer in the memory of a GPU."""
    return type(buffer) is Buffer and type(buffer.array) is not np.ndarray


class CudaAwareMpi(MpiTransport):
    """Ranks of an MPI communicator, for arrays of the CPU and of GPUs.

    Some ranks may use this class and others the plain one: each rank decides for itself where its
    arrays are.
    """

    capabilities = replace(MpiTransport.capabilities, devices=frozenset({"cpu", "cuda"}))

    def supports(self, what: str, op: ReduceOp, dtype: DType, ordered: bool) -> bool:
        if mpi_op(self._mpi, op, dtype, self.unlike) is None:
            return False
        # MPI may reduce floats in any order.
        if (ordered or what == "scan") and dtype.kind not in "biu":
            return False
        # Rank 0's result of a scan has one contribution, and all ranks must return the same answer.
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
        # The root's own piece has to end up on the host, and the algorithms cannot copy from a GPU
        # to the host. So the piece goes to other memory on the GPU first.
        piece = Buffer.empty(dst.count, dst.dtype, src.array)
        self._moving(plan, src, piece, deadline)
        array: Any = piece.array
        array.to_host(dst.array)

    def _folding(self, plan: Plan, src: Buffer, dst: Buffer | None, deadline: Deadline) -> None:
        """Reduce; go through host memory if one call of MPI cannot take that many elements.

        Such a reduction consists of messages and of this library's arithmetic.
        """
        if src.count <= self._most or not _on_gpu(src):
            self._moving(plan, src, dst, deadline)
            return
        source: Any = src.array
        out: Any = None if dst is None else dst.array
        room = None if dst is None else Buffer.empty(dst.count, dst.dtype)
        plan(Buffer(source.to_host(), src.dtype), room, deadline)
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

        The wait for the streams comes before the wait for the peers. So if a rank is late because
        of its GPU, its peers wait at the arrival, where an error can name the late rank. They do
        not wait in the middle of an operation of MPI.
        """
        arrays: list[Any] = [
            buffer.array for buffer in buffers if buffer is not None and _on_gpu(buffer)
        ]
        if not arrays:
            yield
            return
        for stream in {array.effective_stream for array in arrays}:
            stream.synchronize()
        # MPI copies in the current context, and a thread of this library has no context at first.
        with arrays[0].device.active():
            try:
                yield
            except Disagreement:
                raise  # nothing has been moved
            except BaseException:
                # MPI may still use the memory, but it holds only the address.
                leave_unfinished(arrays)
                raise

    # -- arguments for MPI ----------------------------------------------------------------

    def _move(
        self, how: int, request: Request, deadline: Deadline, name: str, *arguments: Any
    ) -> None:
        super()._move(how, request, deadline, name, *map(self._addressed, arguments))

    def _addressed(self, argument: Any) -> Any:
        """Return an argument for mpi4py with an address in place of an array on a GPU."""
        if type(argument) is not tuple or type(argument[0]) is not DeviceArray:
            return argument
        array = argument[0]
        # Memory that was allocated since the call began exists only in its stream's order.
        array.effective_stream.synchronize()
        return self._mpi.buffer.fromaddress(array.address, array.nbytes), *argument[1:]

    def _bytes(self, argument: Any) -> Any:
        """Return a message's buffer as bytes at an address; only MPI may access these bytes."""
        if not _on_gpu(argument):
            return argument
        if not argument.nbytes:
            return Buffer.empty(0, _UINT8)
        memory = self._mpi.buffer.fromaddress(argument.address, argument.nbytes)
        return Buffer(np.frombuffer(memory, np.uint8), _UINT8)

"""The collectives: what is in the host's memory goes to the host plane, the rest to NCCL.

A buffer of a GPU is used on its stream, and the method returns when NCCL has put the operation
there. What is moved is moved as bytes. Reductions are NCCL's own where it has the operator and
the type; ``supports()`` says which those are, and the communicator takes the others through
host memory. Two things differ from what CPUs do: folds are in NCCL's order, never in rank
order; and ``min`` and ``max`` of floats may lose NaN, since NCCL folds them with fminf and
fmaxf and their like, which return the operand that is a number (``docs/nccl.md``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from collective.contract.backend import Backend
from collective.errors import UnsupportedError
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME, DType

from .prototypes import DTYPES, OPS

if TYPE_CHECKING:
    from collective.contract.work import Work
    from collective.ops import ReduceOp
    from collective.request import Request

    from .engine import NcclComm
    from .library import Library

__all__ = ["Collectives"]

_BYTE = DTYPES["uint8"]
# Of the types of 8 bits factors are not tried: NCCL wants them rounded to the type.
_SCALED = frozenset({"float16", "bfloat16", "float32", "float64"})
_REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter"})
_ndarray = np.ndarray


class Collectives(Backend):
    """The collectives of the transport; see the module's docstring.

    Attributes:
        _host: the host plane.
        _comm: NCCL's communicator, None before the first buffer of a GPU.
    """

    _host: Backend
    _comm: NcclComm | None

    def __init__(self) -> None:
        # NCCL's codes for the dtype and the operator, of what it can reduce: of any version
        # first, then of the one that is there.
        self._codes: dict[tuple[str, DType], tuple[int, int]] = {
            (op, BY_NAME[dtype]): (number, code)
            for op, code in OPS.items()
            for dtype, number in DTYPES.items()
        }
        self._scales = True

    def _learn(self, library: Library) -> None:
        """Take note of what the version of NCCL that is there can reduce."""
        for key in list(self._codes):
            code, number = library.op(key[0]), library.dtype(key[1])
            if code is None or number is None:
                del self._codes[key]
        self._scales = library.has("ncclRedOpCreatePreMulSum")

    def supports(self, what: str, op: ReduceOp, dtype: DType, ordered: bool) -> bool:
        # The same on all ranks, since their versions are.
        if ordered or what not in _REDUCTIONS:
            return False
        if self._comm is None:
            self._look_ahead()
        if op.factor is not None:
            return self._scales and dtype.name in _SCALED and ("sum", dtype) in self._codes
        return (op.name, dtype) in self._codes

    def _reduction(
        self, op: ReduceOp, dtype: DType, request: Request, timeout: float
    ) -> tuple[int, int]:
        """Return NCCL's codes for what is not a plain operator, or refuse it."""
        if not self.supports("reduce", op, dtype, False):
            raise UnsupportedError(
                f"{request}: NCCL does not reduce {dtype} with {op} [rank {self.rank} of "
                f"{self.size}]. Call it on a communicator, which goes through the host's memory."
            )
        comm = self._comm or self._open(request, timeout)
        return DTYPES[dtype.name], comm.premul_sum(op.factor or 0.0, dtype)

    @abstractmethod
    def _look_ahead(self) -> None:
        """Take note of what this rank's NCCL can reduce, before there is a communicator."""

    @abstractmethod
    def _open(self, call: object, timeout: float) -> NcclComm:
        """Make NCCL's communicator, all ranks together."""

    @abstractmethod
    def _enqueue(
        self, array: Any, request: Request, timeout: float, function: Any, *args: Any
    ) -> None:
        """Call ``function(*args, stream)`` of NCCL's, and look after what it enqueues."""

    # -- the host's alone -----------------------------------------------------------------

    def agree(self, request: Request, timeout: float) -> None:
        self._host.agree(request, timeout)

    def barrier(self, request: Request, timeout: float) -> Work[Any] | None:
        """Return when every rank has called it. It does not wait for work on the GPUs."""
        return self._host.barrier(request, timeout)

    def scan(
        self, src: Buffer, dst: Buffer, op: ReduceOp, request: Request, timeout: float
    ) -> Work[Any] | None:
        if not isinstance(src.array, _ndarray):
            raise UnsupportedError(
                f"{request}: NCCL has no scan [rank {self.rank} of {self.size}]. Call it on a "
                "communicator, which goes through the host's memory."
            )
        return self._host.scan(src, dst, op, request, timeout)

    # -- reductions -----------------------------------------------------------------------

    def all_reduce(
        self,
        src: Buffer,
        dst: Buffer,
        op: ReduceOp,
        ordered: bool,
        request: Request,
        timeout: float,
    ) -> Work[Any] | None:
        array: Any = src.array
        if isinstance(array, _ndarray):
            return self._host.all_reduce(src, dst, op, ordered, request, timeout)
        comm = self._comm or self._open(request, timeout)
        codes = self._codes.get((op.name, src.dtype))
        dtype, code = codes or self._reduction(op, src.dtype, request, timeout)
        if src.count:
            to: Any = dst.array
            self._enqueue(
                array, request, timeout,
                comm.all_reduce, array.address, to.address, src.count, dtype, code,
            )  # fmt: skip
        return None

    def reduce(
        self,
        src: Buffer,
        dst: Buffer | None,
        op: ReduceOp,
        root: int,
        ordered: bool,
        request: Request,
        timeout: float,
    ) -> Work[Any] | None:
        array: Any = src.array
        if isinstance(array, _ndarray):
            return self._host.reduce(src, dst, op, root, ordered, request, timeout)
        comm = self._comm or self._open(request, timeout)
        codes = self._codes.get((op.name, src.dtype))
        dtype, code = codes or self._reduction(op, src.dtype, request, timeout)
        if src.count:
            to = 0 if dst is None else dst.address
            self._enqueue(
                array, request, timeout,
                comm.reduce, array.address, to, src.count, dtype, code, root,
            )  # fmt: skip
        return None

    def reduce_scatter(
        self,
        src: Buffer,
        dst: Buffer,
        counts: Sequence[int],
        op: ReduceOp,
        ordered: bool,
        request: Request,
        timeout: float,
    ) -> Work[Any] | None:
        array: Any = src.array
        if isinstance(array, _ndarray):
            return self._host.reduce_scatter(src, dst, counts, op, ordered, request, timeout)
        comm = self._comm or self._open(request, timeout)
        codes = self._codes.get((op.name, src.dtype))
        dtype, code = codes or self._reduction(op, src.dtype, request, timeout)
        if not src.count:
            return None
        to: Any = dst.array
        if _even(counts):
            self._enqueue(
                array, request, timeout,
                comm.reduce_scatter, array.address, to.address, counts[0], dtype, code,
            )  # fmt: skip
        else:
            self._enqueue(
                array, request, timeout,
                comm.reduce_scatter_v, array.address, to.address, counts, dtype, code,
            )  # fmt: skip
        return None

    # -- moves ----------------------------------------------------------------------------

    def broadcast(
        self, buffer: Buffer, root: int, request: Request, timeout: float
    ) -> Work[Any] | None:
        array: Any = buffer.array
        if isinstance(array, _ndarray):
            return self._host.broadcast(buffer, root, request, timeout)
        comm, nbytes = self._comm or self._open(request, timeout), array.nbytes
        if nbytes:
            at = array.address
            self._enqueue(array, request, timeout, comm.broadcast, at, at, nbytes, _BYTE, root)
        return None

    def scatter(
        self,
        src: Buffer | None,
        dst: Buffer,
        counts: Sequence[int],
        root: int,
        request: Request,
        timeout: float,
    ) -> Work[Any] | None:
        array: Any = dst.array
        if isinstance(array, _ndarray):
            return self._host.scatter(src, dst, counts, root, request, timeout)
        comm = self._comm or self._open(request, timeout)
        lengths = _in_bytes(counts, dst.dtype)
        if not any(lengths):
            return None
        start, to = 0 if src is None else src.address, array.address
        if _even(lengths):
            self._enqueue(
                array, request, timeout, comm.scatter, start, to, lengths[0], _BYTE, root
            )  # fmt: skip
        else:
            self._enqueue(array, request, timeout, comm.scatter_v, start, to, lengths, _BYTE, root)
        return None

    def gather(
        self,
        src: Buffer,
        dst: Buffer | None,
        counts: Sequence[int],
        root: int,
        request: Request,
        timeout: float,
    ) -> Work[Any] | None:
        array: Any = src.array
        if isinstance(array, _ndarray):
            return self._host.gather(src, dst, counts, root, request, timeout)
        comm = self._comm or self._open(request, timeout)
        lengths = _in_bytes(counts, src.dtype)
        if not any(lengths):
            return None
        start, to = array.address, 0 if dst is None else dst.address
        if _even(lengths):
            self._enqueue(array, request, timeout, comm.gather, start, to, lengths[0], _BYTE, root)
        else:
            self._enqueue(array, request, timeout, comm.gather_v, start, to, lengths, _BYTE, root)
        return None

    def all_gather(
        self, src: Buffer, dst: Buffer, counts: Sequence[int], request: Request, timeout: float
    ) -> Work[Any] | None:
        array: Any = src.array
        if isinstance(array, _ndarray):
            return self._host.all_gather(src, dst, counts, request, timeout)
        comm = self._comm or self._open(request, timeout)
        lengths = _in_bytes(counts, src.dtype)
        if not any(lengths):
            return None
        to: Any = dst.array
        if _even(lengths):
            self._enqueue(
                array, request, timeout,
                comm.all_gather, array.address, to.address, lengths[0], _BYTE,
            )  # fmt: skip
        else:
            self._enqueue(
                array, request, timeout,
                comm.all_gather_v, array.address, to.address, lengths, _BYTE,
            )  # fmt: skip
        return None

    def all_to_all(
        self,
        src: Buffer,
        dst: Buffer,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        request: Request,
        timeout: float,
    ) -> Work[Any] | None:
        array: Any = src.array
        if isinstance(array, _ndarray):
            return self._host.all_to_all(src, dst, send_counts, recv_counts, request, timeout)
        comm = self._comm or self._open(request, timeout)
        sends, receives = (_in_bytes(counts, src.dtype) for counts in (send_counts, recv_counts))
        to: Any = dst.array
        if request.shape is not None and _even(sends):
            if sends[0]:
                self._enqueue(
                    array, request, timeout,
                    comm.all_to_all, array.address, to.address, sends[0], _BYTE,
                )  # fmt: skip
        elif any(sends) or any(receives):
            self._enqueue(
                array, request, timeout,
                comm.all_to_all_v, array.address, sends, to.address, receives, _BYTE,
            )  # fmt: skip
        return None


def _even(counts: Sequence[int]) -> bool:
    return counts.count(counts[0]) == len(counts)


def _in_bytes(counts: Sequence[int], dtype: DType) -> list[int]:
    itemsize = dtype.itemsize
    return [count * itemsize for count in counts]

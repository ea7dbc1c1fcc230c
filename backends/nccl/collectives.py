"""Collectives: the host plane handles buffers in the host's memory, NCCL those of a GPU.

A method uses a GPU's buffer on the buffer's stream, and returns when NCCL has enqueued the
operation there. Operations that only move data move bytes. NCCL does a reduction itself if it has
the operator and the dtype; ``supports()`` returns whether it does. The communicator does other
reductions through host memory.

Two things differ from CPUs. Folds are in NCCL's order, never in rank order. And ``min`` and
``max`` of floats may lose NaN: NCCL folds them with functions like fminf and fmaxf, which return
the operand that is a number (``docs/nccl.md``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from collective.contract.backend import Backend
from collective.deadline import Deadline
from collective.errors import UnsupportedError
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME, DType

from .prototypes import DTYPES, OPS

if TYPE_CHECKING:
    from collective.contract.backend import Plan
    from collective.contract.work import Work
    from collective.ops import ReduceOp
    from collective.request import Request

    from .engine import NcclComm
    from .library import NcclLibrary

_BYTE = DTYPES["uint8"]
# The dtypes for premul_sum. The types of 8 bits are not among them: NCCL needs the factor rounded
# to the type.
_SCALED = frozenset({"float16", "bfloat16", "float32", "float64"})
_REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter"})
# The operations whose plan knows whether the pieces of all ranks are equally long.
_PIECES = frozenset({"reduce_scatter", "all_gather"})
_ndarray = np.ndarray


class NcclCollectives(Backend):
    """Collectives of the transport; see the module's docstring.

    Attributes:
        _host: the host plane.
        _comm: NCCL's communicator, None before the first buffer of a GPU.
    """

    _host: Backend
    _comm: NcclComm | None

    def __init__(self) -> None:
        # NCCL's codes (dtype, operator) for each reduction that NCCL can do. At first these are the
        # reductions of any version; _learn() removes those that the installed version lacks.
        self._codes: dict[tuple[str, DType], tuple[int, int]] = {
            (op, BY_NAME[dtype]): (number, code)
            for op, code in OPS.items()
            for dtype, number in DTYPES.items()
        }

    def _learn(self, library: NcclLibrary) -> None:
        """Record which reductions the installed version of NCCL can do."""
        for key in list(self._codes):
            if library.dtype(key[1]) is None:
                del self._codes[key]

    def supports(self, what: str, op: ReduceOp, dtype: DType, ordered: bool) -> bool:
        # The result is the same on all ranks, because all ranks have the same version of NCCL.
        if ordered or what not in _REDUCTIONS:
            return False
        if self._comm is None:
            self._look_ahead()
        if op.factor is not None:
            return dtype.name in _SCALED and ("sum", dtype) in self._codes
        return (op.name, dtype) in self._codes

    def _reduction(self, request: Request, deadline: Deadline) -> tuple[int, int]:
        """Return NCCL's codes for a request whose operator is not plain.

        Raises:
            UnsupportedError: NCCL cannot do the reduction.
        """
        op, dtype = request.op, request.dtype
        assert dtype is not None
        if not self.supports("reduce", op, dtype, False):
            raise UnsupportedError(
                f"{request}: NCCL does not reduce {dtype} with {op} [rank {self.rank} of "
                f"{self.size}]. Call it on a communicator, which uses the host's memory instead."
            )
        comm = self._comm or self._open(request, deadline)
        return DTYPES[dtype.name], comm.premul_sum(0.0 if op.factor is None else op.factor, dtype)

    @abstractmethod
    def _look_ahead(self) -> None:
        """Record which reductions this rank's NCCL can do, before there is a communicator."""

    @abstractmethod
    def _open(self, call: object, deadline: Deadline) -> NcclComm:
        """Make NCCL's communicator. Collective: all ranks."""

    @abstractmethod
    def _enqueue(
        self, array: Any, request: Request, deadline: Deadline, function: Any, *args: Any
    ) -> None:
        """Call NCCL's ``function(*args, stream)``, and watch the operation that it enqueues."""

    # -- operations -----------------------------------------------------------------------

    def agree(self, request: Request, deadline: Deadline) -> None:
        self._host.agree(request, deadline)

    def plan(self, request: Request) -> Plan:
        operation = request.operation
        if operation == "barrier":  # does not wait for work on the GPUs
            return self._host.plan(request)
        on_gpu = partial(getattr(self, f"_enqueue_{operation}"), request)
        if operation in _REDUCTIONS:
            on_gpu = partial(on_gpu, (request.op.name, request.dtype))
        if operation in _PIECES:
            on_gpu = partial(on_gpu, _even(request.elements))
        if request.options.get("device") == "cuda":
            return on_gpu
        return partial(_where_it_is, self._host.plan(request), on_gpu)

    def _enqueue_all_reduce(
        self,
        request: Request,
        fold: tuple[str, DType],
        src: Buffer,
        dst: Buffer,
        deadline: Deadline,
    ) -> None:
        comm = self._comm or self._open(request, deadline)
        dtype, op = self._codes.get(fold) or self._reduction(request, deadline)
        if src.count:
            self._enqueue(
                src.array, request, deadline,
                comm.all_reduce, src.address, dst.address, src.count, dtype, op,
            )  # fmt: skip

    def _enqueue_reduce(
        self,
        request: Request,
        fold: tuple[str, DType],
        src: Buffer,
        dst: Buffer | None,
        deadline: Deadline,
    ) -> None:
        comm = self._comm or self._open(request, deadline)
        dtype, op = self._codes.get(fold) or self._reduction(request, deadline)
        if src.count:
            to = 0 if dst is None else dst.address
            self._enqueue(
                src.array, request, deadline,
                comm.reduce, src.address, to, src.count, dtype, op, request.root,
            )  # fmt: skip

    def _enqueue_reduce_scatter(
        self,
        request: Request,
        fold: tuple[str, DType],
        even: bool,
        src: Buffer,
        dst: Buffer,
        deadline: Deadline,
    ) -> None:
        comm = self._comm or self._open(request, deadline)
        dtype, op = self._codes.get(fold) or self._reduction(request, deadline)
        if not src.count:
            return
        counts = request.elements
        function: Any = comm.reduce_scatter if even else comm.reduce_scatter_v
        lengths = counts[0] if even else counts
        self._enqueue(
            src.array, request, deadline, function, src.address, dst.address, lengths, dtype, op
        )  # fmt: skip

    def _enqueue_scan(self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline) -> None:
        raise UnsupportedError(
            f"{request}: NCCL has no scan [rank {self.rank} of {self.size}]. Call it on a "
            "communicator, which uses the host's memory instead."
        )

    def _enqueue_broadcast(
        self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline
    ) -> None:
        comm, nbytes = self._comm or self._open(request, deadline), dst.nbytes
        if nbytes:
            array: Any = dst.array
            at = array.address
            self._enqueue(
                array, request, deadline, comm.broadcast, at, at, nbytes, _BYTE, request.root
            )  # fmt: skip

    def _enqueue_scatter(
        self, request: Request, src: Buffer | None, dst: Buffer, deadline: Deadline
    ) -> None:
        comm = self._comm or self._open(request, deadline)
        lengths = _in_bytes(request.elements, dst.dtype)
        if any(lengths):
            start = 0 if src is None else src.address
            self._enqueue(
                dst.array, request, deadline,
                comm.scatter_v, start, dst.address, lengths, _BYTE, request.root,
            )  # fmt: skip

    def _enqueue_gather(
        self, request: Request, src: Buffer, dst: Buffer | None, deadline: Deadline
    ) -> None:
        comm = self._comm or self._open(request, deadline)
        lengths = _in_bytes(request.elements, src.dtype)
        if any(lengths):
            to = 0 if dst is None else dst.address
            self._enqueue(
                src.array, request, deadline,
                comm.gather_v, src.address, to, lengths, _BYTE, request.root,
            )  # fmt: skip

    def _enqueue_all_gather(
        self, request: Request, even: bool, src: Buffer, dst: Buffer, deadline: Deadline
    ) -> None:
        comm = self._comm or self._open(request, deadline)
        lengths = _one_or_all(request.elements, even, src.dtype)
        if lengths:
            function: Any = comm.all_gather if even else comm.all_gather_v
            self._enqueue(
                src.array, request, deadline,
                function, src.address, dst.address, lengths, _BYTE,
            )  # fmt: skip

    def _enqueue_all_to_all(
        self, request: Request, src: Buffer, dst: Buffer, deadline: Deadline
    ) -> None:
        comm = self._comm or self._open(request, deadline)
        sends = _in_bytes(request.elements, src.dtype)
        receives = _in_bytes(request.incoming, src.dtype)
        if any(sends) or any(receives):
            self._enqueue(
                src.array, request, deadline,
                comm.all_to_all_v, src.address, sends, dst.address, receives, _BYTE,
            )  # fmt: skip


def _where_it_is(
    host: Plan, on_gpu: Plan, src: Buffer | None, dst: Buffer | None, deadline: Deadline
) -> Work[Any] | None:
    """Run the plan for the place of the buffers: the host plane's, or NCCL's for a GPU."""
    buffer = dst if src is None else src
    assert buffer is not None
    return (host if isinstance(buffer.array, _ndarray) else on_gpu)(src, dst, deadline)


def _one_or_all(counts: Sequence[int], even: bool, dtype: DType) -> int | Sequence[int]:
    """Return lengths in bytes: one for all ranks if ``even``, else a list by rank.

    The result is 0 if all ranks' lengths are 0. In a list, at least one length is not 0.
    """
    itemsize = dtype.storage.itemsize
    return counts[0] * itemsize if even else [count * itemsize for count in counts]


def _even(counts: Sequence[int]) -> bool:
    return counts.count(counts[0]) == len(counts)


def _in_bytes(counts: Sequence[int], dtype: DType) -> list[int]:
    itemsize = dtype.itemsize
    return [count * itemsize for count in counts]

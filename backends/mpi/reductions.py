"""The collectives that fold."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from collective.request import in_thread

from . import folds
from .arrival import BLOCKING, BY_MESSAGES, POLLED
from .carrying import Carrying, left, mapped, now, pause, spec
from .datatypes import Deviations
from .errors import explained
from .folds import MpiFold, slot

if TYPE_CHECKING:
    from collective.backends.peers.channel import Channel
    from collective.contract.backend import Plan
    from collective.memory.buffer import Buffer
    from collective.request import Request

__all__ = ["MpiReductions"]

Array = np.ndarray[Any, Any]

# NumPy takes 4 ns for a 16-bit float, so that folding is what takes the time. With an operator
# that is not their own MPICH and Intel MPI fold whole arrays on every rank; the algorithms fold
# a part a rank. Measured with 2 ranks, 16 MiB of float16, in ms: MPICH 38, by messages 20; Intel
# MPI 38, 19; Open MPI, which divides, too, 26, 24. Below 1 MiB the algorithms divide nothing.
_SLOW_FOLD_BYTES = 1 << 20


class _PreparedFold:
    """How a reduction is carried out.

    Attributes:
        request: what is asked for.
        fold: prepared for MPI.
        by_messages: whether the algorithms do it better, or only they do it right.
        plain: whether it is one call of MPI and nothing else.
    """

    __slots__ = ("by_messages", "fold", "plain", "request")

    def __init__(self, request: Request, fold: MpiFold, most: int) -> None:
        op, dtype = request.op, request.dtype
        assert dtype is not None
        self.request = request
        self.fold = fold
        # MPI leaves open in which order it folds, and a scan's may be another than rank after
        # rank. Of integers every order gives the same.
        ordered = request.ordered or request.operation == "scan"
        exact = dtype.kind in "biu" and op.function is None
        slow = dtype.kind == "f" and dtype.itemsize == 2 and request.nbytes >= _SLOW_FOLD_BYTES
        too_many = request.nbytes > most * dtype.itemsize
        self.by_messages = (ordered and not exact) or slow or too_many
        self.plain = not self.by_messages and not fold.pre and not fold.post and bool(fold.type)


class MpiReductions(Carrying):
    """The folding part of the transport.

    Attributes:
        unlike: integers and operators that MPI is not left to fold, the same on all ranks.
    """

    def __init__(self, module: Any, comm: Any, channel: Channel, unlike: Deviations) -> None:
        super().__init__(module, comm, channel)
        self.unlike = unlike
        self._all_reduce = comm.Allreduce

    def plan(self, request: Request) -> Plan:
        if request.op is None:
            return super().plan(request)
        dtype = request.dtype
        assert dtype is not None
        fold = MpiFold(self._mpi, request.op, dtype, self.size, self.unlike)
        prepared = _PreparedFold(request, fold, self._most)
        if prepared.plain and request.operation == "all_reduce":
            return partial(self._all_reduce_plainly, request, prepared)
        return partial(getattr(self, f"_{request.operation}_as"), request, prepared)

    def _carried(self, prepared: _PreparedFold, timeout: float) -> int:
        """Wait for all ranks; return how they carry the reduction out."""
        return self._way(self._wait_for_all(prepared.request, timeout), prepared)

    @staticmethod
    def _way(how: int, prepared: _PreparedFold) -> int:
        # In the background other threads work with MPI, and in MPICH a function of ours
        # must not be called then: see folds.py.
        if prepared.by_messages or (how == POLLED and prepared.fold.function is not None):
            return BY_MESSAGES
        return how

    def _fold_by_mpi(
        self, how: int, request: Request, end: float, fold: MpiFold, name: str,
        specify: Callable[[Any], tuple[Any, ...]],
    ) -> None:  # fmt: skip
        """Have MPI do the reduction ``name`` with the arguments that ``specify(type)`` gives."""
        if fold.type is not None:
            self._move(how, request, end, name, *specify(fold.type))
            return
        with slot(fold, lambda: pause(self.channel, request, end)) as mine:
            self._move(how, request, end, name, *specify(mine.types[fold.storage.itemsize]))

    def _fold_whole(
        self, how: int, request: Request, end: float, fold: MpiFold, name: str,
        src: Buffer, dst: Buffer,
    ) -> None:  # fmt: skip
        """Have MPI fold all of ``src`` into as much of ``dst``."""
        given, out = fold.enter(src, dst), dst.array
        self._fold_by_mpi(
            how, request, end, fold, name,
            lambda kind: (self._send_or_in_place(given, out, kind), spec(out, kind), fold.op),
        )  # fmt: skip
        fold.leave(out)

    # -- operations -----------------------------------------------------------------------

    def _all_reduce_plainly(
        self, request: Request, prepared: _PreparedFold, src: Buffer, dst: Buffer, timeout: float
    ) -> None:
        end = now() + timeout
        try:
            # _wait_for_all() and _move() once more, not called: here microseconds count.
            alone = in_thread.site is None and not folds.being_made
            how = self._arrive(request, timeout, BLOCKING if alone else POLLED)
            if how != BLOCKING:
                self._all_reduce_by(how, prepared, src, dst, end)
                return
            given, out = self._ends(src, dst, prepared.fold.type)
            blocking = self._blocking
            blocking.end = end
            blocking.running = request
            try:
                self._all_reduce(given, out, prepared.fold.op)
            finally:
                blocking.running = None
        except self._mpi.Exception as error:
            raise explained(self._mpi, self.channel, request, error) from error

    def _ends(self, src: Buffer, dst: Buffer, kind: Any) -> tuple[Any, Any]:
        """Return MPI's first two arguments."""
        given, out = src.array, dst.array
        return self._send_or_in_place(given, out, kind), (out, out.size, kind)

    @mapped
    def _all_reduce_as(
        self, request: Request, prepared: _PreparedFold, src: Buffer, dst: Buffer, timeout: float
    ) -> None:
        end = now() + timeout
        self._all_reduce_by(self._wait_for_all(request, timeout), prepared, src, dst, end)

    def _all_reduce_by(
        self, how: int, prepared: _PreparedFold, src: Buffer, dst: Buffer, end: float
    ) -> None:
        fold, request = prepared.fold, prepared.request
        how = self._way(how, prepared)
        if how == BY_MESSAGES:
            super().all_reduce(request, src, dst, left(end))
            return
        self._fold_whole(how, request, end, fold, "Allreduce", src, dst)

    @mapped
    def _reduce_as(
        self,
        request: Request,
        prepared: _PreparedFold,
        src: Buffer,
        dst: Buffer | None,
        timeout: float,
    ) -> None:
        end, fold = now() + timeout, prepared.fold
        how = self._carried(prepared, timeout)
        if how == BY_MESSAGES:
            super().reduce(request, src, dst, left(end))
            return
        given = fold.enter(src, dst)
        out = None if dst is None else dst.array
        self._fold_by_mpi(
            how, request, end, fold, "Reduce",
            lambda kind: (
                self._send_or_in_place(given, out, kind), out is not None and spec(out, kind),
                fold.op, request.root,
            ),
        )  # fmt: skip
        if out is not None:
            fold.leave(out)

    @mapped
    def _reduce_scatter_as(
        self, request: Request, prepared: _PreparedFold, src: Buffer, dst: Buffer, timeout: float
    ) -> None:
        end, fold, counts = now() + timeout, prepared.fold, request.elements
        how = self._carried(prepared, timeout)
        if how == BY_MESSAGES:
            super().reduce_scatter(request, src, dst, left(end))
            return
        given, out = fold.enter(src, None), dst.array
        if np.may_share_memory(given, out):  # which MPI allows in an arrangement of its own only
            out = np.empty_like(out)
        if min(counts) == max(counts):
            name = "Reduce_scatter_block"

            def specify(kind: Any) -> tuple[Any, ...]:
                return (given, out.size, kind), spec(out, kind), fold.op
        else:
            name = "Reduce_scatter"

            def specify(kind: Any) -> tuple[Any, ...]:
                return spec(given, kind), spec(out, kind), list(counts), fold.op

        self._fold_by_mpi(how, request, end, fold, name, specify)
        fold.leave(out)
        if out is not dst.array:
            dst.array[:] = out

    @mapped
    def _scan_as(
        self, request: Request, prepared: _PreparedFold, src: Buffer, dst: Buffer, timeout: float
    ) -> None:
        end, fold = now() + timeout, prepared.fold
        how = self._carried(prepared, timeout)
        if how == BY_MESSAGES:
            super().scan(request, src, dst, left(end))
            return
        self._fold_whole(how, request, end, fold, "Scan", src, dst)

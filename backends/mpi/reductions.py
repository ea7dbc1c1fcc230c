"""The collectives that fold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from collective.request import in_thread

from . import folds
from .arrival import BLOCKING, BY_MESSAGES, POLLED
from .carrying import Carrying, left, mapped, now, pause, spec
from .datatypes import Deviations
from .errors import explained
from .folds import Fold, slot

if TYPE_CHECKING:
    from collective.backends.peers.channel import Channel
    from collective.memory.buffer import Buffer
    from collective.ops import ReduceOp
    from collective.request import Request

__all__ = ["Reductions"]

Array = np.ndarray[Any, Any]

# Reductions that are kept prepared: as many as a communicator remembers calls.
_KEPT = 1024
# NumPy takes 4 ns for a 16-bit float, so that folding is what takes the time. With an operator
# that is not their own MPICH and Intel MPI fold whole arrays on every rank; the algorithms fold
# a part a rank. Measured with 2 ranks, 16 MiB of float16, in ms: MPICH 38, by messages 20; Intel
# MPI 38, 19; Open MPI, which divides, too, 26, 24. Below 1 MiB the algorithms divide nothing.
_SLOW_FOLD_BYTES = 1 << 20
_ENDS = "mpi ends"


class _Plan:
    """How a reduction is carried out; depends on the call alone.

    Attributes:
        of: operator, element count, dtype and whether in rank order.
        fold: prepared for MPI.
        by_messages: whether the algorithms do it better, or only they do it right.
        plain: whether it is one call of MPI and nothing else.
    """

    __slots__ = ("by_messages", "fold", "of", "plain")

    def __init__(self, op: ReduceOp, src: Buffer, ordered: bool, fold: Fold, most: int) -> None:
        dtype = src.dtype
        self.of = op, src.count, dtype, ordered
        self.fold = fold
        # MPI leaves open in which order it folds. Of integers every order gives the same.
        exact = dtype.kind in "biu" and op.function is None
        slow = dtype.kind == "f" and dtype.itemsize == 2 and src.nbytes >= _SLOW_FOLD_BYTES
        self.by_messages = (ordered and not exact) or slow or src.count > most
        self.plain = not self.by_messages and not fold.pre and not fold.post and bool(fold.type)


class Reductions(Carrying):
    """The folding part of the transport.

    Attributes:
        unlike: integers and operators that MPI is not left to fold, the same on all ranks.
    """

    def __init__(self, module: Any, comm: Any, channel: Channel, unlike: Deviations) -> None:
        super().__init__(module, comm, channel)
        self.unlike = unlike
        self._all_reduce = comm.Allreduce
        self._plans: dict[Request, _Plan] = {}

    def _plan(self, request: Request, op: ReduceOp, src: Buffer, ordered: bool) -> _Plan:
        plan = self._plans.get(request)
        if plan is not None and plan.of == (op, src.count, src.dtype, ordered):
            return plan
        if len(self._plans) >= _KEPT:
            self._plans.clear()
        fold = Fold(self._mpi, op, src.dtype, self.size, self.unlike)
        plan = self._plans[request] = _Plan(op, src, ordered, fold, self._most)
        return plan

    def _reduction(
        self, request: Request, op: ReduceOp, src: Buffer, ordered: bool, timeout: float
    ) -> tuple[int, Fold]:
        """Wait for all ranks; return how they fold."""
        how = self._come(request, timeout)
        plan = self._plan(request, op, src, ordered)
        return self._carry(how, plan), plan.fold

    @staticmethod
    def _carry(how: int, plan: _Plan) -> int:
        # In the background other threads work with MPI, and in MPICH a function of ours
        # must not be called then: see folds.py.
        if plan.by_messages or (how == POLLED and plan.fold.function is not None):
            return BY_MESSAGES
        return how

    def _fold(
        self, how: int, request: Request, end: float, fold: Fold, name: str,
        specify: Callable[[Any], tuple[Any, ...]],
    ) -> None:  # fmt: skip
        """Have MPI do the reduction ``name`` with the arguments that ``specify(type)`` gives."""
        if fold.type is not None:
            self._move(how, request, end, name, *specify(fold.type))
            return
        with slot(fold, lambda: pause(self.channel, request, end)) as mine:
            self._move(how, request, end, name, *specify(mine.types[fold.storage.itemsize]))

    # -- operations -----------------------------------------------------------------------

    def all_reduce(
        self,
        src: Buffer,
        dst: Buffer,
        op: ReduceOp,
        ordered: bool,
        request: Request,
        timeout: float,
    ) -> None:
        end = now() + timeout
        try:
            # _reduction() and _move() once more, not called: here microseconds count.
            alone = in_thread.site is None and not folds.being_made
            how = self._arrive(request, timeout, BLOCKING if alone else POLLED)
            plan = self._plans.get(request)
            if plan is None or plan.of != (op, src.count, src.dtype, ordered):
                plan = self._plan(request, op, src, ordered)
            if how != BLOCKING or not plan.plain:
                self._all_reduce_otherwise(how, plan, src, dst, request, end)
                return
            memo = dst.memo
            # Kept where the buffers will be used again.
            kept = None if memo is None else memo.get(_ENDS)
            if kept is None or kept[0] is not src:
                kept = self._ends(src, dst, plan.fold.type)
                if memo is not None:
                    memo[_ENDS] = kept
            blocking = self._blocking
            blocking.end = end
            blocking.running = request
            try:
                self._all_reduce(kept[1], kept[2], plan.fold.op)
            finally:
                blocking.running = None
        except self._mpi.Exception as error:
            raise explained(self._mpi, self.channel, request, error) from error

    def _ends(self, src: Buffer, dst: Buffer, kind: Any) -> tuple[Buffer, Any, Any]:
        """Return ``src``, and MPI's first two arguments."""
        return src, self._send_or_in_place(src.array, dst.array, kind), spec(dst.array, kind)

    def _all_reduce_otherwise(
        self, how: int, plan: _Plan, src: Buffer, dst: Buffer, request: Request, end: float
    ) -> None:
        fold = plan.fold
        if self._carry(how, plan) == BY_MESSAGES:
            op, _, _, ordered = plan.of
            super().all_reduce(src, dst, op, ordered, request, left(end))
            return
        given, out = fold.enter(src, dst), dst.array
        self._fold(
            how, request, end, fold, "Allreduce",
            lambda kind: (self._send_or_in_place(given, out, kind), spec(out, kind), fold.op),
        )  # fmt: skip
        fold.leave(out)

    @mapped
    def reduce(
        self,
        src: Buffer,
        dst: Buffer | None,
        op: ReduceOp,
        root: int,
        ordered: bool,
        request: Request,
        timeout: float,
    ) -> None:
        end = now() + timeout
        how, fold = self._reduction(request, op, src, ordered, timeout)
        if how == BY_MESSAGES:
            super().reduce(src, dst, op, root, ordered, request, left(end))
            return
        given = fold.enter(src, dst)
        out = None if dst is None else dst.array
        self._fold(
            how, request, end, fold, "Reduce",
            lambda kind: (
                self._send_or_in_place(given, out, kind), out is not None and spec(out, kind),
                fold.op, root,
            ),
        )  # fmt: skip
        if out is not None:
            fold.leave(out)

    @mapped
    def reduce_scatter(
        self,
        src: Buffer,
        dst: Buffer,
        counts: Sequence[int],
        op: ReduceOp,
        ordered: bool,
        request: Request,
        timeout: float,
    ) -> None:
        end = now() + timeout
        how, fold = self._reduction(request, op, src, ordered, timeout)
        if how == BY_MESSAGES:
            super().reduce_scatter(src, dst, counts, op, ordered, request, left(end))
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

        self._fold(how, request, end, fold, name, specify)
        fold.leave(out)
        if out is not dst.array:
            dst.array[:] = out

    @mapped
    def scan(
        self, src: Buffer, dst: Buffer, op: ReduceOp, request: Request, timeout: float
    ) -> None:
        end = now() + timeout
        # MPI may fold in another order than rank after rank, which floats would show.
        how, fold = self._reduction(request, op, src, True, timeout)
        if how == BY_MESSAGES:
            super().scan(src, dst, op, request, left(end))
            return
        given, out = fold.enter(src, dst), dst.array
        self._fold(
            how, request, end, fold, "Scan",
            lambda kind: (self._send_or_in_place(given, out, kind), spec(out, kind), fold.op),
        )  # fmt: skip
        fold.leave(out)

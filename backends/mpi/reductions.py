"""The collectives that fold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrival import BY_MESSAGES, POLLED
from .carrying import Carrying, MpiPlan, left, mapped, now, pause, spec
from .datatypes import Deviations
from .folds import MpiFold, slot

if TYPE_CHECKING:
    from collective.backends.peers.channel import Channel
    from collective.contract.backend import Plan
    from collective.memory.buffer import Buffer
    from collective.request import Request

__all__ = ["MpiReductions"]

Array = np.ndarray[Any, Any]
_Plainly = tuple[str, Callable[[Any, Any], tuple[Any, ...]]]

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

    def plan(self, request: Request) -> Plan:
        if request.op is None:
            return super().plan(request)
        operation, dtype = request.operation, request.dtype
        assert dtype is not None
        fold = MpiFold(self._mpi, request.op, dtype, self.size, self.unlike)
        prepared = _PreparedFold(request, fold, self._most)
        by = partial(getattr(self, f"_{operation}_by"), prepared)
        made = partial(self._fold_as, request, by)
        if not prepared.plain:
            return made
        name, specify = getattr(self, f"_{operation}_plainly")(request, fold)
        return MpiPlan(self, request, name, specify, made, by)

    @mapped
    def _fold_as(
        self, request: Request, by: Callable[..., None], src: Buffer, dst: Buffer | None,
        timeout: float,
    ) -> None:  # fmt: skip
        """Wait for all ranks, and fold as they then do."""
        end = now() + timeout
        by(self._wait_for_all(request, timeout), src, dst, end)

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

    def _all_reduce_by(
        self, prepared: _PreparedFold, how: int, src: Buffer, dst: Buffer, end: float
    ) -> None:
        fold, request = prepared.fold, prepared.request
        how = self._way(how, prepared)
        if how == BY_MESSAGES:
            super().all_reduce(request, src, dst, left(end))
            return
        self._fold_whole(how, request, end, fold, "Allreduce", src, dst)

    def _reduce_by(
        self, prepared: _PreparedFold, how: int, src: Buffer, dst: Buffer | None, end: float
    ) -> None:
        fold, request = prepared.fold, prepared.request
        how = self._way(how, prepared)
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

    def _reduce_scatter_by(
        self, prepared: _PreparedFold, how: int, src: Buffer, dst: Buffer, end: float
    ) -> None:
        fold, request, counts = prepared.fold, prepared.request, prepared.request.elements
        how = self._way(how, prepared)
        if how == BY_MESSAGES:
            super().reduce_scatter(request, src, dst, left(end))
            return
        given, out = fold.enter(src, None), dst.array
        if np.may_share_memory(given, out):  # which MPI allows in an arrangement of its own only
            out = np.empty_like(out)
        name, specify = _scattered(counts)
        self._fold_by_mpi(
            how, request, end, fold, name, lambda kind: specify(given, out, kind, fold.op)
        )
        fold.leave(out)
        if out is not dst.array:
            dst.array[:] = out

    def _scan_by(
        self, prepared: _PreparedFold, how: int, src: Buffer, dst: Buffer, end: float
    ) -> None:
        fold, request = prepared.fold, prepared.request
        how = self._way(how, prepared)
        if how == BY_MESSAGES:
            super().scan(request, src, dst, left(end))
            return
        self._fold_whole(how, request, end, fold, "Scan", src, dst)

    # -- one call of MPI, and nothing else ------------------------------------------------
    # Its name, and what returns its arguments for arrays that are apart, or the same.

    def _all_reduce_plainly(self, request: Request, fold: MpiFold) -> _Plainly:
        kind, op, source = fold.type, fold.op, self._send_or_in_place
        return "Allreduce", lambda x, out: (source(x, out, kind), (out, out.size, kind), op)

    def _scan_plainly(self, request: Request, fold: MpiFold) -> _Plainly:
        return "Scan", self._all_reduce_plainly(request, fold)[1]

    def _reduce_plainly(self, request: Request, fold: MpiFold) -> _Plainly:
        kind, op, root, source = fold.type, fold.op, request.root, self._send_or_in_place
        return "Reduce", lambda x, out: (
            source(x, out, kind), out is not None and (out, out.size, kind), op, root,
        )  # fmt: skip

    def _reduce_scatter_plainly(self, request: Request, fold: MpiFold) -> _Plainly:
        name, specify = _scattered(request.elements)
        return name, lambda x, out: specify(x, out, fold.type, fold.op)


def _scattered(counts: Sequence[int]) -> tuple[str, Callable[..., tuple[Any, ...]]]:
    """Return MPI's function that reduces and scatters so many elements, and its arguments."""
    if min(counts) == max(counts):
        return "Reduce_scatter_block", lambda x, out, kind, op: (
            (x, out.size, kind), (out, out.size, kind), op,
        )  # fmt: skip
    given = list(counts)
    return "Reduce_scatter", lambda x, out, kind, op: (
        (x, x.size, kind), (out, out.size, kind), given, op,
    )  # fmt: skip

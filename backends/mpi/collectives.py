"""The collectives, each of them one call of MPI."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from collective.algorithms.arithmetic import steady
from collective.deadline import Deadline

from .carrying import BY_MESSAGES, POLLED, Carrying, MpiPlan, mapped, pause
from .folds import Deviations, MpiFold, slot, type_of

if TYPE_CHECKING:
    from collective.backends.peers.channel import Channel
    from collective.contract.backend import Plan
    from collective.memory.buffer import Buffer
    from collective.memory.dtypes import DType
    from collective.request import Request

#: Function that makes a move from a request and MPI's type of its elements.
_Prepare = Callable[["MpiCollectives", "Request", Any], "_Move"]

# NumPy takes 4 ns for a 16-bit float, so the reduction takes most of the time. With a user-defined
# operator MPICH and Intel MPI reduce whole arrays on every rank, but the algorithms reduce one part
# on each rank. Measured with 2 ranks and 16 MiB of float16, in ms: MPICH 38, by messages 20; Intel
# MPI 38, 19; Open MPI, which divides the array, too, 26, 24. Below 1 MiB the algorithms do not
# divide the array.
_SLOW_FOLD_BYTES = 1 << 20


class _Move(NamedTuple):
    """MPI's call for a request that only moves data.

    Attributes:
        name: name of MPI's blocking function.
        specify: function that returns the arguments of MPI's function. It takes this rank's input
            and output, each an array or None.
        most: number of elements in the longest array of any rank; None if this rank's buffers have
            that length.
    """

    name: str
    specify: Callable[[Any, Any], tuple[Any, ...]]
    most: int | None


class _Way(NamedTuple):
    """MPI's call for a request that is a reduction.

    Attributes:
        prepared: the reduction, prepared for MPI.
        name: name of MPI's blocking function.
        specify: function that returns the arguments of MPI's function. It takes MPI's type and
            operator, and this rank's input and output. Input and output are arrays, which are
            disjoint or the same, or None.
        by_messages: whether the algorithms over messages are faster, or the only correct way.
    """

    prepared: MpiFold
    name: str
    specify: Callable[[Any, Any, Any, Any], tuple[Any, ...]]
    by_messages: bool


class MpiCollectives(Carrying):
    """The part of the transport that moves and reduces data.

    Attributes:
        unlike: pairs of operator and dtype, of integers and booleans, for which MPI's own operator
            is not used; the same on all ranks.
    """

    def __init__(self, module: Any, comm: Any, channel: Channel, unlike: Deviations) -> None:
        super().__init__(module, comm, channel)
        self.unlike = unlike

    @mapped
    def agree(self, request: Request, deadline: Deadline) -> None:
        self._wait_for_all(request, deadline)

    def plan(self, request: Request) -> Plan:
        if request.operation == "barrier":
            return MpiPlan(self, request, "", None, partial(self._barrier_as, request))
        if request.op is not None:
            return self._plan_fold(request)
        prepare = _MOVES.get(request.operation)
        if prepare is None:
            return super().plan(request)

        @cache
        def move_of(dtype: DType) -> _Move:
            return prepare(self, request, type_of(self._mpi, dtype))

        # A step of a call may have elements of another dtype than the request says.
        made = partial(self._move_as, request, move_of)
        if request.dtype is None or request.shape is None:
            return made
        move = move_of(request.dtype)
        if (math.prod(request.shape) if move.most is None else move.most) > self._most:
            return made
        by = partial(self._move_by, request, move)
        return MpiPlan(self, request, move.name, move.specify, made, by)

    @mapped
    def _barrier_as(self, request: Request, src: None, dst: None, deadline: Deadline) -> None:
        self._wait_for_all(request, deadline)

    # -- what moves -----------------------------------------------------------------------

    @mapped
    def _move_as(
        self, request: Request, move_of: Callable[[DType], _Move], src: Buffer | None,
        dst: Buffer | None, deadline: Deadline,
    ) -> None:  # fmt: skip
        some = dst if src is None else src
        assert some is not None
        move = move_of(some.dtype)
        most = move.most
        if most is None:
            most = max(each.count for each in (src, dst) if each is not None)
        how = self._wait_for_all(request, deadline, most > self._most)
        self._move_by(request, move, how, src, dst, deadline)

    def _move_by(
        self, request: Request, move: _Move, how: int, src: Buffer | None, dst: Buffer | None,
        deadline: Deadline,
    ) -> None:  # fmt: skip
        """Move the data after all ranks have arrived; ``how`` is the result of the arrival."""
        if how == BY_MESSAGES:
            getattr(super(), request.operation)(request, src, dst, deadline)
            return
        source, out = (None if buffer is None else buffer.array for buffer in (src, dst))
        self._move(how, request, deadline, move.name, *move.specify(source, out))

    def _specify_broadcast(self, request: Request, kind: Any) -> _Move:
        root, is_root = request.root, request.root == self.rank

        def specify(_: Any, out: Any) -> tuple[Any, ...]:
            # MPI may write to the root's buffer: MPICH does if the root is not its rank 0.
            if is_root and isinstance(out, np.ndarray) and not out.flags.writeable:
                out = out.copy()
            return (out, out.size, kind), root

        return _Move("Bcast", specify, None)

    def _specify_scatter(self, request: Request, kind: Any) -> _Move:
        counts, root, in_place = list(request.elements), request.root, self._in_place

        def specify(given: Any, out: Any) -> tuple[Any, ...]:
            if given is None:
                return None, (out, out.size, kind), root
            placed = in_place if np.may_share_memory(given, out) else (out, out.size, kind)
            return (given, counts, None, kind), placed, root

        return _Move("Scatterv", specify, sum(counts))

    def _specify_gather(self, request: Request, kind: Any) -> _Move:
        counts, root, source = list(request.elements), request.root, self._send_or_in_place

        def specify(given: Any, out: Any) -> tuple[Any, ...]:
            every = None if out is None else (out, counts, None, kind)
            return source(given, out, kind), every, root

        return _Move("Gatherv", specify, sum(counts))

    def _specify_all_gather(self, request: Request, kind: Any) -> _Move:
        counts, source = list(request.elements), self._send_or_in_place
        first, most = counts[0], sum(counts)
        if min(counts) == max(counts):
            return _Move(
                "Allgather", lambda x, out: (source(x, out, kind), (out, first, kind)), most
            )
        return _Move(
            "Allgatherv", lambda x, out: (source(x, out, kind), (out, counts, None, kind)), most
        )

    def _specify_all_to_all(self, request: Request, kind: Any) -> _Move:
        elements, incoming = list(request.elements), list(request.incoming)

        def specify(given: Any, out: Any) -> tuple[Any, ...]:
            return (given, elements, None, kind), (out, incoming, None, kind)

        # Each rank knows only its own counts. The arrival tells all ranks if one has too many.
        return _Move("Alltoallv", specify, max(sum(elements), sum(incoming)))

    # -- reductions -----------------------------------------------------------------------

    def _plan_fold(self, request: Request) -> Plan:
        op, dtype = request.op, request.dtype
        assert dtype is not None
        # MPI does not specify the order of a reduction; even a scan need not go rank by rank. For
        # integers every order gives the same result.
        ordered = request.ordered or request.operation == "scan"
        exact = dtype.kind in "biu" and op.function is None
        slow = dtype.kind == "f" and dtype.itemsize == 2 and request.nbytes >= _SLOW_FOLD_BYTES
        too_many = request.nbytes > self._most * dtype.itemsize
        # A scan's result on rank 0 has one contribution, so nothing is reduced there. Otherwise the
        # number of contributions matters only for a mean, and a scan has no mean.
        folded = self.rank + 1 if request.operation == "scan" else self.size
        prepared = MpiFold(self._mpi, op, dtype, folded, self.unlike)
        by_messages = (ordered and not exact) or slow or too_many
        fold = _Way(prepared, *self._specify_fold(request), by_messages)
        by = partial(self._fold_by, request, fold)
        made = partial(self._fold_as, request, by)
        if by_messages or prepared.pre or prepared.post or not prepared.type:
            return made
        specify = partial(fold.specify, prepared.type, prepared.op)
        return MpiPlan(self, request, fold.name, specify, made, by)

    @mapped
    def _fold_as(
        self, request: Request, by: Callable[..., None], src: Buffer, dst: Buffer | None,
        deadline: Deadline,
    ) -> None:  # fmt: skip
        """Wait for all ranks, then reduce in the way that the arrival returns."""
        by(self._wait_for_all(request, deadline), src, dst, deadline)

    def _fold_by(
        self,
        request: Request,
        fold: _Way,
        how: int,
        src: Buffer,
        dst: Buffer | None,
        deadline: Deadline,
    ) -> None:
        """Reduce after all ranks have arrived; ``how`` is the result of the arrival."""
        prepared = fold.prepared
        # In the background other threads use MPI, and then MPICH must not call a function of this
        # library: see folds.py.
        unsafe = how == POLLED and prepared.function is not None
        if fold.by_messages or unsafe or how == BY_MESSAGES:
            getattr(super(), request.operation)(request, src, dst, deadline)
            return
        scatters = request.operation == "reduce_scatter"
        source = prepared.enter(src, None if scatters else dst)
        out = None if dst is None else dst.array
        if scatters and np.may_share_memory(source, out):
            out = np.empty_like(out)  # MPI allows aliasing only with a layout of its own
        if prepared.type is not None:
            arguments = fold.specify(prepared.type, prepared.op, source, out)
            # MPI folds in this thread.
            steady(self._move)(how, request, deadline, fold.name, *arguments)
        else:
            with slot(prepared, lambda: pause(self.channel, request, deadline)) as own_slot:
                kind = own_slot.types[prepared.storage.itemsize]
                arguments = fold.specify(kind, prepared.op, source, out)
                self._move(how, request, deadline, fold.name, *arguments)
        if dst is not None and out is not None:
            prepared.leave(out)
            if out is not dst.array:
                dst.array[:] = out

    def _specify_fold(
        self, request: Request
    ) -> tuple[str, Callable[[Any, Any, Any, Any], tuple[Any, ...]]]:
        """Return the name of MPI's function for a reduction, and a function for its arguments."""
        source, operation, root = self._send_or_in_place, request.operation, request.root
        if operation == "reduce":
            return "Reduce", lambda kind, op, x, out: (
                source(x, out, kind), out is not None and (out, out.size, kind), op, root,
            )  # fmt: skip
        if operation != "reduce_scatter":
            return {"all_reduce": "Allreduce", "scan": "Scan"}[operation], (
                lambda kind, op, x, out: (source(x, out, kind), (out, out.size, kind), op)
            )
        counts = list(request.elements)
        if min(counts) == max(counts):
            return "Reduce_scatter_block", lambda kind, op, x, out: (
                (x, out.size, kind), (out, out.size, kind), op,
            )  # fmt: skip
        return "Reduce_scatter", lambda kind, op, x, out: (
            (x, x.size, kind), (out, out.size, kind), counts, op,
        )  # fmt: skip


_MOVES: dict[str, _Prepare] = {
    "broadcast": MpiCollectives._specify_broadcast,
    "scatter": MpiCollectives._specify_scatter,
    "gather": MpiCollectives._specify_gather,
    "all_gather": MpiCollectives._specify_all_gather,
    "all_to_all": MpiCollectives._specify_all_to_all,
}

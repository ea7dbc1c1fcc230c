"""The collectives that move."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .arrival import BY_MESSAGES
from .carrying import Carrying, MpiPlan, left, mapped, now
from .datatypes import type_of

if TYPE_CHECKING:
    from collective.contract.backend import Plan
    from collective.memory.buffer import Buffer
    from collective.memory.dtypes import DType
    from collective.request import Request

__all__ = ["MpiMoves"]

#: Makes a move of a request, and of MPI's type of its elements.
_Prepare = Callable[["MpiMoves", "Request", Any], "_Move"]


class _Move(NamedTuple):
    """How MPI moves what a request asks for.

    Attributes:
        name: of MPI's blocking function.
        specify: returns its arguments, of this rank's input and output: arrays, or None.
        most: the elements in the longest of the ranks' arrays; None if that is its buffers'.
    """

    name: str
    specify: Callable[[Any, Any], tuple[Any, ...]]
    most: int | None


class MpiMoves(Carrying):
    """The moving part of the transport."""

    @mapped
    def agree(self, request: Request, timeout: float) -> None:
        self._wait_for_all(request, timeout)

    def plan(self, request: Request) -> Plan:
        if request.operation == "barrier":
            return MpiPlan(self, request, "", None, partial(self._barrier_as, request))
        prepare = _MOVES.get(request.operation)
        if prepare is None:
            return super().plan(request)

        @cache
        def move_of(dtype: DType) -> _Move:
            return prepare(self, request, type_of(self._mpi, dtype))

        # A step of a call may be of other elements than the request says.
        made = partial(self._move_as, request, move_of)
        if request.dtype is None or request.shape is None:
            return made
        move = move_of(request.dtype)
        if (math.prod(request.shape) if move.most is None else move.most) > self._most:
            return made
        by = partial(self._move_by, request, move)
        return MpiPlan(self, request, move.name, move.specify, made, by)

    @mapped
    def _barrier_as(self, request: Request, src: None, dst: None, timeout: float) -> None:
        self._wait_for_all(request, timeout)

    @mapped
    def _move_as(
        self, request: Request, move_of: Callable[[DType], _Move], src: Buffer | None,
        dst: Buffer | None, timeout: float,
    ) -> None:  # fmt: skip
        end, some = now() + timeout, dst if src is None else src
        assert some is not None
        move = move_of(some.dtype)
        most = move.most
        if most is None:
            most = max(each.count for each in (src, dst) if each is not None)
        how = self._wait_for_all(request, timeout, most > self._most)
        self._move_by(request, move, how, src, dst, end)

    def _move_by(
        self, request: Request, move: _Move, how: int, src: Buffer | None, dst: Buffer | None,
        end: float,
    ) -> None:  # fmt: skip
        """Move when all ranks have come, and have said how."""
        if how == BY_MESSAGES:
            getattr(super(), request.operation)(request, src, dst, left(end))
            return
        given, out = (None if each is None else each.array for each in (src, dst))
        self._move(how, request, end, move.name, *move.specify(given, out))

    # -- what MPI gets --------------------------------------------------------------------

    def _specify_broadcast(self, request: Request, kind: Any) -> _Move:
        root = request.root
        return _Move("Bcast", lambda _, out: ((out, out.size, kind), root), None)

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

        # Each rank knows its own counts only: the arrival tells if they are too many for one.
        return _Move("Alltoallv", specify, max(sum(elements), sum(incoming)))


_MOVES: dict[str, _Prepare] = {
    "broadcast": MpiMoves._specify_broadcast,
    "scatter": MpiMoves._specify_scatter,
    "gather": MpiMoves._specify_gather,
    "all_gather": MpiMoves._specify_all_gather,
    "all_to_all": MpiMoves._specify_all_to_all,
}

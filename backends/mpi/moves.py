"""The collectives that move."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .arrival import BY_MESSAGES
from .carrying import Carrying, left, mapped, now, spec
from .datatypes import type_of

if TYPE_CHECKING:
    from collective.memory.buffer import Buffer
    from collective.request import Request

__all__ = ["MpiMoves"]


class MpiMoves(Carrying):
    """The moving part of the transport."""

    @mapped
    def agree(self, request: Request, timeout: float) -> None:
        self._wait_for_all(request, timeout)

    @mapped
    def barrier(self, request: Request, src: None, dst: None, timeout: float) -> None:
        self._wait_for_all(request, timeout)

    @mapped
    def broadcast(self, request: Request, src: Buffer, dst: Buffer, timeout: float) -> None:
        end = now() + timeout
        how = self._wait_for_all(request, timeout, dst.count > self._most)
        if how == BY_MESSAGES:
            super().broadcast(request, src, dst, left(end))
            return
        kind = type_of(self._mpi, dst.dtype)
        self._move(how, request, end, "Bcast", spec(dst.array, kind), request.root)

    @mapped
    def scatter(self, request: Request, src: Buffer | None, dst: Buffer, timeout: float) -> None:
        end, counts = now() + timeout, list(request.elements)
        how = self._wait_for_all(request, timeout, sum(counts) > self._most)
        if how == BY_MESSAGES:
            super().scatter(request, src, dst, left(end))
            return
        kind = type_of(self._mpi, dst.dtype)
        out = spec(dst.array, kind)
        if src is not None and np.may_share_memory(src.array, dst.array):
            out = self._in_place
        given = None if src is None else (src.array, counts, None, kind)
        self._move(how, request, end, "Scatterv", given, out, request.root)

    @mapped
    def gather(self, request: Request, src: Buffer, dst: Buffer | None, timeout: float) -> None:
        end, counts = now() + timeout, list(request.elements)
        how = self._wait_for_all(request, timeout, sum(counts) > self._most)
        if how == BY_MESSAGES:
            super().gather(request, src, dst, left(end))
            return
        kind = type_of(self._mpi, src.dtype)
        given = self._send_or_in_place(src.array, None if dst is None else dst.array, kind)
        out = None if dst is None else (dst.array, counts, None, kind)
        self._move(how, request, end, "Gatherv", given, out, request.root)

    @mapped
    def all_gather(self, request: Request, src: Buffer, dst: Buffer, timeout: float) -> None:
        end, counts = now() + timeout, list(request.elements)
        how = self._wait_for_all(request, timeout, sum(counts) > self._most)
        if how == BY_MESSAGES:
            super().all_gather(request, src, dst, left(end))
            return
        kind = type_of(self._mpi, src.dtype)
        given = self._send_or_in_place(src.array, dst.array, kind)
        if min(counts) == max(counts):
            self._move(how, request, end, "Allgather", given, (dst.array, counts[0], kind))
        else:
            self._move(how, request, end, "Allgatherv", given, (dst.array, counts, None, kind))

    @mapped
    def all_to_all(self, request: Request, src: Buffer, dst: Buffer, timeout: float) -> None:
        end = now() + timeout
        # Each rank knows its own counts only: the arrival tells if they are too many for one.
        large = max(src.count, dst.count) > self._most
        how = self._wait_for_all(request, timeout, large)
        if how == BY_MESSAGES:
            super().all_to_all(request, src, dst, left(end))
            return
        kind = type_of(self._mpi, src.dtype)
        given = (src.array, list(request.elements), None, kind)
        out = (dst.array, list(request.incoming), None, kind)
        self._move(how, request, end, "Alltoallv", given, out)

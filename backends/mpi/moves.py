"""The collectives that move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .arrival import BY_MESSAGES
from .carrying import Carrying, left, mapped, now, spec
from .datatypes import type_of

if TYPE_CHECKING:
    from collective.memory.buffer import Buffer
    from collective.request import Request

__all__ = ["Moves"]


class Moves(Carrying):
    """The moving part of the transport."""

    @mapped
    def agree(self, request: Request, timeout: float) -> None:
        self._come(request, timeout)

    @mapped
    def barrier(self, request: Request, timeout: float) -> None:
        self._come(request, timeout)

    @mapped
    def broadcast(self, buffer: Buffer, root: int, request: Request, timeout: float) -> None:
        end = now() + timeout
        how = self._come(request, timeout, buffer.count > self._most)
        if how == BY_MESSAGES:
            super().broadcast(buffer, root, request, left(end))
            return
        kind = type_of(self._mpi, buffer.dtype)
        self._move(how, request, end, "Bcast", spec(buffer.array, kind), root)

    @mapped
    def scatter(
        self,
        src: Buffer | None,
        dst: Buffer,
        counts: Sequence[int],
        root: int,
        request: Request,
        timeout: float,
    ) -> None:
        end = now() + timeout
        how = self._come(request, timeout, sum(counts) > self._most)
        if how == BY_MESSAGES:
            super().scatter(src, dst, counts, root, request, left(end))
            return
        kind = type_of(self._mpi, dst.dtype)
        out = spec(dst.array, kind)
        if src is not None and np.may_share_memory(src.array, dst.array):
            out = self._in_place
        given = None if src is None else (src.array, list(counts), None, kind)
        self._move(how, request, end, "Scatterv", given, out, root)

    @mapped
    def gather(
        self,
        src: Buffer,
        dst: Buffer | None,
        counts: Sequence[int],
        root: int,
        request: Request,
        timeout: float,
    ) -> None:
        end = now() + timeout
        how = self._come(request, timeout, sum(counts) > self._most)
        if how == BY_MESSAGES:
            super().gather(src, dst, counts, root, request, left(end))
            return
        kind = type_of(self._mpi, src.dtype)
        given = self._send_or_in_place(src.array, None if dst is None else dst.array, kind)
        out = None if dst is None else (dst.array, list(counts), None, kind)
        self._move(how, request, end, "Gatherv", given, out, root)

    @mapped
    def all_gather(
        self, src: Buffer, dst: Buffer, counts: Sequence[int], request: Request, timeout: float
    ) -> None:
        end = now() + timeout
        how = self._come(request, timeout, sum(counts) > self._most)
        if how == BY_MESSAGES:
            super().all_gather(src, dst, counts, request, left(end))
            return
        kind = type_of(self._mpi, src.dtype)
        given = self._send_or_in_place(src.array, dst.array, kind)
        if min(counts) == max(counts):
            self._move(how, request, end, "Allgather", given, (dst.array, counts[0], kind))
        else:
            self._move(
                how, request, end, "Allgatherv", given, (dst.array, list(counts), None, kind)
            )

    @mapped
    def all_to_all(
        self,
        src: Buffer,
        dst: Buffer,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        request: Request,
        timeout: float,
    ) -> None:
        end = now() + timeout
        # Each rank knows its own counts only: the arrival tells if they are too many for one.
        large = max(src.count, dst.count) > self._most
        how = self._come(request, timeout, large)
        if how == BY_MESSAGES:
            super().all_to_all(src, dst, send_counts, recv_counts, request, left(end))
            return
        kind = type_of(self._mpi, src.dtype)
        given = (src.array, list(send_counts), None, kind)
        out = (dst.array, list(recv_counts), None, kind)
        self._move(how, request, end, "Alltoallv", given, out)

"""The collectives that move."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .arrival import BY_MESSAGES
from .carrying import Carrying, left, mapped, now, spec
from .datatypes import type_of

if TYPE_CHECKING:
    from collective.call import Call
    from collective.memory.buffer import Buffer

__all__ = ["Moves"]


class Moves(Carrying):
    """The moving part of the transport."""

    @mapped
    def agree(self, call: Call, timeout: float) -> None:
        self._come(call, timeout)

    @mapped
    def barrier(self, call: Call, timeout: float) -> None:
        self._come(call, timeout)

    @mapped
    def broadcast(self, buffer: Buffer, root: int, call: Call, timeout: float) -> None:
        end = now() + timeout
        how = self._come(call, timeout, buffer.count > self._most)
        if how == BY_MESSAGES:
            super().broadcast(buffer, root, call, left(end))
            return
        kind = type_of(self._mpi, buffer.dtype)
        self._move(how, call, end, "Bcast", spec(buffer.array, kind), root)

    @mapped
    def scatter(
        self,
        src: Buffer | None,
        dst: Buffer,
        counts: Sequence[int],
        root: int,
        call: Call,
        timeout: float,
    ) -> None:
        end = now() + timeout
        how = self._come(call, timeout, sum(counts) > self._most)
        if how == BY_MESSAGES:
            super().scatter(src, dst, counts, root, call, left(end))
            return
        kind = type_of(self._mpi, dst.dtype)
        out = spec(dst.array, kind)
        if src is not None and np.may_share_memory(src.array, dst.array):
            out = self._in_place
        given = None if src is None else (src.array, list(counts), None, kind)
        self._move(how, call, end, "Scatterv", given, out, root)

    @mapped
    def gather(
        self,
        src: Buffer,
        dst: Buffer | None,
        counts: Sequence[int],
        root: int,
        call: Call,
        timeout: float,
    ) -> None:
        end = now() + timeout
        how = self._come(call, timeout, sum(counts) > self._most)
        if how == BY_MESSAGES:
            super().gather(src, dst, counts, root, call, left(end))
            return
        kind = type_of(self._mpi, src.dtype)
        given = self._send_or_in_place(src.array, None if dst is None else dst.array, kind)
        out = None if dst is None else (dst.array, list(counts), None, kind)
        self._move(how, call, end, "Gatherv", given, out, root)

    @mapped
    def all_gather(
        self, src: Buffer, dst: Buffer, counts: Sequence[int], call: Call, timeout: float
    ) -> None:
        end = now() + timeout
        how = self._come(call, timeout, sum(counts) > self._most)
        if how == BY_MESSAGES:
            super().all_gather(src, dst, counts, call, left(end))
            return
        kind = type_of(self._mpi, src.dtype)
        given = self._send_or_in_place(src.array, dst.array, kind)
        if min(counts) == max(counts):
            self._move(how, call, end, "Allgather", given, (dst.array, counts[0], kind))
        else:
            self._move(how, call, end, "Allgatherv", given, (dst.array, list(counts), None, kind))

    @mapped
    def all_to_all(
        self,
        src: Buffer,
        dst: Buffer,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        call: Call,
        timeout: float,
    ) -> None:
        end = now() + timeout
        # Each rank knows its own counts only: the arrival tells if they are too many for one.
        large = max(src.count, dst.count) > self._most
        how = self._come(call, timeout, large)
        if how == BY_MESSAGES:
            super().all_to_all(src, dst, send_counts, recv_counts, call, left(end))
            return
        kind = type_of(self._mpi, src.dtype)
        given = (src.array, list(send_counts), None, kind)
        out = (dst.array, list(recv_counts), None, kind)
        self._move(how, call, end, "Alltoallv", given, out)

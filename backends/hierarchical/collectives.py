"""Collectives on two levels: among the ranks of each host, and between the hosts.

What a host's ranks have in common is combined inside the host first, so that it crosses
the network once and not once a rank. Every host has its ranks at *places* 0, 1, …; the
ranks at one place of all hosts are connected among themselves. A short message is left to
those at one place, a leader on each host, which saves starts; a long one is cut into parts,
one a place, which keeps all of them busy. The scheme is that of Träff & Hunold, "Decomposing
MPI Collectives for Exploiting Multi-lane Communication" (2020).

Results that must be folded strictly in rank order, and what has no second level, go to the
transport between all ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from collective.algorithms import pieces
from collective.contract.backend import Backend
from collective.memory.buffer import Buffer
from collective.ops import ReduceOp

from .places import Places, part, plain, put, room, take
from .steps import Fold, Named, Steps, end

if TYPE_CHECKING:
    from collective.contract.work import Work
    from collective.request import Request

__all__ = ["TwoLevel"]


class TwoLevel(Backend):
    """The collectives; see the module's docstring.

    Attributes:
        _outer: connects all ranks.
        _inner: connects the ranks of this host, numbered by place.
        _across: connects the ranks at this place of all hosts, numbered by host; None if
            there is one host only, or not every host has this place.
        _places: who is where.
        _named: the steps of calls that were made.
        shared_bytes: from here on a message is cut into parts, one a place.
    """

    # Measured with two ranks on each of two hosts, all on two cores, in ms, through leaders
    # and in parts: 4.2 and 5.3 at 1 MiB, 6.8 and 9.1 at 2, 18.3 and 18.7 at 4, 43 and 38 at 16,
    # 112 and 99 at 64 (flat Gloo: 11, 14, 20, 58 and 151).
    shared_bytes: ClassVar[int] = 4 << 20

    _outer: Backend
    _inner: Backend
    _across: Backend | None
    _places: Places
    _named: Named

    def _steps(self, request: Request, timeout: float) -> Steps:
        """Return what the steps of one call on two levels need, for a ``with``."""
        return Steps(self._named, self.explained, request, timeout)

    @abstractmethod
    def explained(
        self,
        error: BaseException,
        where: object,
        timeout: float,
        awaited: Sequence[int] | None = None,
    ) -> Exception | None:
        """Return what to raise for an error of a level, or None for the error itself."""

    def _regroups(self, op: ReduceOp, ordered: bool) -> bool:
        """Tell whether a fold may be made host by host."""
        places = self._places
        return places.levels and not ordered and (op.commutative or places.in_order)

    def agree(self, request: Request, timeout: float) -> None:
        self._outer.agree(request, timeout)

    def barrier(self, request: Request, timeout: float) -> Work[Any] | None:
        if not self._places.levels:
            return self._outer.barrier(request, timeout)
        with self._steps(request, timeout) as steps:
            self._inner.barrier(steps.call(0), steps.left())
            if self._places.place == 0 and self._across is not None:
                end(self._across.barrier(steps.call(1), steps.left()))
            self._inner.barrier(steps.call(2), steps.left())
        return None

    def broadcast(
        self, buffer: Buffer, root: int, request: Request, timeout: float
    ) -> Work[Any] | None:
        places = self._places
        if not places.levels:
            return self._outer.broadcast(buffer, root, request, timeout)
        host, place = places.host_of(root), self._root_place(root)
        parts = self._parts(buffer, place)
        whole, mine = plain(buffer), part(buffer, parts, places.place)
        with self._steps(request, timeout) as steps:
            if places.host == host:
                self._inner.broadcast(whole, places.local.index(root), steps.call(0), steps.left())
            if mine.count and self._across is not None:
                end(self._across.broadcast(mine, host, steps.call(1), steps.left()))
            if places.host != host:
                self._inner.all_gather(mine, whole, parts, steps.call(2), steps.left())
        return None

    @np.errstate(all="ignore")
    def all_reduce(
        self,
        src: Buffer,
        dst: Buffer,
        op: ReduceOp,
        ordered: bool,
        request: Request,
        timeout: float,
    ) -> Work[Any] | None:
        if not self._regroups(op, ordered):
            return self._outer.all_reduce(src, dst, op, ordered, request, timeout)
        fold = Fold(op, src.dtype, self.size)
        parts = self._parts(src, 0)
        whole, mine = plain(dst), part(dst, parts, self._places.place)
        source = whole if src is dst else plain(src)
        with self._steps(request, timeout) as steps:
            source = fold.enter(source)
            inner = self._inner
            inner.reduce_scatter(source, mine, parts, fold.op, False, steps.call(0), steps.left())
            if mine.count:
                if self._across is not None:
                    end(self._across.all_reduce(
                        mine, mine, fold.op, False, steps.call(1), steps.left()
                    ))  # fmt: skip
                fold.leave(mine)
            inner.all_gather(mine, whole, parts, steps.call(2), steps.left())
        return None

    @np.errstate(all="ignore")
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
        if not self._regroups(op, ordered):
            return self._outer.reduce(src, dst, op, root, ordered, request, timeout)
        places = self._places
        fold = Fold(op, src.dtype, self.size)
        host, place = places.host_of(root), self._root_place(root)
        parts = self._parts(src, place)
        if dst is not None:
            mine = part(dst, parts, places.place)
        else:
            mine = Buffer.empty(parts[places.place], src.dtype)
        at_root = places.host == host
        with self._steps(request, timeout) as steps:
            source = fold.enter(plain(src))
            self._inner.reduce_scatter(
                source, mine, parts, fold.op, False, steps.call(0), steps.left()
            )
            if mine.count and self._across is not None:
                result = mine if at_root else None
                end(self._across.reduce(
                    mine, result, fold.op, host, False, steps.call(1), steps.left()
                ))  # fmt: skip
            if at_root:
                fold.leave(mine)
                to = places.local.index(root)
                whole = None if dst is None else plain(dst)
                self._inner.gather(mine, whole, parts, to, steps.call(2), steps.left())
        return None

    @np.errstate(all="ignore")
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
        places = self._places
        if not (self._regroups(op, ordered) and places.even):
            return self._outer.reduce_scatter(src, dst, counts, op, ordered, request, timeout)
        # The parts for the ranks at one place of all hosts are folded by the rank at that
        # place here, so that they are where they belong when they have crossed.
        fold = Fold(op, src.dtype, self.size)
        mine = [counts[rank] for rank in places.at(places.place)]
        folded = Buffer.empty(sum(mine), src.dtype)
        with self._steps(request, timeout) as steps:
            source = fold.enter(plain(src))
            for host, (start, stop) in enumerate(pairwise(pieces.limits(mine))):
                members = places.members[host]
                self._inner.reduce_scatter(
                    take(source, counts, members),
                    folded.part(start, stop),
                    [counts[rank] for rank in members],
                    fold.op,
                    False,
                    steps.call(1 + host),
                    steps.left(),
                )
            if self._across is None:
                pieces.copy(folded, dst)
            else:
                end(self._across.reduce_scatter(
                    folded, dst, mine, fold.op, False, steps.call(0), steps.left()
                ))  # fmt: skip
            fold.leave(dst)
        return None

    def scan(
        self, src: Buffer, dst: Buffer, op: ReduceOp, request: Request, timeout: float
    ) -> Work[Any] | None:
        return self._outer.scan(src, dst, op, request, timeout)

    def scatter(
        self,
        src: Buffer | None,
        dst: Buffer,
        counts: Sequence[int],
        root: int,
        request: Request,
        timeout: float,
    ) -> Work[Any] | None:
        places = self._places
        if not places.levels:
            return self._outer.scatter(src, dst, counts, root, request, timeout)
        order = list(chain(*places.members))
        host, place = places.host_of(root), self._root_place(root)
        blocks = [sum(counts[rank] for rank in members) for members in places.members]
        mine = [counts[rank] for rank in places.local]
        whole = None if src is None else take(src, counts, order)
        at_root, here = places.host == host, places.place == place
        with self._steps(request, timeout) as steps:
            if at_root and places.members[host][place] != root:
                # The root has no counterparts on the other hosts: another takes its part.
                moved = Buffer.empty(sum(blocks) * here, dst.dtype)
                everything = [sum(blocks) * (each == place) for each in range(len(places.local))]
                sender = places.local.index(root)
                self._inner.scatter(whole, moved, everything, sender, steps.call(0), steps.left())
                whole = moved if here else None
            block = whole
            if here and self._across is not None:
                if at_root:
                    assert whole is not None
                    start = sum(blocks[:host])
                    block = whole.part(start, start + blocks[host])
                else:
                    block = Buffer.empty(blocks[places.host], dst.dtype)
                end(self._across.scatter(
                    whole, block, blocks, host, steps.call(1), steps.left()
                ))  # fmt: skip
            self._inner.scatter(
                block if here else None, plain(dst), mine, place, steps.call(2), steps.left()
            )
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
        places = self._places
        if not places.levels:
            return self._outer.gather(src, dst, counts, root, request, timeout)
        order = list(chain(*places.members))
        host, place = places.host_of(root), self._root_place(root)
        blocks = [sum(counts[rank] for rank in members) for members in places.members]
        mine = [counts[rank] for rank in places.local]
        at_root, here = places.host == host, places.place == place
        result = None if dst is None else room(dst, counts, order)
        whole, block = None, None
        if here and at_root:
            whole = result or Buffer.empty(sum(blocks), src.dtype)
            start = sum(blocks[:host])
            block = whole.part(start, start + blocks[host])
        elif here:
            block = Buffer.empty(blocks[places.host], src.dtype)
        with self._steps(request, timeout) as steps:
            self._inner.gather(plain(src), block, mine, place, steps.call(0), steps.left())
            if here and self._across is not None:
                assert block is not None
                end(self._across.gather(
                    block, whole, blocks, host, steps.call(1), steps.left()
                ))  # fmt: skip
            if at_root and places.members[host][place] != root:
                # As in scatter(): another has taken the root's part.
                everything = [sum(blocks) * (each == place) for each in range(len(places.local))]
                given = whole or Buffer.empty(0, src.dtype)
                to = places.local.index(root)
                self._inner.gather(given, result, everything, to, steps.call(2), steps.left())
        if dst is not None:
            assert result is not None
            put(dst, counts, order, result)
        return None

    def all_gather(
        self, src: Buffer, dst: Buffer, counts: Sequence[int], request: Request, timeout: float
    ) -> Work[Any] | None:
        places = self._places
        if not places.levels:
            return self._outer.all_gather(src, dst, counts, request, timeout)
        # Host after host: where that is not the ranks' order, it is put right at the end.
        order = list(chain(*places.members))
        whole = room(dst, counts, order)
        limits = pieces.limits([sum(counts[r] for r in each) for each in places.members])
        start, stop = limits[places.host], limits[places.host + 1]
        block = whole.part(start, stop)
        with self._steps(request, timeout) as steps:
            mine = [counts[rank] for rank in places.local]
            self._inner.all_gather(plain(src), block, mine, steps.call(0), steps.left())
            if places.place == 0 and self._across is not None:
                blocks = [high - low for low, high in pairwise(limits)]
                end(self._across.all_gather(block, whole, blocks, steps.call(1), steps.left()))
            for step, news in enumerate((whole.part(0, start), whole.part(stop, whole.count))):
                if news.count:
                    self._inner.broadcast(news, 0, steps.call(2 + step), steps.left())
        put(dst, counts, order, whole)
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
        places = self._places
        if not places.levels:
            return self._outer.all_to_all(src, dst, send_counts, recv_counts, request, timeout)
        local = places.local
        others = [rank for rank in range(self.size) if rank not in local]
        into = room(dst, recv_counts, local)
        with self._steps(request, timeout) as steps:
            self._inner.all_to_all(
                take(src, send_counts, local),
                into,
                [send_counts[rank] for rank in local],
                [recv_counts[rank] for rank in local],
                steps.call(0),
                steps.left(),
            )
            put(dst, recv_counts, local, into)
        # Between the hosts every piece is its own, and nothing can be saved.
        away = room(dst, recv_counts, others)
        work = self._outer.all_to_all(
            take(src, send_counts, others),
            away,
            [0 if rank in local else count for rank, count in enumerate(send_counts)],
            [0 if rank in local else count for rank, count in enumerate(recv_counts)],
            request,
            steps.left(),
        )
        end(work)
        put(dst, recv_counts, others, away)
        return None

    def _parts(self, buffer: Buffer, place: int) -> list[int]:
        """Return how ``buffer`` is cut: all for ``place`` as long as it is short."""
        short = buffer.nbytes < self.shared_bytes
        return self._places.parts(buffer.count, place if short else None)

    def _root_place(self, root: int) -> int:
        """Return the place of ``root``, if every host has that, else 0."""
        places = self._places
        place = places.members[places.host_of(root)].index(root)
        return place if place < places.common else 0

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

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from collective.algorithms import pieces
from collective.algorithms.folds import Folding
from collective.backends.peers import levels
from collective.backends.peers.monitored import Monitored
from collective.deadline import Deadline
from collective.memory.buffer import Buffer
from collective.ops import ReduceOp, as_op

from .topology import Topology, part, put, room, take

if TYPE_CHECKING:
    from types import TracebackType

    from collective.contract.backend import Backend, Plan
    from collective.memory.dtypes import DType
    from collective.request import Request

__all__ = ["Steps", "TwoLevel"]

_SUM = as_op("sum")


class Steps:
    """The steps of one request on two levels: their plans, deadline, and what errors become.

    One call at a time is made with it, in a ``with``.

    Args:
        explained: returns what to raise for an error of a level, or None for the error itself.
        request: what the steps are of.
    """

    __slots__ = ("_deadline", "_explained", "_plans", "request")

    def __init__(
        self,
        explained: Callable[[BaseException, object, Deadline], BaseException | None],
        request: Request,
    ) -> None:
        self._explained = explained
        self.request = request
        self._plans: dict[int, Plan] = {}
        self._deadline = Deadline.never()

    def within(self, deadline: Deadline) -> Steps:
        """Begin a call with this deadline."""
        self._deadline = deadline
        return self

    def run(
        self,
        number: int,
        level: Backend,
        operation: str,
        src: Buffer | None,
        dst: Buffer | None,
        **arguments: Any,
    ) -> None:
        """Make step ``number``, on one of the levels.

        Args:
            arguments: of :meth:`Request.step`, the same every time.
        """
        # By its number alone: levels, counts and roots follow from the request, and are the same
        # each time that a call is made for it.
        plan = self._plans.get(number)
        if plan is None:
            plan = level.plan(self.request.step(number, operation, **arguments))
            self._plans[number] = plan
        work = plan(src, dst, self._deadline)
        if work is not None:
            work.wait()

    def __enter__(self) -> Steps:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            explained = self._explained(error, self.request, self._deadline)
            if explained is not None:
                raise explained from error


def _folds(op: ReduceOp, dtype: DType, size: int) -> tuple[ReduceOp, Folding]:
    """Return what both levels of a reduction fold with, and what scales once, around both."""
    if op.name in ("avg", "premul_sum"):
        return _SUM, Folding(op, dtype, size)
    return op, Folding(_SUM, dtype, size)  # which leaves inputs and results as they are


class TwoLevel(Monitored):
    """The collectives; see the module's docstring.

    Attributes:
        _outer: connects all ranks.
        _inner: connects the ranks of this host, numbered by place.
        _across: connects the ranks at this place of all hosts, numbered by host; None if
            there is one host only, or not every host has this place.
        _topology: who is where.
        shared_bytes: from here on a message is cut into parts, one a place.
    """

    # Measured with two ranks on each of two hosts, all on two cores, in ms, through leaders
    # and in parts: 4.2 and 5.3 at 1 MiB, 6.8 and 9.1 at 2, 18.3 and 18.7 at 4, 43 and 38 at 16,
    # 112 and 99 at 64 (flat Gloo: 11, 14, 20, 58 and 151).
    shared_bytes: ClassVar[int] = 4 << 20

    _outer: Backend
    _inner: Backend
    _across: Backend | None
    _topology: Topology

    def explained(
        self,
        error: BaseException,
        where: object,
        deadline: Deadline,
        awaited: Sequence[int] | None = None,
    ) -> Exception | None:
        """Return what to raise for an error of a level, or None for the error itself."""
        return levels.explained(self.channel, error, where, deadline, awaited)

    def _regroups(self, op: ReduceOp, ordered: bool) -> bool:
        """Tell whether a fold may be made host by host."""
        topology = self._topology
        return topology.levels and not ordered and (op.commutative or topology.in_order)

    def agree(self, request: Request, deadline: Deadline) -> None:
        self._outer.agree(request, deadline)

    def plan(self, request: Request) -> Plan:
        operation = request.operation
        one_level = not self._topology.levels or operation == "scan"
        if request.op is not None:
            one_level = one_level or not self._regroups(request.op, request.ordered)
        if operation == "reduce_scatter":
            one_level = one_level or not self._topology.even
        if one_level:
            return self._outer.plan(request)
        way = partial(getattr(self, f"_{operation}_in"), Steps(self.explained, request))
        if request.op is None:
            return way
        assert request.dtype is not None
        return partial(way, *_folds(request.op, request.dtype, self.size))

    def _barrier_in(self, steps: Steps, src: None, dst: None, deadline: Deadline) -> None:
        with steps.within(deadline):
            # All of this host are there; then all hosts; only then is anybody let go.
            steps.run(0, self._inner, "barrier", None, None)
            if self._topology.local_rank == 0 and self._across is not None:
                steps.run(1, self._across, "barrier", None, None)
            steps.run(2, self._inner, "barrier", None, None)

    def _broadcast_in(self, steps: Steps, src: Buffer, dst: Buffer, deadline: Deadline) -> None:
        topology, root = self._topology, steps.request.root
        host, gateway = topology.host_of(root), self._gateway(root)
        parts = self._parts(dst, gateway)
        mine = part(dst, parts, topology.local_rank)
        with steps.within(deadline):
            # The root's host first: of a long message each of its ranks takes a part across.
            if topology.host == host:
                to = topology.local.index(root)
                steps.run(0, self._inner, "broadcast", dst, dst, root=to)
            # A place with nothing to carry stays out of it: of a short message all but the gateway.
            if mine.count and self._across is not None:
                steps.run(1, self._across, "broadcast", mine, mine, root=host)
            if topology.host != host:
                steps.run(2, self._inner, "all_gather", mine, dst, elements=parts)

    @np.errstate(all="ignore")
    def _all_reduce_in(
        self,
        steps: Steps,
        op: ReduceOp,
        scaling: Folding,
        src: Buffer,
        dst: Buffer,
        deadline: Deadline,
    ) -> None:
        parts = self._parts(src, 0)
        mine = part(dst, parts, self._topology.local_rank)
        with steps.within(deadline):
            source = scaling.enter(src)
            steps.run(0, self._inner, "reduce_scatter", source, mine, op=op, elements=parts)
            if mine.count:
                if self._across is not None:
                    count = mine.count
                    steps.run(1, self._across, "all_reduce", mine, mine, op=op, count=count)
                # Before it is spread: each element is scaled once a host, not once a rank.
                scaling.leave(mine)
            steps.run(2, self._inner, "all_gather", mine, dst, elements=parts)

    @np.errstate(all="ignore")
    def _reduce_in(
        self, steps: Steps, op: ReduceOp, scaling: Folding, src: Buffer, dst: Buffer | None,
        deadline: Deadline,
    ) -> None:  # fmt: skip
        topology, root = self._topology, steps.request.root
        host, gateway = topology.host_of(root), self._gateway(root)
        parts = self._parts(src, gateway)
        if dst is not None:
            mine = part(dst, parts, topology.local_rank)
        else:
            mine = Buffer.empty(parts[topology.local_rank], src.dtype)
        at_root = topology.host == host
        with steps.within(deadline):
            source = scaling.enter(src)
            steps.run(0, self._inner, "reduce_scatter", source, mine, op=op, elements=parts)
            if mine.count and self._across is not None:
                result, count = mine if at_root else None, mine.count
                steps.run(1, self._across, "reduce", mine, result, op=op, root=host, count=count)
            if at_root:
                scaling.leave(mine)
                to = topology.local.index(root)
                steps.run(2, self._inner, "gather", mine, dst, root=to, elements=parts)

    @np.errstate(all="ignore")
    def _reduce_scatter_in(
        self,
        steps: Steps,
        op: ReduceOp,
        scaling: Folding,
        src: Buffer,
        dst: Buffer,
        deadline: Deadline,
    ) -> None:
        # The parts for the ranks of one local rank on all hosts are folded by the rank of that
        # local rank here, so that they are where they belong when they have crossed.
        topology, counts = self._topology, steps.request.elements
        mine = [counts[rank] for rank in topology.at(topology.local_rank)]
        folded = Buffer.empty(sum(mine), src.dtype)
        with steps.within(deadline):
            source = scaling.enter(src)
            for host, (start, stop) in enumerate(pairwise(pieces.limits(mine))):
                members = topology.members[host]
                elements = [counts[rank] for rank in members]
                steps.run(
                    1 + host, self._inner, "reduce_scatter",
                    take(source, counts, members), folded.part(start, stop),
                    op=op, elements=elements, count=sum(elements),
                )  # fmt: skip
            if self._across is None:
                pieces.copy(folded, dst)
            else:
                steps.run(
                    0, self._across, "reduce_scatter", folded, dst,
                    op=op, elements=mine, count=sum(mine),
                )  # fmt: skip
            scaling.leave(dst)

    def _scatter_in(
        self, steps: Steps, src: Buffer | None, dst: Buffer, deadline: Deadline
    ) -> None:
        topology, counts, root = self._topology, steps.request.elements, steps.request.root
        order = list(chain(*topology.members))
        host, gateway = topology.host_of(root), self._gateway(root)
        blocks = [sum(counts[rank] for rank in members) for members in topology.members]
        mine = [counts[rank] for rank in topology.local]
        whole = None if src is None else take(src, counts, order)
        at_root, here = topology.host == host, topology.local_rank == gateway
        with steps.within(deadline):
            if at_root and topology.members[host][gateway] != root:
                # The root has no counterparts on the other hosts: another takes its part.
                moved = Buffer.empty(sum(blocks) * here, dst.dtype)
                every, to = topology.parts(sum(blocks), gateway), topology.local.index(root)
                steps.run(0, self._inner, "scatter", whole, moved, root=to, elements=every)
                whole = moved if here else None
            block = whole
            if here and self._across is not None:
                if at_root:
                    assert whole is not None
                    block = part(whole, blocks, host)
                else:
                    block = Buffer.empty(blocks[topology.host], dst.dtype)
                steps.run(1, self._across, "scatter", whole, block, root=host, elements=blocks)
            given = block if here else None
            steps.run(2, self._inner, "scatter", given, dst, root=gateway, elements=mine)

    def _gather_in(self, steps: Steps, src: Buffer, dst: Buffer | None, deadline: Deadline) -> None:
        topology, counts, root = self._topology, steps.request.elements, steps.request.root
        order = list(chain(*topology.members))
        host, gateway = topology.host_of(root), self._gateway(root)
        blocks = [sum(counts[rank] for rank in members) for members in topology.members]
        mine = [counts[rank] for rank in topology.local]
        at_root, here = topology.host == host, topology.local_rank == gateway
        result = None if dst is None else room(dst, counts, order)
        whole, block = None, None
        if here and at_root:
            whole = result or Buffer.empty(sum(blocks), src.dtype)
            block = part(whole, blocks, host)
        elif here:
            block = Buffer.empty(blocks[topology.host], src.dtype)
        with steps.within(deadline):
            steps.run(0, self._inner, "gather", src, block, root=gateway, elements=mine)
            if here and self._across is not None:
                assert block is not None
                steps.run(1, self._across, "gather", block, whole, root=host, elements=blocks)
            if at_root and topology.members[host][gateway] != root:
                # As in scatter(): another has taken the root's part.
                given = whole or Buffer.empty(0, src.dtype)
                every, to = topology.parts(sum(blocks), gateway), topology.local.index(root)
                steps.run(2, self._inner, "gather", given, result, root=to, elements=every)
        if dst is not None:
            assert result is not None
            put(dst, counts, order, result)

    def _all_gather_in(self, steps: Steps, src: Buffer, dst: Buffer, deadline: Deadline) -> None:
        topology, counts = self._topology, steps.request.elements
        # Host after host: where that is not the ranks' order, it is put right at the end.
        order = list(chain(*topology.members))
        whole = room(dst, counts, order)
        limits = pieces.limits([sum(counts[r] for r in each) for each in topology.members])
        start, stop = limits[topology.host], limits[topology.host + 1]
        block = whole.part(start, stop)
        with steps.within(deadline):
            mine = [counts[rank] for rank in topology.local]
            steps.run(0, self._inner, "all_gather", src, block, elements=mine)
            if topology.local_rank == 0 and self._across is not None:
                blocks = [high - low for low, high in pairwise(limits)]
                steps.run(1, self._across, "all_gather", block, whole, elements=blocks)
            # Its own block the host has already: what others sent is before it and behind it.
            for step, news in enumerate((whole.part(0, start), whole.part(stop, whole.count))):
                if news.count:
                    steps.run(2 + step, self._inner, "broadcast", news, news, root=0)
        put(dst, counts, order, whole)

    def _all_to_all_in(self, steps: Steps, src: Buffer, dst: Buffer, deadline: Deadline) -> None:
        local, request = self._topology.local, steps.request
        sends, receives = request.elements, request.incoming
        others = [rank for rank in range(self.size) if rank not in local]
        into = room(dst, receives, local)
        with steps.within(deadline):
            steps.run(
                0, self._inner, "all_to_all", take(src, sends, local), into,
                elements=[sends[rank] for rank in local],
                incoming=[receives[rank] for rank in local],
            )  # fmt: skip
            put(dst, receives, local, into)
        # Between the hosts every piece is its own, and nothing can be saved. Outside of the block:
        # what the outer transport raises is in the numbers of all ranks, and needs no explanation.
        away = room(dst, receives, others)
        steps.run(
            1, self._outer, "all_to_all", take(src, sends, others), away,
            elements=[0 if rank in local else count for rank, count in enumerate(sends)],
            incoming=[0 if rank in local else count for rank, count in enumerate(receives)],
        )  # fmt: skip
        put(dst, receives, others, away)

    def _parts(self, buffer: Buffer, gateway: int) -> list[int]:
        """Return how ``buffer`` is cut: all for ``gateway`` as long as it is short."""
        short = buffer.nbytes < self.shared_bytes
        return self._topology.parts(buffer.count, gateway if short else None)

    def _gateway(self, root: int) -> int:
        """Return the local rank that crosses for ``root``: its own if all hosts have it, else 0."""
        topology = self._topology
        gateway = topology.members[topology.host_of(root)].index(root)
        return gateway if gateway < topology.common else 0

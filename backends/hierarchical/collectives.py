"""Collectives on two levels: among the ranks of each host, and between the hosts.

The ranks of a host first combine their data inside the host, so that the data crosses the network
once per host and not once per rank. The ranks of a host are numbered by *places* 0, 1, …; the
ranks at the same place on all hosts are connected with each other. A short message crosses
between the ranks at one place, a leader on each host, which saves message starts. A long message
is cut into parts, one per place, which keeps all places busy. The scheme is that of Träff & Hunold,
"Decomposing MPI Collectives for Exploiting Multi-lane Communication" (2020).

The transport between all ranks does the folds that must be strictly in rank order, and the
operations that have no second level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from collective.algorithms import pieces
from collective.algorithms.folds import Folding
from collective.backends.peers.monitored import Monitored, explained
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
    """Steps of one request on two levels: their plans, their deadline, and their errors.

    A ``Steps`` object serves one call at a time, as a context manager.

    Args:
        explained: returns the error to raise for an error of a level, or None for the error itself.
        request: the request that consists of these steps.
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
        """Set the deadline of the next call; return this object for its ``with`` statement."""
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
        """Do step ``number`` on one of the levels, and wait for it.

        Args:
            number: number of the step in the request.
            level: the transport of the level.
            operation: the collective that the step consists of.
            src, dst: buffers of the step.
            arguments: arguments of :meth:`Request.step`, the same in every call.
        """
        # The number alone identifies the plan: levels, counts and roots follow from the request, so
        # they are the same in every call for this request.
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
    """Return the operator for both levels of a reduction, and the scaling done once around both."""
    if op.name in ("avg", "premul_sum"):
        return _SUM, Folding(op, dtype, size)
    return op, Folding(_SUM, dtype, size)  # this scaling leaves inputs and results unchanged


class TwoLevel(Monitored):
    """Collectives on two levels; see the module's docstring.

    Attributes:
        _outer: connects all ranks.
        _inner: connects the ranks of this host, numbered by place.
        _across: connects the ranks at this place on all hosts, numbered by host; None if
            there is only one host, or if not every host has this place.
        _topology: the hosts and their ranks.
        shared_bytes: length in bytes from which a message is cut into parts, one per place.
    """

    # Measured in ms, with two ranks on each of two hosts, all on two cores:
    #
    #   MiB                  1     2     4     16    64
    #   through leaders      4.2   6.8   18.3  43    112
    #   in parts             5.3   9.1   18.7  38    99
    #   Gloo on one level    11    14    20    58    151
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
        """Return the error to raise for an error of a level, or None for the error itself."""
        return explained(self.channel, error, where, deadline, awaited)

    def _regroups(self, op: ReduceOp, ordered: bool) -> bool:
        """Return whether a reduction may fold inside each host first."""
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
        if operation in ("gather", "scatter"):
            # The root itself crosses, so all hosts need a rank at its place.
            one_level = one_level or self._place(request.root) >= self._topology.common
        if one_level:
            return self._outer.plan(request)
        way = partial(getattr(self, f"_{operation}_in"), Steps(self.explained, request))
        if request.op is None:
            return way
        assert request.dtype is not None
        return partial(way, *_folds(request.op, request.dtype, self.size))

    def _barrier_in(self, steps: Steps, src: None, dst: None, deadline: Deadline) -> None:
        with steps.within(deadline):
            # First all ranks of this host arrive, then all hosts. Only then may any rank return.
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
            # The root's host comes first: each of its ranks sends a part of a long message across.
            if topology.host == host:
                to = topology.local.index(root)
                steps.run(0, self._inner, "broadcast", dst, dst, root=to)
            # A place whose part is empty skips this step. For a short message, that is every place
            # except the gateway.
            if mine.count and self._across is not None:
                count = mine.count
                steps.run(1, self._across, "broadcast", mine, mine, root=host, count=count)
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
                # Scale before spreading the part: once per host for each element, not per rank.
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
        # On each host, the rank with a given local rank folds the parts for the ranks with the same
        # local rank on all hosts. So each part reaches its rank directly when it crosses.
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
        host, place = topology.host_of(root), self._place(root)
        blocks = [sum(counts[rank] for rank in members) for members in topology.members]
        mine = [counts[rank] for rank in topology.local]
        whole = block = None
        if src is not None:
            whole = block = take(src, counts, list(chain(*topology.members)))
        with steps.within(deadline):
            if topology.local_rank == place and self._across is not None:
                if whole is not None:
                    block = part(whole, blocks, host)
                else:
                    block = Buffer.empty(blocks[topology.host], dst.dtype)
                steps.run(0, self._across, "scatter", whole, block, root=host, elements=blocks)
            steps.run(1, self._inner, "scatter", block, dst, root=place, elements=mine)

    def _gather_in(self, steps: Steps, src: Buffer, dst: Buffer | None, deadline: Deadline) -> None:
        topology, counts, root = self._topology, steps.request.elements, steps.request.root
        order = list(chain(*topology.members))
        host, place = topology.host_of(root), self._place(root)
        blocks = [sum(counts[rank] for rank in members) for members in topology.members]
        mine = [counts[rank] for rank in topology.local]
        whole = block = None
        if dst is not None:
            whole = room(dst, counts, order)
            block = part(whole, blocks, host)
        elif topology.local_rank == place:
            block = Buffer.empty(blocks[topology.host], src.dtype)
        with steps.within(deadline):
            steps.run(0, self._inner, "gather", src, block, root=place, elements=mine)
            if block is not None and self._across is not None:
                steps.run(1, self._across, "gather", block, whole, root=host, elements=blocks)
        if dst is not None and whole is not None:
            put(dst, counts, order, whole)

    def _all_gather_in(self, steps: Steps, src: Buffer, dst: Buffer, deadline: Deadline) -> None:
        topology, counts = self._topology, steps.request.elements
        # The blocks are in the order of the hosts. If that is not the order of the ranks, put()
        # reorders them at the end.
        order = list(chain(*topology.members))
        whole = room(dst, counts, order)
        limits = pieces.limits([sum(counts[r] for r in members) for members in topology.members])
        start, stop = limits[topology.host], limits[topology.host + 1]
        block = whole.part(start, stop)
        with steps.within(deadline):
            mine = [counts[rank] for rank in topology.local]
            steps.run(0, self._inner, "all_gather", src, block, elements=mine)
            if topology.local_rank == 0 and self._across is not None:
                blocks = [high - low for low, high in pairwise(limits)]
                steps.run(1, self._across, "all_gather", block, whole, elements=blocks)
            # The host has its own block already. The other hosts' blocks lie before and after it.
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
        # Every piece between hosts is different, so a second level would save nothing. This step is
        # outside the with block: errors of the outer transport have the numbers of all ranks, so
        # they need no explanation.
        away = room(dst, receives, others)
        steps.run(
            1, self._outer, "all_to_all", take(src, sends, others), away,
            elements=[0 if rank in local else count for rank, count in enumerate(sends)],
            incoming=[0 if rank in local else count for rank, count in enumerate(receives)],
        )  # fmt: skip
        put(dst, receives, others, away)

    def _parts(self, buffer: Buffer, gateway: int) -> list[int]:
        """Return the counts of a buffer's parts by place; a short buffer goes to ``gateway``."""
        short = buffer.nbytes < self.shared_bytes
        return self._topology.parts(buffer.count, gateway if short else None)

    def _gateway(self, root: int) -> int:
        """Return the place that crosses for ``root``: its own if all hosts have it, else 0."""
        place = self._place(root)
        return place if place < self._topology.common else 0

    def _place(self, rank: int) -> int:
        topology = self._topology
        return topology.members[topology.host_of(rank)].index(rank)

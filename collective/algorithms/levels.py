"""Long calls on two levels: among the ranks of each host, and between the hosts.

The ranks of a host are numbered by *places* 0, 1, …. A host combines its data before the data
crosses the network, so each element crosses once per host and not once per rank. All places cross
at the same time, each with its own share. The scheme is that of Träff & Hunold, "Decomposing MPI
Collectives for Exploiting Multi-lane Communication" (2020).

A reduction and a broadcast go in blocks: a block passes all levels while the caches hold it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from collective.ops import as_op

from . import folds, moves, pieces, reductions

if TYPE_CHECKING:
    from collective.memory.buffer import Buffer
    from collective.ops import ReduceOp

    from .messages import Messages

_SUM = as_op("sum")


class Levels(NamedTuple):
    """The messages of one rank's call on two levels.

    Attributes:
        hosts: the ranks of each host, in order.
        host, place: number of this rank's host, and this rank's index among its ranks.
        flat: messages between all ranks.
        inside: messages between the ranks of this host, numbered by place.
        across: messages between the ranks at this place of all hosts, numbered by host; None if
            some host has no such place.
    """

    hosts: Sequence[Sequence[int]]
    host: int
    place: int
    flat: Messages
    inside: Messages
    across: Messages | None

    @property
    def common(self) -> int:
        """Number of places that every host has."""
        return min(map(len, self.hosts))

    @property
    def even(self) -> bool:
        """Whether all hosts have the same number of ranks."""
        return max(map(len, self.hosts)) == self.common

    def where(self, rank: int) -> tuple[int, int]:
        """Return the host and the place of a rank."""
        return next((host, members.index(rank)) for host, members in enumerate(self.hosts)
                    if rank in members)  # fmt: skip

    def shares(self, count: int) -> list[int]:
        """Return how many of ``count`` elements cross at each place of this host."""
        rest = len(self.hosts[self.host]) - self.common
        return pieces.even(count, self.common) + [0] * rest

    def blocks(self, count: int, itemsize: int) -> Iterator[slice]:
        """Yield the blocks of an array of ``count`` elements; a place has a chunk of each."""
        width = self.common * pieces.chunk(itemsize)
        for low in range(0, count, width):
            yield slice(low, min(low + width, count))


def regroups(hosts: Sequence[Sequence[int]], op: ReduceOp | None, ordered: bool) -> bool:
    """Return whether a call may fold inside each host first; ``op`` is None if it folds nothing."""
    in_order = [rank for members in hosts for rank in members] == list(range(sum(map(len, hosts))))
    return op is None or (not ordered and (op.commutative or in_order))


def _between(op: ReduceOp) -> ReduceOp:
    """Return the operator of each level, for an operator that scales once around both."""
    return _SUM if op.name in ("avg", "premul_sum") else op


def all_reduce(levels: Levels, src: Buffer, dst: Buffer, op: ReduceOp) -> None:
    """Fold the ranks' ``src`` into every rank's ``dst``, with the same bits on all ranks.

    Each place folds its share inside its host, then with the same place of all hosts, and spreads
    the result inside its host.
    """
    op, whole = _between(op), levels.flat.folding(op, src.dtype, levels.flat.size)
    inside = levels.inside.folding(op, src.dtype, levels.inside.size)
    for block in levels.blocks(src.count, src.dtype.itemsize):
        source, result = src.part(block.start, block.stop), dst.part(block.start, block.stop)
        shares = levels.shares(source.count)
        results = pieces.cut(result, shares)
        mine = results[levels.place]
        folds.parts(
            levels.inside, inside, pieces.cut(source, shares), mine, in_order=not op.commutative
        )
        if levels.across is not None:
            if levels.across.size == 2:
                # Between two ranks doubling carries as many bytes as parts, in half the messages.
                between = levels.across.folding(op, src.dtype, levels.across.size)
                folds.doubled(levels.across, between, mine, mine)
            else:
                reductions.all_reduce(levels.across, mine, mine, op, False)
        # Scale before spreading the share: once per host for each element, not per rank.
        whole.leave(mine)
        moves.ring(levels.inside, results)


def reduce(levels: Levels, src: Buffer, dst: Buffer | None, op: ReduceOp, root: int) -> None:
    """Fold the ranks' ``src`` into ``dst`` of ``root``; ``dst`` is None elsewhere."""
    op, whole = _between(op), levels.flat.folding(op, src.dtype, levels.flat.size)
    inside = levels.inside.folding(op, src.dtype, levels.inside.size)
    host, place = levels.where(root)
    widest = min(src.count, pieces.chunk(src.dtype.itemsize))
    room = levels.flat.room(widest, src.dtype) if dst is None else None
    for block in levels.blocks(src.count, src.dtype.itemsize):
        source = src.part(block.start, block.stop)
        result = None if dst is None else dst.part(block.start, block.stop)
        shares = levels.shares(source.count)
        if result is not None:
            mine = pieces.cut(result, shares)[levels.place]
        else:
            assert room is not None
            mine = room.part(0, shares[levels.place])
        folds.parts(
            levels.inside, inside, pieces.cut(source, shares), mine, in_order=not op.commutative
        )
        if levels.across is not None:
            total = mine if levels.host == host else None
            reductions.reduce(levels.across, mine, total, op, host, False)
        if levels.host == host:
            whole.leave(mine)
            moves.send_to_root(levels.inside, mine, result, shares, place)


def broadcast(levels: Levels, buffer: Buffer, root: int) -> None:
    """Copy ``buffer`` of ``root`` into ``buffer`` of every other rank.

    The root's host comes first: each of its places then sends its share to the same place of the
    other hosts, whose ranks collect the shares.
    """
    host, place = levels.where(root)
    for block in levels.blocks(buffer.count, buffer.dtype.itemsize):
        part = buffer.part(block.start, block.stop)
        shares = pieces.cut(part, levels.shares(part.count))
        if levels.host == host:
            moves.broadcast(levels.inside, part, place)
        if levels.across is not None:
            moves.broadcast(levels.across, shares[levels.place], host)
        if levels.host != host:
            moves.ring(levels.inside, shares)


def all_gather(levels: Levels, src: Buffer, dst: Buffer, counts: Sequence[int]) -> None:
    """Concatenate the ranks' ``src``, of ``counts[rank]`` elements, in every ``dst``.

    The ranks of a host collect their pieces first. Then each place exchanges a piece with the same
    place of the other hosts, until all pieces have crossed, and the ranks of a host collect those.
    """
    every = pieces.cut(dst, counts)
    common, nothing = levels.common, dst.part(0, 0)
    levels.flat.copy(src, every[levels.hosts[levels.host][levels.place]])

    def piece(host: int, index: int) -> Buffer:
        """Return the piece of a host's rank with this index, if there is one."""
        members = levels.hosts[host]
        return every[members[index]] if index < len(members) else nothing

    moves.ring(levels.inside, [every[rank] for rank in levels.hosts[levels.host]])
    rest = [nothing] * (len(levels.hosts[levels.host]) - common)
    for row in range(0, max(map(len, levels.hosts)), common):
        if levels.across is not None:
            own = range(len(levels.hosts))
            moves.ring(levels.across, [piece(host, row + levels.place) for host in own])
        for host in range(len(levels.hosts)):
            if host != levels.host:
                spread = [piece(host, row + place) for place in range(common)]
                moves.ring(levels.inside, [*spread, *rest])


def reduce_scatter(
    levels: Levels, src: Buffer, dst: Buffer, counts: Sequence[int], op: ReduceOp
) -> None:
    """Fold the ranks' ``src``; leave this rank's part, ``counts[rank]`` elements, in ``dst``.

    Each place folds inside its host the parts for the ranks at this place of all hosts. So each
    part reaches its rank directly when it crosses. Hosts with different numbers of ranks have no
    second level.
    """
    across = levels.across
    if across is None or not levels.even:
        reductions.reduce_scatter(levels.flat, src, dst, counts, op, ordered=False)
        return
    op, whole = _between(op), levels.flat.folding(op, src.dtype, levels.flat.size)
    inside = levels.inside.folding(op, src.dtype, levels.inside.size)
    between = across.folding(op, src.dtype, across.size)
    parts = pieces.cut(src, counts)
    step = pieces.chunk(src.dtype.itemsize)
    widest = min(step, max(counts, default=0))
    room = levels.flat.room(across.size * widest, src.dtype)
    for low in range(0, max(counts, default=0), step):
        folded = []
        for host, members in enumerate(levels.hosts):
            inputs = [parts[rank].part(low, low + step) for rank in members]
            count = inputs[levels.place].count
            into = room.part(host * widest, host * widest + count)
            if host == levels.host:
                into = dst.part(low, low + step)
            folds.parts(levels.inside, inside, inputs, into, in_order=not op.commutative)
            folded.append(into)
        mine = folded[levels.host]
        folds.parts(across, between, folded, mine, in_order=not op.commutative)
        whole.leave(mine)


def all_to_all(
    levels: Levels,
    src: Buffer,
    dst: Buffer,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
) -> None:
    """Send piece ``j`` of ``src`` to rank ``j``; concatenate the received pieces in ``dst``.

    Every piece between hosts is different, so only the pieces inside a host take another way. In
    each step a rank exchanges pieces either inside its host or between hosts. Hosts with different
    numbers of ranks have no second level.
    """
    if not levels.even:
        moves.all_to_all(levels.flat, src, dst, send_counts, recv_counts)
        return
    hosts, common = levels.hosts, levels.common
    outs, intos = pieces.cut(src, send_counts), pieces.cut(dst, recv_counts)
    local = hosts[levels.host]
    levels.flat.copy(outs[local[levels.place]], intos[local[levels.place]])
    for apart in range(1, len(hosts)):
        for distance in range(common):
            to = hosts[(levels.host + apart) % len(hosts)][(levels.place + distance) % common]
            source = hosts[(levels.host - apart) % len(hosts)][(levels.place - distance) % common]
            levels.flat.exchange(outs[to], to, intos[source], source)
    for distance in range(1, common):
        to, source = (levels.place + distance) % common, (levels.place - distance) % common
        levels.inside.exchange(outs[local[to]], to, intos[local[source]], source)


def scatter(
    levels: Levels, src: Buffer | None, dst: Buffer, counts: Sequence[int], root: int
) -> None:
    """Cut ``src`` of ``root`` into ``counts`` and leave piece ``rank`` in ``dst``.

    The root sends each rank its piece directly, first to the other hosts.
    """
    host, place = levels.where(root)
    if src is None:
        if levels.host == host:
            levels.inside.recv(dst, place)
        else:
            levels.flat.recv(dst, root)
        return
    parts = pieces.cut(src, counts)
    for other, members in enumerate(levels.hosts):
        for rank in members if other != host else ():
            levels.flat.send(parts[rank], rank)
    for number, rank in enumerate(levels.hosts[host]):
        if number != place:
            levels.inside.send(parts[rank], number)
    levels.flat.copy(parts[root], dst)


def gather(
    levels: Levels, src: Buffer, dst: Buffer | None, counts: Sequence[int], root: int
) -> None:
    """Concatenate the ranks' ``src``, of ``counts[rank]`` elements, in ``dst`` of ``root``.

    Every rank sends its piece directly to the root, which receives those of its host first: the
    others are on their way meanwhile.
    """
    host, place = levels.where(root)
    if dst is None:
        if levels.host == host:
            levels.inside.send(src, place)
        else:
            levels.flat.send(src, root)
        return
    parts = pieces.cut(dst, counts)
    for number, rank in enumerate(levels.hosts[host]):
        if number == place:
            levels.flat.copy(src, parts[rank])
        else:
            levels.inside.recv(parts[rank], number)
    for other, members in enumerate(levels.hosts):
        for rank in members if other != host else ():
            levels.flat.recv(parts[rank], rank)

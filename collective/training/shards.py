"""Which rank has which part of what they share out: samples, or parameters of a model.

Every rank computes the same from the same numbers; an array that is cut is
:mod:`collective.algorithms.pieces`' affair. What is sent is state, each shard of which is kept on
several ranks, so that it is there when some are lost. A *shard* is what one rank has of it: trees
of plain data and arrays by number. A rank *holds* its own and copies of others', by the rank whose
they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from collective.algorithms import pieces
from collective.communicator import Communicator
from collective.errors import RankError

__all__ = [
    "Sharded",
    "block",
    "dealt",
    "givers",
    "owners",
    "rank_and_size",
    "shared_out",
    "turns",
    "with_copies",
]

Shard = dict[int, Any]


def rank_and_size(what: str, comm_or_rank_size: Communicator | tuple[int, int]) -> tuple[int, int]:
    """Return the rank and the number of ranks that a user has given, or has a communicator for.

    Raises:
        RankError: the rank is not one from 0 to ``size - 1``; says ``what`` refused it.
    """
    if isinstance(comm_or_rank_size, tuple):
        rank, size = comm_or_rank_size
    else:
        rank, size = comm_or_rank_size.rank, comm_or_rank_size.size
    if not 0 <= rank < size:
        raise RankError(f"{what}: rank {rank} of {size}; one from 0 to size - 1.")
    return rank, size


def block(length: int, rank: int, size: int, padded: bool = False) -> range:
    """Return the neighbouring indices that are a rank's.

    Args:
        length: how many indices there are.
        padded: whether neighbouring ranks share indices until all have equally many. If not, each
            index is one rank's, and the first ranks may have one more.
    """
    if padded:
        start = length * rank // size
        return range(start, start + -(-length // size))
    ends = pieces.limits(pieces.even(length, size))
    return range(ends[rank], ends[rank + 1])


def dealt(length: int, size: int, padded: bool = False, drop_last: bool = False) -> int:
    """Return how many indices the ranks get in turn, of ``length`` that there are.

    Args:
        padded: whether some come twice, until all ranks have equally many.
        drop_last: whether some are left out instead; it goes before ``padded``.
    """
    if drop_last:
        return length // size * size
    return -(-length // size) * size if padded else length


def turns(start: int, stop: int, rank: int, size: int, before: int = 0) -> range:
    """Return the indices from ``start`` on that are a rank's, if the ranks take them in turn.

    Args:
        stop: where they end.
        before: how many the ranks have taken of this round already; rank 0 took the first.
    """
    return range(start + (rank - before) % size, stop, size)


def owners(weights: Sequence[int], loads: list[int]) -> list[int]:
    """Return which rank has each of several things, so that their weights are near even.

    The heaviest first, each to whom has least: R. L. Graham, "Bounds on multiprocessing timing
    anomalies", SIAM Journal on Applied Mathematics 17, 1969; the heaviest load is at most 4/3 of
    what is possible.

    Args:
        weights: of the things.
        loads: what each rank has already; these are added to it.
    """
    found = [0] * len(weights)
    for index in sorted(range(len(weights)), key=lambda each: -weights[each]):
        owner = found[index] = loads.index(min(loads))
        loads[owner] += weights[index]
    return found


# -- copies of shards ------------------------------------------------------------------------


@runtime_checkable
class Sharded(Protocol):
    """What is cut over the ranks, and can be cut anew over those that are left."""

    def keep_shards(self) -> Any:
        """Return what this rank holds now, as a copy of its own. Collective."""

    def restore_shards(self, kept: Any, /) -> Any:
        """Make this rank's shard what :meth:`keep_shards` has returned."""

    def regain_shards(self, comm: Communicator, kept: Any, /) -> Any:
        """Cut what the ranks of ``comm`` hold over them. Collective.

        Args:
            comm: the ranks.
            kept: what :meth:`keep_shards` has returned; None of a rank that has joined.

        Raises:
            StateLostError: they do not hold all of it; on all of them.
        """


def with_copies(comm: Communicator, shard: Shard, copies: int) -> dict[int, Shard]:
    """Return what this rank holds: its shard, and those of the ``copies - 1`` ranks before it.

    Collective: every rank calls it.
    """
    held = {comm.rank: shard}
    for distance in range(1, min(copies, comm.size)):
        dst, src = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        # Sends may wait for who receives. The ranks are in gcd(size, distance) rings, and in each
        # there is one that receives first.
        sends_first = comm.rank >= math.gcd(comm.size, distance)
        if sends_first:
            comm.send_object(shard, dst)
        held[src] = comm.recv_object(src)
        if not sends_first:
            comm.send_object(shard, dst)
    return held


def givers(comm: Communicator, held: Mapping[int, Shard]) -> dict[int, int]:
    """Return which rank is to give each shard that somebody holds: the lowest that does.

    Collective: every rank calls it.
    """
    found: dict[int, int] = {}
    for rank, theirs in enumerate(comm.all_gather_object(sorted(held))):
        for each in theirs:
            found.setdefault(each, rank)
    return found


def shared_out(
    comm: Communicator,
    held: Mapping[int, Shard],
    giver: Mapping[int, int],
    owners: Sequence[int],
) -> Shard:
    """Return this rank's shard of what the ranks hold; each gets no more than that.

    Collective: every rank calls it.

    Args:
        held: what this rank holds.
        giver: as :func:`givers` returns it.
        owners: whose each number is now.
    """
    mine: Shard = {}
    for root in sorted(set(giver.values())):
        parts: list[Shard] = [{} for _ in range(comm.size)]
        for each, shard in held.items():
            if giver[each] == root == comm.rank:
                for number, value in shard.items():
                    parts[owners[number]][number] = value
        mine.update(comm.scatter_object(parts, root=root))
    return mine

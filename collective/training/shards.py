"""Which rank has which part of what they share out: samples, or parameters of a model.

Nothing here is sent: every rank computes the same from the same numbers. An array that is cut
is :mod:`collective.algorithms.pieces`' affair.
"""

from __future__ import annotations

from collections.abc import Sequence

from collective.algorithms import pieces
from collective.communicator import Communicator
from collective.errors import RankError

__all__ = ["block", "dealt", "owners", "rank_and_size", "turns"]


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

"""Division of work and state over ranks: samples, or parameters of a model.

Every rank computes the same division from the same numbers. :mod:`collective.algorithms.pieces`
cuts arrays. Only state is sent: each share is kept on several ranks, so that it survives the loss
of some of them. A *share* is one rank's part of the state: trees of plain data and arrays, by
number. A rank *holds* its own share and copies of other ranks' shares, by the rank that owns them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from collective.algorithms import pieces
from collective.communicator import Communicator
from collective.errors import RankError
from collective.start.session import comm_or_current

Share = dict[int, Any]


def rank_and_size(
    what: str, comm_or_rank_size: Communicator | tuple[int, int] | None
) -> tuple[int, int]:
    """Return the rank and the number of ranks, given as a tuple or by a communicator.

    If neither is given, they are those of the current communicator.

    Raises:
        RankError: the rank is not from 0 to ``size - 1``; the error names ``what`` as the caller.
    """
    if isinstance(comm_or_rank_size, tuple):
        rank, size = comm_or_rank_size
    else:
        comm = comm_or_current(comm_or_rank_size, what)
        rank, size = comm.rank, comm.size
    if not 0 <= rank < size:
        raise RankError(f"{what}: rank is {rank} (expected 0 to size - 1, where size is {size}).")
    return rank, size


def block(length: int, rank: int, size: int, padded: bool = False) -> range:
    """Return the neighbouring indices that belong to a rank.

    Args:
        length: number of indices.
        padded: if true, neighbouring ranks share indices so that all ranks have equally many. If
            false, each index belongs to one rank, and the first ranks may have one more.
    """
    if padded:
        start = length * rank // size
        return range(start, start + -(-length // size))
    ends = pieces.limits(pieces.even(length, size))
    return range(ends[rank], ends[rank + 1])


def dealt(length: int, size: int, padded: bool = False, drop_last: bool = False) -> int:
    """Return the number of indices that the ranks take in turn, out of ``length`` indices.

    Args:
        padded: if true, some indices are taken twice, so that all ranks have equally many.
        drop_last: if true, drop some indices instead; this overrides ``padded``.
    """
    if drop_last:
        return length // size * size
    return -(-length // size) * size if padded else length


def turns(start: int, stop: int, rank: int, size: int, before: int = 0) -> range:
    """Return the indices from ``start`` on that belong to a rank, if the ranks take turns.

    Args:
        stop: end of the indices, exclusive.
        before: number of indices of this round that ranks have taken already, from rank 0 on.
    """
    return range(start + (rank - before) % size, stop, size)


def owners(weights: Sequence[int], loads: list[int]) -> list[int]:
    """Return the owner of each of several items, so that the ranks' loads are nearly even.

    Items are assigned from the heaviest to the lightest, each to the rank with the least load:
    R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM Journal on Applied
    Mathematics 17, 1969. The heaviest load is at most 4/3 of the optimum.

    Args:
        weights: weights of the items.
        loads: present load of each rank; the function adds the items' weights to it, in place.
    """
    owner_of = [0] * len(weights)
    for index in sorted(range(len(weights)), key=lambda item: -weights[item]):
        owner = owner_of[index] = loads.index(min(loads))
        loads[owner] += weights[index]
    return owner_of


# -- after a loss of ranks -------------------------------------------------------------------


@runtime_checkable
class Rebindable(Protocol):
    """Object that holds a communicator, or its rank and size, and can change to another one."""

    def rebind(self, comm: Communicator, /) -> Any:
        """Continue with another communicator. Collective: every rank of ``comm`` calls it."""


@runtime_checkable
class Sharded(Protocol):
    """Object that is cut over the ranks, and can be cut again over the surviving ranks."""

    def keep_shards(self) -> Any:
        """Return a copy of the shares that this rank holds now. Collective."""

    def restore_shards(self, kept: Any, /) -> Any:
        """Restore this rank's share from the result of :meth:`keep_shards`."""

    def regain_shards(self, comm: Communicator, kept: Any, /) -> Any:
        """Cut the shares that the ranks of ``comm`` hold over these ranks. Collective.

        Args:
            comm: ranks that take part.
            kept: result of :meth:`keep_shards`; None on a rank that has joined.

        Raises:
            StateLostError: the ranks do not hold all shares; every rank raises it.
        """


def with_copies(comm: Communicator, share: Share, copies: int) -> dict[int, Share]:
    """Return this rank's share, and copies of the shares of the ``copies - 1`` ranks before it.

    Collective: every rank calls it.
    """
    held = {comm.rank: share}
    for distance in range(1, min(copies, comm.size)):
        dst, src = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        # A send may block until its receiver is ready. The ranks form gcd(size, distance) rings,
        # and in each ring one rank receives first, so that no ring blocks.
        sends_first = comm.rank >= math.gcd(comm.size, distance)
        if sends_first:
            comm.send_object(share, dst)
        held[src] = comm.recv_object(src)
        if not sends_first:
            comm.send_object(share, dst)
    return held


def givers(comm: Communicator, held: Mapping[int, Share]) -> dict[int, int]:
    """Return, for each share that some rank holds, the lowest rank that holds it.

    This rank has to give the share. Collective: every rank calls it.
    """
    giver_of: dict[int, int] = {}
    for rank, owners_held in enumerate(comm.all_gather_object(sorted(held))):
        for owner in owners_held:
            giver_of.setdefault(owner, rank)
    return giver_of


def shared_out(
    comm: Communicator,
    held: Mapping[int, Share],
    giver: Mapping[int, int],
    owners: Sequence[int],
) -> Share:
    """Return this rank's new share, cut from the shares that the ranks hold.

    A rank receives no more than its new share. Collective: every rank calls it.

    Args:
        held: shares that this rank holds.
        giver: result of :func:`givers`.
        owners: new owner of each number.
    """
    mine: Share = {}
    for root in sorted(set(giver.values())):
        parts: list[Share] = [{} for _ in range(comm.size)]
        for owner, share in held.items():
            if giver[owner] == root == comm.rank:
                for number, value in share.items():
                    parts[owners[number]][number] = value
        mine.update(comm.scatter_object(parts, root=root))
    return mine

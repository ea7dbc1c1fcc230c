"""State that is cut over the ranks, each shard kept on several: who has what when some are lost.

A *shard* is what one rank has of it: trees of plain data and arrays by number. A rank *holds* its
own and copies of others', by the rank whose they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collective.communicator import Communicator

__all__ = ["Sharded", "givers", "shared_out", "with_copies"]

Shard = dict[int, Any]


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

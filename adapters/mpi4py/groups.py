"""``MPI.Group``: ranks of the world in an order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .exceptions import CLASSES, MPIError, refusing
from .handles import Handle, OpaqueObject, reader

UNDEFINED = -32766
PROC_NULL = -2
IDENT, CONGRUENT, SIMILAR, UNEQUAL = range(4)


def members(ranks: Sequence[int], own: int) -> OpaqueObject:
    """Return what a group's handle names.

    Args:
        ranks: ranks of the members in the world.
        own: rank of this process in the world.
    """
    return OpaqueObject(ranks=tuple(ranks), own=own)


class Group(Handle, kind=True):
    """Ordered set of processes."""

    __slots__ = ()
    null_error, constants_end = CLASSES["ERR_GROUP"], True

    Get_size, size = reader(lambda group: len(group.ranks), "the number of members")
    Get_rank, rank = reader(
        lambda m: m.ranks.index(m.own) if m.own in m.ranks else UNDEFINED,
        "this process's rank in the group, or ``UNDEFINED``",
    )

    def Translate_ranks(
        self, ranks: Sequence[int] | None = None, group: Group | None = None
    ) -> list[int]:
        """Return the ranks that members of this group have in ``group``, or in the world."""
        own = self._live.ranks
        numbers = list(range(len(own))) if ranks is None else [int(rank) for rank in ranks]
        if any(rank != PROC_NULL and not 0 <= rank < len(own) for rank in numbers):
            raise MPIError(CLASSES["ERR_RANK"])
        theirs = None if group is None else {r: i for i, r in enumerate(group._live.ranks)}
        return [
            PROC_NULL if rank == PROC_NULL
            else own[rank] if theirs is None
            else theirs.get(own[rank], UNDEFINED)
            for rank in numbers
        ]  # fmt: skip

    def Compare(self, group: Group) -> int:
        """Return ``IDENT``, ``SIMILAR`` or ``UNEQUAL``."""
        ours, theirs = self._live.ranks, group._live.ranks
        if ours == theirs:
            return IDENT
        return SIMILAR if set(ours) == set(theirs) else UNEQUAL

    def Dup(self) -> Any:
        """Return a copy."""
        return type(self)._of(members(self._live.ranks, self._live.own))

    @classmethod
    def Union(cls, group1: Group, group2: Group) -> Any:
        """Return the members of the first group, then the others of the second."""
        return cls._joined(group1, group2, lambda a, b: [*a, *(r for r in b if r not in a)])

    @classmethod
    def Intersection(cls, group1: Group, group2: Group) -> Any:
        """Return the members of both groups, in the order of the first."""
        return cls._joined(group1, group2, lambda a, b: [r for r in a if r in b])

    Intersect = Intersection

    @classmethod
    def Difference(cls, group1: Group, group2: Group) -> Any:
        """Return the members of the first group that are not in the second."""
        return cls._joined(group1, group2, lambda a, b: [r for r in a if r not in b])

    @classmethod
    def _joined(cls, group1: Group, group2: Group, join: Callable[..., list[int]]) -> Any:
        first, second = group1._live, group2._live
        return cls._group(join(first.ranks, second.ranks), max(first.own, second.own))

    @classmethod
    def _group(cls, ranks: Sequence[int], own: int) -> Any:
        return cls._of(members(ranks, own) if ranks else GROUP_EMPTY._inner)

    def Incl(self, ranks: Sequence[int]) -> Any:
        """Return the members with these ranks, in this order."""
        return self._group([self._live.ranks[n] for n in self._checked(ranks)], self._live.own)

    def Excl(self, ranks: Sequence[int]) -> Any:
        """Return the members without these ranks."""
        out = {self._live.ranks[n] for n in self._checked(ranks)}
        return self._group([r for r in self._live.ranks if r not in out], self._live.own)

    def Range_incl(self, ranks: Sequence[tuple[int, int, int]]) -> Any:
        """Return the members of ranges (first, last, stride)."""
        return self.Incl(_ranged(ranks))

    def Range_excl(self, ranks: Sequence[tuple[int, int, int]]) -> Any:
        """Return the members outside of ranges (first, last, stride)."""
        return self.Excl(_ranged(ranks))

    def _checked(self, ranks: Sequence[int]) -> list[int]:
        numbers = [int(rank) for rank in ranks]
        if len(set(numbers)) < len(numbers) or any(not 0 <= n < self.size for n in numbers):
            raise MPIError(CLASSES["ERR_RANK"])
        return numbers

    Create_from_session_pset = refusing(
        "Group.Create_from_session_pset", "it has no sessions", "Use COMM_WORLD.Get_group()"
    )

    Free = Handle._free


def _ranged(ranges: Sequence[tuple[int, int, int]]) -> list[int]:
    ranks: list[int] = []
    for first, last, stride in ranges:
        if not stride:
            raise MPIError(CLASSES["ERR_ARG"])
        ranks += range(first, last + (1 if stride > 0 else -1), stride)
    return ranks


GROUP_NULL = Group._constant("GROUP_NULL")
GROUP_EMPTY = Group._constant("GROUP_EMPTY", members((), -1))

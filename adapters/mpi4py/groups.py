"""``MPI.Group``: ranks of the world in an order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .exceptions import CLASSES, MPIError, refuse
from .handles import Handle, Inner

__all__ = ["GROUP_EMPTY", "GROUP_NULL", "UNDEFINED", "Group"]

UNDEFINED = -32766
PROC_NULL = -2
IDENT, CONGRUENT, SIMILAR, UNEQUAL = range(4)


class Members(Inner):
    """Members of a group.

    Args:
        ranks: their ranks in the world.
        own: rank of this process in the world.
    """

    def __init__(self, ranks: Sequence[int], own: int) -> None:
        super().__init__()
        self.ranks = tuple(ranks)
        self.own = own


class Group(Handle, kind=True):
    """Ordered set of processes."""

    __slots__ = ()
    null_error = CLASSES["ERR_GROUP"]

    def _with(self, ranks: Sequence[int]) -> Any:
        if not ranks:
            return type(self)._of(GROUP_EMPTY._inner)
        return type(self)._of(Members(ranks, self._live.own))

    def Get_size(self) -> int:
        """Return the number of members."""
        return len(self._live.ranks)

    def Get_rank(self) -> int:
        """Return this process's rank in the group, or ``UNDEFINED``."""
        members = self._live
        return members.ranks.index(members.own) if members.own in members.ranks else UNDEFINED

    size = property(Get_size)
    rank = property(Get_rank)

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
        return type(self)._of(Members(self._live.ranks, self._live.own))

    @classmethod
    def Union(cls, group1: Group, group2: Group) -> Any:
        """Return the members of the first group, then the others of the second."""
        first = group1._live.ranks
        ranks = [*first, *(rank for rank in group2._live.ranks if rank not in first)]
        return cls._joined(group1, group2, ranks)

    @classmethod
    def Intersection(cls, group1: Group, group2: Group) -> Any:
        """Return the members of both groups, in the order of the first."""
        second = group2._live.ranks
        return cls._joined(group1, group2, [r for r in group1._live.ranks if r in second])

    Intersect = Intersection

    @classmethod
    def Difference(cls, group1: Group, group2: Group) -> Any:
        """Return the members of the first group that are not in the second."""
        second = group2._live.ranks
        return cls._joined(group1, group2, [r for r in group1._live.ranks if r not in second])

    @classmethod
    def _joined(cls, group1: Group, group2: Group, ranks: Sequence[int]) -> Any:
        own = max(group1._live.own, group2._live.own)
        return cls._of(Members(ranks, own) if ranks else GROUP_EMPTY._inner)

    def Incl(self, ranks: Sequence[int]) -> Any:
        """Return the members with these ranks, in this order."""
        return self._with([self._live.ranks[rank] for rank in self._checked(ranks)])

    def Excl(self, ranks: Sequence[int]) -> Any:
        """Return the members without these ranks."""
        out = set(self._checked(ranks))
        return self._with([r for rank, r in enumerate(self._live.ranks) if rank not in out])

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

    @classmethod
    def Create_from_session_pset(cls, session: Any, pset_name: str) -> Any:
        """Refuse sessions."""
        refuse("Group.Create_from_session_pset", "it has no sessions", "Use COMM_WORLD.Get_group()")

    def Free(self) -> None:
        """Clear the handle."""
        self._live  # noqa: B018
        self._inner = None


def _ranged(ranges: Sequence[tuple[int, int, int]]) -> list[int]:
    ranks: list[int] = []
    for first, last, stride in ranges:
        if not stride:
            raise MPIError(CLASSES["ERR_ARG"])
        ranks += range(first, last + (1 if stride > 0 else -1), stride)
    return ranks


GROUP_NULL = Group._constant("GROUP_NULL")
GROUP_EMPTY = Group._constant("GROUP_EMPTY", Members((), -1))

"""Communicators of some of the ranks, or of all of them once more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from collective.contract.backend import Backend
from collective.contract.stalls import Membership
from collective.errors import InvalidArgumentError, RankError

from .foreign_names import explained
from .grid import Grid
from .grouping import meet
from .life import Life
from .object_calls import ObjectCalls

if TYPE_CHECKING:
    from typing_extensions import Self

    from .lineage import Lineage

__all__ = ["Groups"]


class Groups(Life, ObjectCalls):
    """The part of a communicator that makes groups."""

    @explained
    def group(self, ranks: Sequence[int]) -> Self:
        """Return a communicator among ``ranks``, which become 0, 1, … in that order.

        Collective among ``ranks`` only: the others neither call it nor notice.

        Args:
            ranks: distinct ranks, this one among them, in the same order everywhere.

        Raises:
            RankError: a rank is outside, or twice there, or this one is missing.
            MismatchError: a member names other ranks, or in another order.
            AllocationError: a member has not enough file descriptors left; on every member.
            CollectiveTimeoutError: a member did not call it.

        See Also:
            MPI_Comm_create_group.
        """
        members = [self._rank("group", "rank", rank) for rank in ranks]
        if len(set(members)) != len(members):
            raise RankError(f"group: ranks {members}; each of them once {self._who}.")
        if self.rank not in members:
            raise RankError(
                f"group: ranks {members}; only these call it, and rank {self.rank} is none of them "
                f"{self._who}. Leave the call out here, or have every rank call split(color), with "
                "None where it takes no part."
            )

        def run() -> Any:
            made: list[Backend] = []

            def make() -> None:
                end = time.monotonic() + self.timeout
                meet(self._backend, members, self.timeout)
                left = max(0.001, end - time.monotonic())
                made.append(self._backend.group(members, left))

            self._transport(make)
            child = self._child(made[0], members)
            for listener in self._listeners:
                listener.group(child, members)
            return child

        child: Self = self._go("group", run, False)  # type: ignore[assignment]
        return child

    def _alike(
        self, backend: Backend, local_rank: int, local_size: int, lineage: Lineage | None = None
    ) -> Self:
        """Return a communicator over another transport, for the rest as this one is."""
        made = type(self)(
            backend,
            local_rank=local_rank,
            local_size=local_size,
            host=self.host,
            timeout=self.timeout,
            check=self._check,
            lineage=lineage,
        )
        made._open = self._open
        return made

    def _child(self, backend: Backend, members: Sequence[int]) -> Self:
        child = self._alike(backend, backend.rank, backend.size)
        child._membership = Membership(child, self._membership, members)
        if self._lineage is not None:
            child._lineage = self._lineage.group(backend, members, child._membership.name)
        if self.capabilities.across_hosts:
            hosts = child.all_gather_object(self.host)
            child.local_rank = hosts[: child.rank].count(self.host)
            child.local_size = hosts.count(self.host)
        self._children.add(child)
        return child

    @overload
    def split(self, color: int, key: int = 0) -> Self: ...

    @overload
    def split(self, color: None, key: int = 0) -> None: ...

    @overload
    def split(self, color: int | None, key: int = 0) -> Self | None: ...

    @explained
    def split(self, color: int | None, key: int = 0) -> Self | None:
        """Part the ranks by colour: return the communicator of those with this one's.

        Collective: every rank calls it.

        Args:
            color: an integer; ranks with the same come together. None takes no part.
            key: orders the ranks of a colour; ties by rank here.

        Returns:
            The new communicator, or None if ``color`` is None.

        See Also:
            MPI_Comm_split.
        """
        for name, value in (("color", color), ("key", key)):
            if value is None and name == "color":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise InvalidArgumentError(
                    f"split: {name} {value!r} is not an integer {self._who}."
                )
            if not -(2**63) <= value < 2**63:
                raise InvalidArgumentError(
                    f"split: {name} {value!r}; an integer of 64 bits {self._who}."
                )
        mine = np.array([[color is not None, color or 0, key]], np.int64)
        table = self._hosted().all_gather(mine, counts=[1] * self.size)
        if color is None:
            return None
        members = [r for r in range(self.size) if table[r, 0] and table[r, 1] == color]
        return self.group(sorted(members, key=lambda r: (table[r, 2], r)))

    @explained
    def split_by_host(self) -> Self:
        """Return the communicator of this host's ranks.

        Collective: every rank calls it.

        See Also:
            MPI_Comm_split_type with MPI_COMM_TYPE_SHARED.
        """
        hosts = self.all_gather_object(self.host)
        return self.group([r for r in range(self.size) if hosts[r] == self.host])

    @explained
    def dup(self) -> Self:
        """Return a communicator of the same ranks whose calls don't mix with these.

        Collective: every rank calls it.

        See Also:
            MPI_Comm_dup.
        """
        return self.group(range(self.size))

    @explained
    def grid(
        self,
        shape: int | Sequence[int | None] | None,
        periodic: bool | Sequence[bool] = False,
    ) -> Grid[Self]:
        """Return the ranks as the points of a grid: this one's coordinates and neighbours.

        It sends nothing. Ranks that give different shapes see different grids.

        Args:
            shape: how many ranks there are along each axis. What is None or -1 is computed, and
                several of these as near to each other as may be, the larger first: ``(None,
                None)`` is 3 by 2 of six ranks.
            periodic: whether the last rank of an axis is next to the first, for all axes or each.

        Raises:
            InvalidArgumentError: the grid has not as many points as there are ranks.

        See Also:
            MPI_Cart_create, MPI_Dims_create.
        """
        return Grid(self, shape, periodic)

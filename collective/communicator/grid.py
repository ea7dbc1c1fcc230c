"""Ranks as the points of a grid: who is next to whom, and who shares a line."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from functools import cache
from typing import Generic, Protocol, TypeVar

from collective.errors import InvalidArgumentError, RankError

from .status import NULL

__all__ = ["Grid"]


class _Groupable(Protocol):
    """What a grid needs of a communicator."""

    rank: int
    size: int

    def group(self: C, ranks: Sequence[int]) -> C: ...


C = TypeVar("C", bound=_Groupable)


class Grid(Generic[C]):
    """The ranks of a communicator as the points of a grid, the last axis fastest.

    Made by :meth:`Communicator.grid`. It sends nothing: each rank computes it by itself.

    Attributes:
        comm: the communicator whose ranks these are.
        shape: how many ranks there are along each axis.
        periodic: of each axis, whether its last rank is next to its first.
        coords: where this rank is.

    See Also:
        MPI_Cart_create, MPI_Cart_shift, MPI_Cart_sub, torch.distributed.DeviceMesh.
    """

    def __init__(
        self,
        comm: C,
        shape: int | Sequence[int | None] | None,
        periodic: bool | Sequence[bool] = False,
    ) -> None:
        self.comm = comm
        self.shape = _completed(comm, shape)
        axes = len(self.shape)
        each_axis = [periodic] * axes if isinstance(periodic, bool) else periodic
        if (
            not isinstance(each_axis, Sequence)
            or [type(each) for each in each_axis] != [bool] * axes
        ):
            raise InvalidArgumentError(
                f"grid: periodic {periodic!r}; True or False, or one of them for each of the "
                f"{axes} axes of {self.shape} {_who(comm)}."
            )
        self.periodic = tuple(each_axis)
        self.coords = self.coords_of(comm.rank)

    def __repr__(self) -> str:
        return f"<Grid {self.shape}, periodic {self.periodic}, this rank at {self.coords}>"

    def coords_of(self, rank: int) -> tuple[int, ...]:
        """Return where a rank is.

        Raises:
            RankError: there is no such rank.
        """
        if not 0 <= rank < self.comm.size:
            raise RankError(
                f"grid: rank {rank}; it has ranks 0 to {self.comm.size - 1} {_who(self.comm)}."
            )
        found = []
        for extent in reversed(self.shape):
            rank, at = divmod(rank, extent)
            found.append(at)
        return tuple(reversed(found))

    def rank_at(self, coords: Sequence[int]) -> int:
        """Return the rank at a point; ``collective.NULL`` outside of an axis that has ends.

        Raises:
            InvalidArgumentError: it has not as many coordinates as there are axes.
        """
        if len(coords) != len(self.shape):
            raise InvalidArgumentError(
                f"grid: coordinates {tuple(coords)}; one for each axis of {self.shape} "
                f"{_who(self.comm)}."
            )
        rank = 0
        for at, extent, periodic in zip(coords, self.shape, self.periodic):
            if not periodic and not 0 <= at < extent:
                return NULL
            rank = rank * extent + at % extent
        return rank

    def neighbours(self, axis: int, distance: int = 1) -> tuple[int, int]:
        """Return the ranks before and after this one along an axis.

        ``before, after = grid.neighbours(0)`` are the source and the destination of a shift by
        ``distance``: ``comm.sendrecv(x, after, before)``. Where the axis ends there is
        ``collective.NULL``, to and from which that call sends and receives nothing.

        Args:
            axis: counted from the end if it is negative.
            distance: how many points away.

        Raises:
            InvalidArgumentError: there is no such axis.
        """
        axis = self._axis(axis)
        at = self.coords[axis]
        before, after = (
            self.rank_at((*self.coords[:axis], there, *self.coords[axis + 1 :]))
            for there in (at - distance, at + distance)
        )
        return before, after

    def along(self, *axes: int) -> C:
        """Return a communicator of the ranks that differ from this one along ``axes`` alone.

        Along one axis its ranks are the coordinates; along several they are numbered as in the
        grid. Each call makes a new one.

        Collective among these ranks: in practice, every rank of the grid calls it.

        Raises:
            InvalidArgumentError: there is no such axis.
            As :meth:`Communicator.group`.
        """
        free = {self._axis(axis) for axis in axes}
        points = itertools.product(
            *(
                range(extent) if axis in free else (at,)
                for axis, (extent, at) in enumerate(zip(self.shape, self.coords))
            )
        )
        return self.comm.group([self.rank_at(point) for point in points])

    def _axis(self, axis: int) -> int:
        axes = len(self.shape)
        if not -axes <= axis < axes:
            raise InvalidArgumentError(
                f"grid: axis {axis}; the grid {self.shape} has {axes} {_who(self.comm)}."
            )
        return axis % axes


def _who(comm: _Groupable) -> str:
    return f"[rank {comm.rank} of {comm.size}]"


def _completed(comm: _Groupable, shape: int | Sequence[int | None] | None) -> tuple[int, ...]:
    """Return the shape of a grid of all ranks, with what is None or -1 in it computed."""
    given = shape if isinstance(shape, Sequence) else (shape,)
    try:
        found = [None if each in (None, -1) else operator.index(each) for each in given]
    except TypeError:
        found = [0]
    known = math.prod(each for each in found if each is not None)
    free = found.count(None)
    if any(each is not None and each < 1 for each in found):
        allowed = "positive integers, and None for what is to be computed"
    elif comm.size % known or (not free and known != comm.size):
        allowed = f"a shape of {comm.size} points, one for each rank; None computes an axis"
    else:
        computed = iter(_balanced(comm.size // known, free))
        return tuple(next(computed) if each is None else each for each in found)
    raise InvalidArgumentError(f"grid: shape {shape!r}; {allowed} {_who(comm)}.")


@cache
def _balanced(count: int, axes: int) -> tuple[int, ...]:
    """Return ``axes`` factors of ``count`` with the least sum, the largest first."""
    if axes < 2:
        return (count,) * axes
    divisors = [d for d in range(1, count + 1) if count % d == 0]
    cuts = [tuple(sorted((d, *_balanced(count // d, axes - 1)), reverse=True)) for d in divisors]
    return min(cuts, key=lambda factors: (sum(factors), factors))

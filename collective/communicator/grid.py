"""Ranks as the points of a grid, to find neighbours and to make groups along axes."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar

from collective.errors import InvalidArgumentError, RankError

from .calls.message import NULL

if TYPE_CHECKING:
    from .communicator import Communicator

#: Names of mpi4py's ``Cartcomm``, and the names here.
_FOREIGN = {
    "Get_cart_rank": "rank_at(coords)",
    "Get_coords": "coords, or grid.coords_of(rank)",
    "Get_dim": "shape",
    "Get_topo": "shape, grid.periodic, grid.coords",
    "Shift": "neighbours(axis)",
    "Sub": "along(axis)",
    "dims": "shape",
    "periods": "periodic",
    "shift": "neighbours(axis)",
}


C = TypeVar("C", bound="Communicator")


class Grid(Generic[C]):
    """Ranks of a communicator as the points of a grid, in row-major order (last axis fastest).

    :meth:`Communicator.grid` makes it. Each rank computes its grid by itself and sends nothing.

    Attributes:
        comm: communicator of the ranks.
        shape: number of ranks along each axis.
        periodic: for each axis, whether its last rank is next to its first.
        coords: coordinates of this rank.

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
        per_axis = [periodic] * axes if isinstance(periodic, bool) else periodic
        if (
            not isinstance(per_axis, Sequence)
            or [type(value) for value in per_axis] != [bool] * axes
        ):
            raise InvalidArgumentError(
                f"grid: periodic {periodic!r}; expected True or False, or one of them for each of "
                f"the {axes} axes of {self.shape} {_who(comm)}."
            )
        self.periodic = tuple(per_axis)
        self.coords = self.coords_of(comm.rank)

    if not TYPE_CHECKING:  # a type checker would conclude that a Grid has every name

        def __getattr__(self, name: str) -> NoReturn:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in _FOREIGN:
                text += f"; use grid.{_FOREIGN[name]}"
            elif hasattr(type(self.__dict__.get("comm")), name) and name[0] != "_":
                text += f"; the communicator has it: grid.comm.{name}"
            raise AttributeError(text, name=name, obj=self)

    def __repr__(self) -> str:
        return f"<Grid {self.shape}, periodic {self.periodic}, this rank at {self.coords}>"

    def coords_of(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of a rank.

        Raises:
            RankError: there is no such rank.
        """
        if not 0 <= rank < self.comm.size:
            raise RankError(
                f"grid: rank {rank}; the grid has ranks 0 to {self.comm.size - 1} "
                f"{_who(self.comm)}."
            )
        coords = []
        for extent in reversed(self.shape):
            rank, at = divmod(rank, extent)
            coords.append(at)
        return tuple(reversed(coords))

    def rank_at(self, coords: Sequence[int]) -> int:
        """Return the rank at a point; ``collective.NULL`` beyond the end of a non-periodic axis.

        Raises:
            InvalidArgumentError: the number of coordinates is not the number of axes.
        """
        if len(coords) != len(self.shape):
            raise InvalidArgumentError(
                f"grid: coordinates {tuple(coords)}; expected one for each axis of {self.shape} "
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

        After ``before, after = grid.neighbours(0)``, the call ``comm.sendrecv(x, after, before)``
        shifts ``x`` by ``distance`` points. Beyond the end of a non-periodic axis the neighbour is
        ``collective.NULL``, to which ``sendrecv`` sends nothing and from which it receives nothing.

        Args:
            axis: number of the axis; negative numbers count from the end.
            distance: distance of the neighbours in points.

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
        """Return a communicator of the ranks whose coordinates differ only along ``axes``.

        With one axis, a rank's number is its coordinate on that axis. With several axes, the ranks
        are numbered in the order of the grid. Each call makes a new communicator.

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
                f"grid: axis {axis}; the grid {self.shape} has {axes} axes {_who(self.comm)}."
            )
        return axis % axes


def _who(comm: Communicator) -> str:
    return f"[rank {comm.rank} of {comm.size}]"


def _completed(comm: Communicator, shape: int | Sequence[int | None] | None) -> tuple[int, ...]:
    """Return the shape of a grid of all ranks, with the lengths computed that are None or -1."""
    lengths = shape if isinstance(shape, Sequence) else (shape,)
    try:
        extents = [None if n in (None, -1) else operator.index(n) for n in lengths]
    except TypeError:
        extents = [0]
    known = math.prod(n for n in extents if n is not None)
    free = extents.count(None)
    if any(n is not None and n < 1 for n in extents):
        allowed = "expected positive integers, and None for lengths to compute"
    elif comm.size % known or (not free and known != comm.size):
        allowed = (
            f"expected a shape of {comm.size} points, one for each rank; None computes an axis"
        )
    else:
        computed = iter(_balanced(comm.size // known, free))
        return tuple(next(computed) if n is None else n for n in extents)
    raise InvalidArgumentError(f"grid: shape {shape!r}; {allowed} {_who(comm)}.")


@cache
def _balanced(count: int, axes: int) -> tuple[int, ...]:
    """Return ``axes`` factors of ``count`` with the least sum, the largest first."""
    if axes < 2:
        return (count,) * axes
    divisors = [d for d in range(1, count + 1) if count % d == 0]
    cuts = [tuple(sorted((d, *_balanced(count // d, axes - 1)), reverse=True)) for d in divisors]
    return min(cuts, key=lambda factors: (sum(factors), factors))

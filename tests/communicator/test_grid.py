"""``comm.grid``: coordinates, neighbours, lines, and a halo exchange without an ``if``."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import collective
from collective import NULL
from collective.communicator import Communicator, Grid
from collective.errors import InvalidArgumentError, RankError
from collective.testing import run_ranks


def grid(rank: int, size: int, shape: Any, periodic: Any = False) -> Any:
    """Return a rank's grid, built without a communicator: a grid needs only rank and size."""
    ranks: Any = SimpleNamespace(rank=rank, size=size)
    return Grid(ranks, shape, periodic)


@pytest.mark.parametrize(
    ("size", "shape", "wanted"),
    [
        (6, 6, (6,)),
        (6, None, (6,)),
        (6, (3, 2), (3, 2)),
        (6, (2, None), (2, 3)),
        (6, (-1, 2), (3, 2)),
        (12, (None, None), (4, 3)),
        (16, (None, None, None), (4, 2, 2)),
        (24, (None, 2, None), (4, 2, 3)),
        (7, (None, None), (7, 1)),
        (1, (None, None), (1, 1)),
        (1, (), ()),
    ],
)
def test_grid_shape_with_none_is_completed(size: int, shape: Any, wanted: Any) -> None:
    assert grid(0, size, shape).shape == wanted


@pytest.mark.parametrize(
    ("shape", "periodic"),
    [
        ((2, 2), False), ((4, None), False), ((0, None), False), ((-2, -3), False),
        ((2.0, 3), False), ("23", False), ((), False), ((2, 3), (True,)), ((2, 3), 1),
        ((2, 3), "tf"),
    ],
)  # fmt: skip
def test_grid_with_unsuitable_shape_raises_invalid_argument(shape: Any, periodic: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^grid: .*\[rank 0 of 6\]"):
        grid(0, 6, shape, periodic)


def test_grid_last_axis_varies_fastest() -> None:
    ranks = [grid(rank, 6, (2, 3)) for rank in range(6)]
    assert [member.coords for member in ranks] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [ranks[0].rank_at(member.coords) for member in ranks] == list(range(6))


@pytest.mark.parametrize(
    ("rank", "axis", "distance", "wanted"),
    [
        (0, 0, 1, (NULL, 3)),
        (3, 0, 1, (0, NULL)),
        (0, 1, 1, (2, 1)),
        (5, 1, 1, (4, 3)),
        (4, -1, 2, (5, 3)),
        (1, -1, -1, (2, 0)),
        (1, 0, 2, (NULL, NULL)),
        (1, 1, 0, (1, 1)),
    ],
)
def test_neighbours_are_null_at_ends_or_wrap_around(
    rank: int, axis: int, distance: int, wanted: tuple[int, int]
) -> None:
    assert grid(rank, 6, (2, 3), (False, True)).neighbours(axis, distance) == wanted


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (InvalidArgumentError, lambda g: g.neighbours(2)),
        (InvalidArgumentError, lambda g: g.along(-3)),
        (InvalidArgumentError, lambda g: g.rank_at((1,))),
        (RankError, lambda g: g.coords_of(6)),
    ],
)
def test_grid_arguments_out_of_range_raise(error: type[Exception], call: Any) -> None:
    with pytest.raises(error, match=r"^grid: "):
        call(grid(0, 6, (2, 3)))


def _lines(comm: Communicator) -> list[list[int]]:
    cube = comm.grid((2, 1, 2))
    mine = np.array([comm.rank])
    lines = [cube.along(axis) for axis in (0, 1, -1)] + [cube.along(2, 0)]
    assert [line.rank for line in lines[:3]] == list(cube.coords)
    return [line.all_gather(mine).tolist() for line in lines]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Shift", "'Grid' object has no attribute 'Shift'; use grid.neighbours(axis)"),
        ("Get_coords", "use grid.coords, or grid.coords_of(rank)"),
        ("sendrecv", "the communicator has it: grid.comm.sendrecv"),
        ("nonsense", "has no attribute 'nonsense'"),
    ],
)
def test_foreign_name_of_a_grid_names_the_remedy(name: str, text: str) -> None:
    with collective.init() as comm, pytest.raises(AttributeError, match=f"{re.escape(text)}$"):
        getattr(comm.grid(1), name)


def test_along_returns_ranks_that_differ_in_given_axes() -> None:
    all_ranks = [0, 1, 2, 3]
    assert run_ranks(4, _lines) == [
        [[0, 2], [0], [0, 1], all_ranks],
        [[1, 3], [1], [0, 1], all_ranks],
        [[0, 2], [2], [2, 3], all_ranks],
        [[1, 3], [3], [2, 3], all_ranks],
    ]


def _diffuse(comm: Communicator, field: Any, steps: int) -> Any:
    """Take steps of a five-point stencil, each rank on its own block.

    Values beyond the ends of the first axis are 0; the second axis is periodic.
    """
    grid = comm.grid((None, None), periodic=(False, True))
    rows, columns = (length // parts for length, parts in zip(field.shape, grid.shape))
    top, left = grid.coords[0] * rows, grid.coords[1] * columns
    u = np.zeros((rows + 2, columns + 2))
    u[1:-1, 1:-1] = field[top : top + rows, left : left + columns]
    for _ in range(steps):
        above, below = grid.neighbours(0)
        comm.sendrecv(u[-2], below, above, out=u[0])
        comm.sendrecv(u[1], above, below, out=u[-1])
        before, after = grid.neighbours(1)
        comm.sendrecv(u[:, -2], after, before, out=u[:, 0])
        comm.sendrecv(u[:, 1], before, after, out=u[:, -1])
        u[1:-1, 1:-1] += 0.1 * (
            u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1]
        )
    return top, left, u[1:-1, 1:-1]


def test_halo_exchange_with_null_neighbours_matches_single_rank() -> None:
    field = np.random.default_rng(0).random((9, 12))
    ((_, _, wanted),) = run_ranks(1, _diffuse, field, 5)
    result = np.zeros_like(field)
    for top, left, block in run_ranks(6, _diffuse, field, 5):
        result[top : top + block.shape[0], left : left + block.shape[1]] = block
    np.testing.assert_array_equal(result, wanted)


def test_group_with_wrong_ranks_raises_rank_error() -> None:
    def program(comm: Communicator) -> None:
        with pytest.raises(RankError, match=r"only these call it.*split\(color\), with None"):
            comm.group([1 - comm.rank])
        with pytest.raises(RankError, match=r"ranks \[0, 0\]; expected each rank once"):
            comm.group([0, 0])

    run_ranks(2, program)

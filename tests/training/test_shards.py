"""Who has which part of what the ranks share out."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collective.errors import RankError
from collective.training import shards

SIZES = st.integers(1, 9)
LENGTHS = st.integers(0, 100)


@given(LENGTHS, SIZES)
def test_blocks_follow_each_other_and_differ_by_one_at_most(length: int, size: int) -> None:
    blocks = [shards.block(length, rank, size) for rank in range(size)]
    assert [index for block in blocks for index in block] == list(range(length))
    assert len(blocks[0]) - len(blocks[-1]) <= 1


@given(LENGTHS, SIZES)
def test_padded_blocks_are_equally_long_and_leave_nothing_out(length: int, size: int) -> None:
    blocks = [shards.block(length, rank, size, padded=True) for rank in range(size)]
    assert {len(block) for block in blocks} == {-(-length // size)}
    assert {index for block in blocks for index in block} == set(range(length))


@given(LENGTHS, st.integers(0, 100), SIZES, st.integers(0, 20))
def test_each_index_is_the_turn_of_one_rank(
    start: int, length: int, size: int, before: int
) -> None:
    stop = start + length
    every = [list(shards.turns(start, stop, rank, size, before)) for rank in range(size)]
    assert sorted(index for mine in every for index in mine) == list(range(start, stop))
    for rank, mine in enumerate(every):
        assert all((before + index - start) % size == rank for index in mine)


@pytest.mark.parametrize(
    ("options", "expected"), [({}, 10), ({"padded": True}, 12), ({"drop_last": True}, 8),
                              ({"padded": True, "drop_last": True}, 8)]
)  # fmt: skip
def test_how_many_of_ten_four_ranks_get(options: dict[str, bool], expected: int) -> None:
    assert shards.dealt(10, 4, **options) == expected


@given(st.lists(st.integers(0, 1000), max_size=30), SIZES)
def test_owners_have_near_even_loads(weights: list[int], size: int) -> None:
    loads = [0] * size
    found = shards.owners(weights, loads)
    had = Counter(dict.fromkeys(range(size), 0))
    for weight, owner in zip(weights, found):
        had[owner] += weight
    assert loads == [had[rank] for rank in range(size)]
    assert max(loads) - min(loads) <= max(weights, default=0)


def test_owners_go_on_where_loads_are() -> None:
    loads = [5, 0]
    assert shards.owners([1, 3, 2], loads) == [0, 1, 1]
    assert loads == [6, 5]


@pytest.mark.parametrize("pair", [(2, 2), (-1, 2), (0, 0)])
def test_ranks_outside_are_refused_in_the_callers_name(pair: tuple[int, int]) -> None:
    with pytest.raises(RankError, match=f"Sampler: rank is {pair[0]} "):
        shards.rank_and_size("Sampler", pair)

"""Assignment of parts to ranks: blocks, turns and owners."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collective.errors import RankError
from collective.training import shares

SIZES = st.integers(1, 9)
LENGTHS = st.integers(0, 100)


@given(LENGTHS, SIZES)
def test_blocks_are_consecutive_and_differ_by_at_most_one(length: int, size: int) -> None:
    blocks = [shares.block(length, rank, size) for rank in range(size)]
    assert [index for block in blocks for index in block] == list(range(length))
    assert len(blocks[0]) - len(blocks[-1]) <= 1


@given(LENGTHS, SIZES)
def test_padded_blocks_have_equal_length_and_cover_all(length: int, size: int) -> None:
    blocks = [shares.block(length, rank, size, padded=True) for rank in range(size)]
    assert {len(block) for block in blocks} == {-(-length // size)}
    assert {index for block in blocks for index in block} == set(range(length))


@given(LENGTHS, st.integers(0, 100), SIZES, st.integers(0, 20))
def test_turns_assign_each_index_to_one_rank(
    start: int, length: int, size: int, before: int
) -> None:
    stop = start + length
    every = [list(shares.turns(start, stop, rank, size, before)) for rank in range(size)]
    assert sorted(index for indices in every for index in indices) == list(range(start, stop))
    for rank, indices in enumerate(every):
        assert all((before + index - start) % size == rank for index in indices)


@pytest.mark.parametrize(
    ("options", "expected"), [({}, 10), ({"padded": True}, 12), ({"drop_last": True}, 8),
                              ({"padded": True, "drop_last": True}, 8)]
)  # fmt: skip
def test_dealt_counts_indices_per_rank(options: dict[str, bool], expected: int) -> None:
    assert shares.dealt(10, 4, **options) == expected


@given(st.lists(st.integers(0, 1000), max_size=30), SIZES)
def test_owners_have_near_even_loads(weights: list[int], size: int) -> None:
    loads = [0] * size
    assignment = shares.owners(weights, loads)
    expected = Counter(dict.fromkeys(range(size), 0))
    for weight, owner in zip(weights, assignment):
        expected[owner] += weight
    assert loads == [expected[rank] for rank in range(size)]
    assert max(loads) - min(loads) <= max(weights, default=0)


def test_owners_continue_from_given_loads() -> None:
    loads = [5, 0]
    assert shares.owners([1, 3, 2], loads) == [0, 1, 1]
    assert loads == [6, 5]


@pytest.mark.parametrize("pair", [(2, 2), (-1, 2), (0, 0)])
def test_rank_and_size_out_of_range_names_caller(pair: tuple[int, int]) -> None:
    with pytest.raises(RankError, match=f"Sampler: rank is {pair[0]} "):
        shares.rank_and_size("Sampler", pair)

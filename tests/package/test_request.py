"""How errors name ranks and their calls."""

from __future__ import annotations

import pytest

from collective.request import differing, name_ranks


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([7], "rank 7"),
        ([0, 1], "ranks 0, 1"),
        ([2, 0, 1], "ranks 0-2"),
        ([0, 1, 3, 5, 6, 7], "ranks 0, 1, 3, 5-7"),
        ([*range(7), *range(8, 16)], "ranks 0-6, 8-15"),
        ([4, 4], "rank 4"),
    ],
)
def test_names_of_ranks_are_short(ranks: list[int], words: str) -> None:
    assert name_ranks(ranks) == words


def test_difference_groups_ranks_with_equal_calls() -> None:
    def header(rank: int) -> dict[str, object]:
        operation = "all_reduce" if rank == 2 else "barrier"
        return {"operation": operation, "dtype": None, "options": {}, "site": "x.py:9"}

    assert differing({rank: header(rank) for rank in range(6)}, absent=(7, 8, 9)) == (
        "  ranks 0, 1, 3-5: barrier() at x.py:9\n"
        "  rank 2: all_reduce() at x.py:9\n"
        "  ranks 7-9: has not come so far"
    )

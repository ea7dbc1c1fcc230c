"""The rows that a layer needs, compared with a direct count."""

from __future__ import annotations

import random

import numpy as np
import pytest

from collective.training.splits.windows import (
    Taken,
    Transposed,
    WindowRule,
    clip,
    exchange,
    overlap,
    pieces,
)

pytestmark = pytest.mark.quick


def _windows(seed: int, count: int) -> list[tuple[WindowRule, int]]:
    chance = random.Random(seed)
    cases = []
    while len(cases) < count:
        window = WindowRule(
            kernel=chance.randint(1, 6),
            stride=chance.randint(1, 4),
            before=chance.randint(-2, 7),
            after=chance.randint(-2, 7),
            dilation=chance.randint(1, 3),
        )
        n = chance.randint(1, 24)
        if n + window.before + window.after > 0:
            cases.append((window, n))
    return cases


def _correlate(x: np.ndarray, weights: np.ndarray, window: WindowRule) -> np.ndarray:
    """Compute the correlation directly, with zeros around ``x``."""
    far = 40
    padded = np.concatenate([np.zeros(far), x, np.zeros(far)])
    rows = range(window.length(len(x)))
    at = [[i * window.stride - window.before + window.dilation * j + far
           for j in range(window.kernel)] for i in rows]  # fmt: skip
    return np.array([padded[indices] @ weights for indices in at])


@pytest.mark.parametrize("seed", range(4))
def test_window_needs_all_rows_of_piece(seed: int) -> None:
    chance = np.random.default_rng(seed)
    for window, n in _windows(seed, 1250):
        x, weights = chance.standard_normal(n), chance.standard_normal(window.kernel)
        complete = _correlate(x, weights, window)
        parts = int(chance.integers(1, 9))
        results = []
        for out in pieces(len(complete), parts):
            inside, before, after = clip(window.needs(out), n)
            piece = np.concatenate(
                [np.zeros(before), x[inside.start : inside.stop], np.zeros(after)]
            )
            alone = window._replace(before=0, after=0)
            results.append(_correlate(piece, weights, alone)[: len(out)] if out else piece)
            assert alone.length(len(piece)) == len(out) or not out, (window, n, out)
        np.testing.assert_allclose(
            np.concatenate(results), complete, atol=1e-12, err_msg=f"{window} {n}"
        )


@pytest.mark.parametrize("seed", range(4))
def test_transposed_window_needs_all_rows_that_write_into_piece(seed: int) -> None:
    chance = random.Random(seed)
    for window, n in _windows(seed + 10, 1250):
        rule = Transposed(*window, extra=chance.randint(0, max(window.stride, window.dilation) - 1))
        total = rule.length(n)
        if not total:
            continue
        start = chance.randrange(total)
        out = range(start, chance.randint(start + 1, total))
        first = [i * rule.stride - rule.before for i in range(-60, 90)]
        reached = [[start + rule.dilation * j for j in range(rule.kernel)] for start in first]
        writes = [i - 60 for i, rows in enumerate(reached) if any(row in out for row in rows)]
        needs = rule.needs(out)
        assert set(writes) <= set(needs), (rule, n, out)
        if rule.dilation == 1:
            assert len(needs) == len(writes), (rule, n, out)


def test_window_length_matches_formula() -> None:
    assert WindowRule(3, before=1, after=1).length(10) == 10
    assert WindowRule(2, stride=2).length(9) == 4
    assert WindowRule(3, dilation=2).length(5) == 1


@pytest.mark.parametrize("n", [1, 2, 4])
def test_window_longer_than_axis_has_no_output(n: int) -> None:
    assert WindowRule(5).length(n) == 0
    assert WindowRule(5).needs(range(0)) == range(0)


def test_taken_rows_need_hull_of_their_sources() -> None:
    mirrored = Taken([(2,), (1,), (0,), (1,), (2,)].__getitem__, 5)
    assert mirrored.needs(range(2)) == range(1, 3)
    assert mirrored.length(3) == 5


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (range(-2, 3), (range(3), 2, 0)),
        (range(3, 7), (range(3, 5), 0, 2)),
        (range(-3, 8), (range(5), 3, 3)),
        (range(-4, -1), (range(0), 3, 0)),
        (range(6, 9), (range(5, 5), 0, 3)),
        (range(1, 4), (range(1, 4), 0, 0)),
    ],
    ids=["before", "behind", "both", "wholly before", "wholly behind", "within"],
)
def test_clip_separates_rows_from_padding(rows: range, expected: tuple[range, int, int]) -> None:
    assert clip(rows, 5) == expected


@pytest.mark.parametrize(("n", "parts"), [(10, 3), (2, 5), (0, 2), (7, 7)])
def test_pieces_match_numpy_array_split(n: int, parts: int) -> None:
    expected = [piece.tolist() for piece in np.array_split(np.arange(n), parts)]
    assert [list(piece) for piece in pieces(n, parts)] == expected


def test_exchange_reaches_distant_ranks() -> None:
    have = pieces(4, 4)
    want = [range(4), range(-1, 2), range(0), range(2, 9)]
    sent = exchange(have, want)
    for destination, rows in enumerate(want):
        received = [row for source in sent for row in source[destination]]
        assert received == [row for row in rows if 0 <= row < 4]


def test_overlap_of_separate_ranges_is_empty() -> None:
    assert not overlap(range(2), range(5, 9))

"""Detection of arrays that share elements; calls use it to refuse an output."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from collective.memory.overlap import find_overlap

A = np.zeros(24)

APART: dict[str, list[Any]] = {
    "contiguous": [A],
    "transposed": [A.reshape(4, 6).T],
    "every other element": [A[::2], A[1::2]],
    "neighbours": [A[:5], A[5:]],
    "columns": [A.reshape(4, 6)[:, :3], A.reshape(4, 6)[:, 3:]],
    "an expanded axis of length 1": [as_strided(A, (1, 4), (0, 8))],
    "without elements": [A[3:3], A],
    "interlocking strides": [as_strided(A, (3, 2), (16, 24))],
}
SHARED: dict[str, tuple[list[Any], tuple[int, int]]] = {
    "expanded": ([as_strided(A, (4,), (0,))], (0, 0)),
    "windows": ([A[:1], as_strided(A[4:], (4, 3), (8, 8))], (1, 1)),
    "half an element": ([as_strided(A, (4,), (4,))], (0, 0)),
    "one array twice": ([A, A], (0, 1)),
    "the end of one and the beginning of the next": ([A[4:8], A[12:], A[:5]], (0, 2)),
    "the far one of three": ([A[:10], A[10:12], A[9:10]], (0, 2)),
    "forwards and backwards": ([A[:5], A[8:3:-1]], (0, 1)),
    "another dtype": ([A[:2], A.view(np.int32)[3:5]], (0, 1)),
}


@pytest.mark.parametrize("case", APART)
def test_find_overlap_of_separate_elements_is_none(case: str) -> None:
    assert find_overlap(APART[case]) is None


@pytest.mark.parametrize("case", SHARED)
def test_find_overlap_names_arrays_that_share_memory(case: str) -> None:
    arrays, pair = SHARED[case]
    assert find_overlap(arrays) == pair

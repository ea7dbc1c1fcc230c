"""The tree of virtual shards: its nodes, and folds of some of its leaves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from collective.algorithms.folds import Folding
from collective.algorithms.trees import Leaves, Merging, NodeFolds, nodes
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from collective.ops import as_op, user_op

_TOTALS = [1, 2, 3, 5, 7, 8, 13, 64]


def _leaves(values: list[str]) -> str:
    """Return the fold of the leaves as a text with parentheses; the left half is a power of two."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    return f"({_leaves(values[:half])} {_leaves(values[half:])})"


@pytest.mark.parametrize("total", _TOTALS)
def test_nodes_cover_a_range_in_order(total: int) -> None:
    for start, stop in itertools.combinations(range(total + 1), 2):
        found = nodes(start, stop, total)
        assert [*itertools.chain.from_iterable(range(*span) for span in found)] == [
            *range(start, stop)
        ], (start, stop)


@pytest.mark.parametrize("total", _TOTALS)
def test_nodes_are_at_most_two_of_each_size(total: int) -> None:
    for start, stop in itertools.combinations(range(total + 1), 2):
        found = nodes(start, stop, total)
        assert len(found) <= max(1, 2 * (total - 1).bit_length()), (start, stop)


def test_aligned_range_is_one_node() -> None:
    assert nodes(4, 8, 16) == [Leaves(4, 8)]


@pytest.mark.parametrize("total", _TOTALS)
def test_merging_leaves_gives_the_nodes_of_their_range(total: int) -> None:
    for start, stop in itertools.combinations(range(total + 1), 2):
        merging = Merging(total, first=0)
        for leaf in range(start, stop):
            merging.push(Leaves(leaf, leaf + 1), merging.room(), owned=True)
        found = [entry.span for entry in merging.stack]
        assert found == nodes(start, stop, total), (start, stop)


@pytest.mark.parametrize("total", _TOTALS)
def test_folds_of_two_ranges_are_joined_as_the_whole_tree(total: int) -> None:
    for middle in range(total + 1):
        values, spans = [], []
        for start, stop in ((0, middle), (middle, total)):
            leaves = [Leaves(leaf, leaf + 1) for leaf in range(start, stop)]
            values += _folded(leaves, [str(leaf) for leaf in range(start, stop)], total)
            spans += nodes(start, stop, total)
        assert _folded(spans, values, total) == [_leaves([str(leaf) for leaf in range(total)])]


def _folded(spans: list[Leaves], values: list[str], total: int) -> list[str]:
    """Fold texts along a tree. The elements of its buffers are the indices of the texts."""
    texts = list(values)

    def join(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        texts.append(f"({texts[a[0]]} {texts[b[0]]})")
        return np.array([len(texts) - 1])

    dtype = BY_NAME["int64"]
    folds = NodeFolds(spans, total, Folding(user_op(join), dtype, total), enters=False)
    outs = [Buffer.empty(1, dtype) for _ in folds.results]
    folds.run([Buffer(np.array([n]), dtype) for n in range(len(values))], outs)
    return [texts[out.array[0]] for out in outs]


def test_fold_of_many_shards_keeps_few_arrays_as_scratch() -> None:
    leaves = [Leaves(leaf, leaf + 1) for leaf in range(1000)]
    merging = Merging(4096, first=0)
    for leaf in leaves:
        merging.push(leaf, merging.room(), owned=True)
    assert merging.scratch <= 11


def test_scaled_inputs_are_divided_before_they_are_folded() -> None:
    dtype = BY_NAME["float16"]
    folding = Folding(as_op("avg"), dtype, 2)
    folds = NodeFolds([Leaves(0, 1), Leaves(1, 2)], 2, folding, enters=True)
    out = Buffer.empty(1, dtype)
    # The sum would overflow.
    inputs = [Buffer(np.full(1, 60000, np.float16), dtype) for _ in range(2)]
    folds.run(inputs, [out])
    assert out.array[0] == np.float16(60000)
    assert inputs[0].array[0] == np.float16(60000)

"""Scratch of folds along a tree, which a thread keeps from call to call."""

from __future__ import annotations

import threading

import numpy as np

from collective.algorithms import trees
from collective.algorithms.folds import Folding
from collective.algorithms.trees import Leaves, NodeFolds
from collective.memory.buffer import Buffer
from collective.memory.dtypes import BY_NAME
from collective.ops import as_op

FLOAT64 = BY_NAME["float64"]


def fold(count: int) -> None:
    spans = [Leaves(leaf, leaf + 1) for leaf in range(4)]
    folds = NodeFolds(spans, 4, Folding(as_op("sum"), FLOAT64, 4), enters=True)
    folds._in_c = None  # C has scratch of its own
    rows = np.random.default_rng(count).standard_normal((4, count))
    out = np.empty(count)
    folds.run([Buffer(row, FLOAT64) for row in rows], [Buffer(out, FLOAT64)])
    assert np.array_equal(out, (rows[0] + rows[1]) + (rows[2] + rows[3]))


def test_second_fold_uses_scratch_of_first() -> None:
    def body() -> None:
        fold(200_003)
        memory = trees._kept.memory
        assert memory is not None
        fold(200_003)
        fold(5)
        kept.append(trees._kept.memory is memory)

    kept: list[bool] = []
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert kept == [True]


def test_fold_within_fold_gets_other_scratch() -> None:
    first = trees._kept.take(100)
    assert trees._kept.take(100) is not first

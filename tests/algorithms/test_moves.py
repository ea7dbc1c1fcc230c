"""The default algorithms that move elements, over a transport that has only send and recv.

Every operation runs in both regimes. ``rounds`` makes starting a message so expensive that the
algorithms with few rounds are chosen at any size; ``bytes`` makes it free. The tests compare
results with NumPy's, and check that inputs and the memory around outputs are unchanged. The
public suite, in ``test_conformance``, tests long arrays with the real choice of algorithms.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collective.contract.backend import Backend
from collective.deadline import Deadline
from collective.memory.buffer import Buffer
from collective.request import Request
from tests.support.algorithm_cases import (
    INT64,
    REGIMES,
    ROOTS,
    TIMEOUT,
    Array,
    Output,
    counts_,
    in_regime,
    kinds,
    places,
    regimes,
    same,
    sizes,
    uneven,
)
from tests.support.loopback import Loopback, Rendezvous, run

pytestmark = pytest.mark.quick


@kinds
@sizes
def test_barrier_returns_after_last_rank_has_entered(kind: type[Backend], size: int) -> None:
    inside: list[int] = []

    def body(backend: Backend) -> int:
        inside.append(backend.rank)
        backend.plan(Request("barrier"))(None, None, Deadline(TIMEOUT))
        return len(inside)

    assert run(size, body, kind) == [size] * size


@kinds
@regimes
@counts_
@pytest.mark.parametrize(("size", "root"), ROOTS)
def test_broadcast_delivers_root_array(
    kind: type[Backend], regime: str, count: int, size: int, root: int
) -> None:
    def body(backend: Backend) -> Array:
        out = Output(count, INT64)
        if backend.rank == root:
            out.buffer.array[:] = np.arange(count) * 3
        backend.plan(Request("broadcast", root=root))(out.buffer, out.buffer, Deadline(TIMEOUT))
        return out.checked()

    with in_regime(regime):
        results = run(size, body, kind)
    same(np.stack(results), np.tile(np.arange(count) * 3, (size, 1)))


def blocks(counts: list[int]) -> list[Array]:
    """Return each rank's contribution; no value occurs twice."""
    ends = list(itertools.accumulate(counts))
    return [np.arange(end - n, end, dtype=np.int64) for n, end in zip(counts, ends, strict=True)]


def check_gather(
    kind: type[Backend], counts: list[int], root: int | None, in_place: bool = False
) -> None:
    """Check ``gather`` to ``root``, or ``all_gather`` if ``root`` is None."""
    mine, expected = blocks(counts), np.arange(sum(counts))

    def body(backend: Backend) -> Array | None:
        rank = backend.rank
        out = Output(len(expected), INT64) if root in (None, rank) else None
        src = Buffer(mine[rank].copy(), INT64)
        if in_place and out is not None:
            start = sum(counts[:rank])
            src = out.buffer.part(start, start + counts[rank])
            src.array[:] = mine[rank]
        if root is None:
            assert out is not None
            request = Request("all_gather", elements=counts)
            backend.plan(request)(src, out.buffer, Deadline(TIMEOUT))
        else:
            request = Request("gather", root=root, elements=counts)
            backend.plan(request)(src, None if out is None else out.buffer, Deadline(TIMEOUT))
        same(src.array, mine[rank])
        return None if out is None else out.checked()

    for rank, result in enumerate(run(len(counts), body, kind)):
        if result is None:
            assert root not in (None, rank)
        else:
            same(result, expected)


def check_scatter(kind: type[Backend], counts: list[int], root: int) -> None:
    expected = np.arange(sum(counts))

    def body(backend: Backend) -> Array:
        src = Buffer(expected.copy(), INT64) if backend.rank == root else None
        out = Output(counts[backend.rank], INT64)
        request = Request("scatter", root=root, elements=counts)
        backend.plan(request)(src, out.buffer, Deadline(TIMEOUT))
        if src is not None:
            same(src.array, expected)
        return out.checked()

    same(np.concatenate(run(len(counts), body, kind)), expected)


def check_all_to_all(kind: type[Backend], table: list[list[int]]) -> None:
    """Check ``all_to_all`` where rank i sends ``table[i][j]`` elements to rank j."""
    size = len(table)

    def pieces_of(rank: int) -> list[Array]:
        return [rank * 10_000 + to * 100 + np.arange(n) for to, n in enumerate(table[rank])]

    def body(backend: Backend) -> Array:
        rank = backend.rank
        arriving = [row[rank] for row in table]
        src = Buffer(np.concatenate(pieces_of(rank)), INT64)
        out = Output(sum(arriving), INT64)
        request = Request("all_to_all", elements=table[rank], incoming=arriving)
        backend.plan(request)(src, out.buffer, Deadline(TIMEOUT))
        same(src.array, np.concatenate(pieces_of(rank)))
        return out.checked()

    results = run(size, body, kind)
    expected = [np.concatenate([pieces_of(i)[rank] for i in range(size)]) for rank in range(size)]
    same(np.concatenate(results), np.concatenate(expected))


@kinds
@regimes
@counts_
@places
@pytest.mark.parametrize(("size", "root"), ROOTS)
def test_gather_of_uneven_counts_matches_numpy(
    kind: type[Backend], regime: str, count: int, in_place: bool, size: int, root: int
) -> None:
    with in_regime(regime):
        check_gather(kind, uneven(size, count), root, in_place)


@kinds
@regimes
@counts_
@places
@sizes
def test_all_gather_of_uneven_counts_matches_numpy(
    kind: type[Backend], regime: str, count: int, in_place: bool, size: int
) -> None:
    with in_regime(regime):
        check_gather(kind, uneven(size, count), None, in_place)


@kinds
@regimes
@counts_
@pytest.mark.parametrize(("size", "root"), ROOTS)
def test_scatter_of_uneven_counts_matches_numpy(
    kind: type[Backend], regime: str, count: int, size: int, root: int
) -> None:
    with in_regime(regime):
        check_scatter(kind, uneven(size, count), root)


@kinds
@counts_
@sizes
def test_all_to_all_of_uneven_counts_matches_numpy(
    kind: type[Backend], count: int, size: int
) -> None:
    check_all_to_all(kind, [[max(0, count + i - 2 * j) for j in range(size)] for i in range(size)])


# -- any counts ---------------------------------------------------------------------

any_counts = st.lists(st.integers(0, 40), min_size=1, max_size=6)
any_regime = st.sampled_from(sorted(REGIMES))
any_kind = st.sampled_from([Loopback, Rendezvous])
examples = settings(max_examples=25, deadline=None)


@examples
@given(any_kind, any_regime, any_counts, st.data())
def test_gather_and_scatter_of_random_counts_match_numpy(
    kind: type[Backend], regime: str, counts: list[int], data: st.DataObject
) -> None:
    root = data.draw(st.integers(0, len(counts) - 1))
    with in_regime(regime):
        check_gather(kind, counts, root)
        check_gather(kind, counts, None)
        check_scatter(kind, counts, root)


@examples
@given(any_kind, st.integers(1, 5), st.data())
def test_all_to_all_of_random_counts_matches_numpy(
    kind: type[Backend], size: int, data: st.DataObject
) -> None:
    row = st.lists(st.integers(0, 20), min_size=size, max_size=size)
    check_all_to_all(kind, data.draw(st.lists(row, min_size=size, max_size=size)))

"""Comparing results (``COLLECTIVE_CHECK=results``) over MPI libraries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from collective.testing import RankPool
from tests.communicator.test_results import flipped_all_reduce, several_calls
from tests.support.mpi_launches import INSTALLED, launch_of


@pytest.fixture(scope="module", params=INSTALLED)
def three(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    with RankPool(3, "mpi", timeout=60.0, mpiexec=launch_of(request.param)) as pool:
        yield pool


def test_sound_calls_raise_nothing(three: RankPool) -> None:
    assert three.run(several_calls, check="results") == [[14]] * 3


def test_flip_in_all_reduce_names_rank_on_all_ranks(three: RankPool) -> None:
    for ranks, text, after in three.run(flipped_all_reduce, check="results"):
        assert ranks == (1,)
        assert text.startswith("all_reduce: rank 1 has another result than ranks 0, 2, in call ")
        assert after == [0, 1, 2]

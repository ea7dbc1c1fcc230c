"""Ranks of a pool, of which one dies before all have met."""

from __future__ import annotations

import os

import pytest

from collective.backends.shm import ShmBackend
from collective.communicator import Communicator
from collective.contract.world import World
from collective.deadline import Deadline
from collective.testing import RankPool, RanksFailedError


class DyingBackend(ShmBackend):
    """Transport whose rank 1 dies while the ranks connect."""

    @classmethod
    def connect(cls, world: World, deadline: Deadline) -> ShmBackend:
        if world.rank == 1:
            os._exit(7)
        return super().connect(world, deadline)


def rank_of(comm: Communicator) -> int:
    return comm.rank


def test_ranks_of_a_pool_learn_that_one_has_died_before_they_met() -> None:
    with (
        RankPool(2, DyingBackend, timeout=600.0) as pool,
        pytest.raises(
            RanksFailedError, match="rank 1 of 2 ended before all ranks had met: its pro"
        ),
    ):
        pool.run(rank_of)

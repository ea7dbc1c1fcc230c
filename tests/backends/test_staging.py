"""Arrays of GPUs on transports of the CPU: the public suite."""

from __future__ import annotations

import os
from collections.abc import Callable

from collective.backends.shm import ShmBackend
from collective.contract.world import World
from collective.testing import parametrize_with_checks
from tests.fakes import environment


class StagedShm(ShmBackend):
    """Shared memory for arrays of the fake's GPUs, which go through the host's."""

    name = "shm-staged"

    @classmethod
    def connect(cls, world: World, timeout: float) -> StagedShm:
        os.environ.update(environment(delay_us=20, log=0))
        return super().connect(world, timeout)


# Where an array is depends on no number of ranks.
@parametrize_with_checks(StagedShm, sizes=(2,), kind="cuda")
def test_staged(check: Callable[[], None]) -> None:
    check()

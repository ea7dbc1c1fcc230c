"""The public conformance suite with GPU arrays on a CPU transport."""

from __future__ import annotations

import os
from collections.abc import Callable

from collective.backends.shm import ShmBackend
from collective.contract.world import World
from collective.testing import parametrize_with_checks
from tests.fakes import environment


class StagedShm(ShmBackend):
    """Shared memory for arrays on the fake's GPUs, which are staged in host memory."""

    name = "shm-staged"

    @classmethod
    def connect(cls, world: World, timeout: float) -> StagedShm:
        os.environ.update(environment(delay_us=20, log=0))
        return super().connect(world, timeout)


# Staging does not depend on the number of ranks, so two ranks are enough.
@parametrize_with_checks(StagedShm, sizes=(2,), kind="cuda")
def test_staged_shm_passes_suite(check: Callable[[], None]) -> None:
    check()

"""Ranks with CuPy's arrays on the ABI fake, in processes that use nothing else."""

from __future__ import annotations

import os
from typing import Any

from fakes import environment
from pretended_cupy import pretend

from collective.backends.mpi import MpiBackend
from collective.backends.mpi.cuda_aware import CudaAwareMpi
from collective.backends.nccl import NcclBackend
from collective.backends.shm import ShmBackend
from collective.contract.world import World

__all__ = ["AwareMpi", "Mpi", "Nccl", "Shm"]


class _OnTheFake:
    @classmethod
    def connect(cls, world: World, timeout: float) -> Any:
        os.environ.update(environment(delay_us=200))
        pretend()
        return super().connect(world, timeout)  # type: ignore[misc]


class Shm(_OnTheFake, ShmBackend):
    """Through page-locked memory."""


class Nccl(_OnTheFake, NcclBackend):
    """NCCL's own."""


class Mpi(_OnTheFake, MpiBackend):
    """Through page-locked memory, as on a library that knows no GPUs."""

    name = "mpi-staged"


class AwareMpi(_OnTheFake, CudaAwareMpi):
    """On a library that takes the memory of GPUs."""

    name = "mpi-aware"

"""The part of mpi4py's names that mpi4jax's tests use, over this package's communicators."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import collective
from collective.communicator import Communicator


@dataclass(frozen=True)
class Intracomm:
    """Communicator with the methods of mpi4py's."""

    inner: Communicator

    def Get_rank(self) -> int:
        return self.inner.rank

    def Get_size(self) -> int:
        return self.inner.size

    rank = property(Get_rank)
    size = property(Get_size)


@dataclass
class Status:
    """Status that knows who sent the message."""

    source: int = -1

    def Get_source(self) -> int:
        return self.source


COMM_WORLD = Intracomm(collective.init())
SUM, PROD, MIN, MAX, LAND, LOR = "sum", "prod", "min", "max", "land", "lor"


def get_vendor() -> Any:
    return "collective", collective.__version__


MPI = sys.modules[__name__]  # for `from mpi4py import MPI`

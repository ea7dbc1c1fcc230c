"""Threads with communicators of NCCL over the ABI fake, for the tests of the engine of ``nccl``.

Use the fixture :func:`ranks`, or :func:`fresh` for another version of NCCL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest

from collective import cuda
from collective.backends.nccl.engine import NcclComm
from collective.backends.nccl.library import NcclLibrary, load
from collective.errors import CollectiveTimeoutError
from tests import fakes

__all__ = [
    "DEADLINE_S",
    "FLOAT32",
    "NEW",
    "OLD",
    "SUM",
    "Array",
    "Ranks",
    "at",
    "destroy",
    "fresh",
    "ranks",
    "until",
    "within",
]

T = TypeVar("T")

NEW, OLD = 22907, 21903  # all features; no windows
FLOAT32, SUM = 7, 0
DEADLINE_S = 30.0

Array = np.ndarray[Any, Any]


def within(seconds: float = DEADLINE_S) -> Callable[[], None]:
    """Return a poll function that raises CollectiveTimeoutError after ``seconds``."""
    end = time.monotonic() + seconds

    def poll() -> None:
        if time.monotonic() > end:
            raise CollectiveTimeoutError("the test's deadline passed")

    return poll


class Ranks:
    """Ranks in threads of this process, each with a fake GPU."""

    def __init__(self, version: int) -> None:
        self.fake = fakes.Fake(version)
        self.library: NcclLibrary = load(fakes.library_path(version))

    def run(self, size: int, function: Callable[[int], T]) -> list[T]:
        """Run ``function(rank)`` for each rank in a separate thread; return the results."""
        with ThreadPoolExecutor(size) as pool:
            return [each.result() for each in [pool.submit(function, rank) for rank in range(size)]]

    def create(self, size: int) -> list[NcclComm]:
        """Create a communicator of ``size`` ranks; return each rank's handle."""
        unique_id = self.library.unique_id()

        def one(rank: int) -> NcclComm:
            return NcclComm.create(self.library, unique_id, rank, size, cuda.device(rank), within())

        return self.run(size, one)

    def stream(self, rank: int) -> int:
        """Return the handle of a new stream on a rank's GPU."""
        return self.fake.stream(rank)

    def wait(self, stream: int, rank: int) -> None:
        """Wait for the work of a stream on a rank's GPU."""
        self.fake.synchronize(stream, rank)

    def sums(self, comms: list[NcclComm]) -> list[list[float]]:
        """Return each rank's result of an all-reduce of ``rank + 1``."""

        def one(index: int) -> list[float]:
            comm = comms[index]
            x, out = np.full(3, comm.rank + 1, np.float32), np.zeros(3, np.float32)
            ordinal = comm.device.ordinal
            stream = self.stream(ordinal)
            comm.all_reduce(at(x), at(out), 3, FLOAT32, SUM, stream)
            self.wait(stream, ordinal)
            return out.tolist()

        return self.run(len(comms), one)


def at(array: Array) -> int:
    """Return the address of an array's memory."""
    address: int = array.__array_interface__["data"][0]
    return address


def destroy(ranks: Ranks, comms: list[NcclComm]) -> None:
    """Destroy the communicators of all ranks."""
    ranks.run(len(comms), lambda rank: comms[rank].destroy(within()))


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Ranks]]:
    """Return a function that makes ranks on the fake of a version, which has the driver, too."""
    used_fakes: list[fakes.Fake] = []

    def start(version: int = NEW) -> Ranks:
        for name, value in fakes.environment(version).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(cuda, "_devices", {})
        ranks = Ranks(version)
        used_fakes.append(ranks.fake)
        ranks.fake.knob("host_pointers", 1)
        ranks.fake.knob("delay_us", 0)
        ranks.fake.clear_log()
        return ranks

    yield start
    for fake in used_fakes:
        for knob, value in (("host_pointers", 0), ("delay_us", 40), ("init_polls", 0)):
            fake.knob(knob, value)


@pytest.fixture
def ranks(fresh: Callable[[int], Ranks]) -> Ranks:
    """Return ranks on the fake of the newest version."""
    return fresh(NEW)


def until(look: Callable[[], T | None]) -> T:
    """Call ``look`` until it returns a value, and return the value."""
    poll = within()
    while True:
        value = look()
        if value is not None:
            return value
        poll()

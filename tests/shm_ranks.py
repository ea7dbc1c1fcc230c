"""Pools of processes over shared memory for the tests of ``shm``, kept for a module."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from collective.testing import RankPool

__all__ = ["Ranks", "messages", "shm"]


class Ranks:
    """Runs functions on ranks that are processes; starts them when they are first needed."""

    def __init__(self, single_copy: str) -> None:
        self._single_copy = single_copy
        self._pools: dict[int, RankPool] = {}

    def __call__(self, size: int, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if size not in self._pools:
            self._pools[size] = RankPool(size, "shm", timeout=20.0)
        os.environ["COLLECTIVE_SHM_SINGLE_COPY"] = self._single_copy
        try:
            return self._pools[size].run(function, *args, **options)
        finally:
            del os.environ["COLLECTIVE_SHM_SINGLE_COPY"]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def _ranks(single_copy: str) -> Iterator[Ranks]:
    ranks = Ranks(single_copy)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def shm() -> Iterator[Ranks]:
    """Ranks that read each other's memory: ``shm(size, function, …)``."""
    yield from _ranks("on")


@pytest.fixture(scope="module")
def messages() -> Iterator[Ranks]:
    """The same where the system forbids that, so that long contents go over messages."""
    yield from _ranks("off")

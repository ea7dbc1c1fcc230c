"""Pools of processes for the tests of ``shm`` and ``gloo``, kept for a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from collective.testing import RankPool

__all__ = ["Run", "gloo", "shm"]

Run = Callable[..., Any]


def _pools(transport: str, timeout: float) -> Iterator[Run]:
    pools: dict[int, RankPool] = {}

    def run(size: int, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if size not in pools:
            pools[size] = RankPool(size, transport, timeout=timeout)
        return pools[size].run(function, *args, **options)

    yield run
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="module")
def shm() -> Iterator[Run]:
    """Run a function on ranks that are kept for the next test: ``shm(size, function, …)``."""
    yield from _pools("shm", 20.0)


@pytest.fixture(scope="module")
def gloo() -> Iterator[Run]:
    """The same over Gloo."""
    yield from _pools("gloo", 40.0)

"""Pools of processes over Gloo for the tests of ``gloo``, kept for a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from collective.testing import RankPool

__all__ = ["Run", "gloo"]

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def gloo() -> Iterator[Run]:
    """Run a function on ranks that are kept for the next test: ``gloo(size, function, …)``."""
    pools: dict[int, RankPool] = {}

    def run(size: int, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if size not in pools:
            pools[size] = RankPool(size, "gloo", timeout=40.0)
        return pools[size].run(function, *args, **options)

    yield run
    for pool in pools.values():
        pool.close()

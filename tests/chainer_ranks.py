"""Pools of ranks for the tests of Chainer's adapters, kept until all tests are over.

A process takes long to import Chainer, so the modules share those that have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from collective.testing import RankPool

__all__ = ["Run", "ranks"]

Run = Callable[..., Any]

_pools: dict[tuple[str, int], RankPool] = {}


def _run(world: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    backend, _, size = world.partition("-")
    key = backend, int(size)
    if key not in _pools:
        _pools[key] = RankPool(key[1], backend, timeout=60.0)
    return _pools[key].run(function, *args, **options)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Run]:
    """Run a function on ranks: ``ranks("shm-2", function, …)``."""
    yield _run
    while _pools:
        _pools.popitem()[1].close()

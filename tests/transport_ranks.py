"""Pools of processes for the tests of ``shm`` and ``gloo``, and where a process listens."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from collective.testing import RankPool

__all__ = ["Run", "gloo", "listening", "shm"]

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
    """Run a function on ranks that the module's next test has, too: ``shm(size, function, …)``."""
    yield from _pools("shm", 20.0)


@pytest.fixture(scope="module")
def gloo() -> Iterator[Run]:
    """The same over Gloo."""
    yield from _pools("gloo", 40.0)


def listening() -> set[str]:
    """Return where this process listens to TCP, as /proc has addresses and ports."""
    mine = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            mine.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    tables = (Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine}

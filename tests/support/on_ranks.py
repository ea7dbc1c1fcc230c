"""Tests that are what every rank of a pool runs, and the pools."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from collective.testing import RankPool

__all__ = ["on_ranks", "ranks_of"]


def ranks_of(*worlds: tuple[str, int], timeout: float = 60.0) -> Any:
    """Return a fixture for a module: ranks of each of some transports, by name and size."""

    @pytest.fixture(scope="module", params=worlds, ids=lambda world: f"{world[0]}-{world[1]}")
    def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
        transport, size = request.param
        with RankPool(size, transport, timeout=timeout) as made:
            yield made

    return pool


def on_ranks(pool: str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of a function that takes a communicator, and what it is parametrized with.

    As ``program`` the test has the function itself, for other ranks than these.

    Args:
        pool: the fixture whose ranks run it.
        options: of :meth:`RankPool.run`.
    """

    def make(program: Callable[..., Any]) -> Callable[..., None]:
        _, *parameters = inspect.signature(program).parameters.values()

        @functools.wraps(program)
        def test(**given: Any) -> None:
            given[pool].run(program, *(given[each.name] for each in parameters), **options)

        untyped: Any = test
        fixture = inspect.Parameter(pool, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        untyped.__signature__ = inspect.Signature([fixture, *parameters])
        untyped.program = program
        program.__qualname__ += ".program"  # by which ranks that are processes find it
        return test

    return make

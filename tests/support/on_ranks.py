"""Tests whose body runs on every rank of a pool, and fixtures for the pools.

Make the fixture with :func:`ranks_of`, and decorate the tests with :func:`on_ranks`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from collective.testing import RankPool

__all__ = ["on_ranks", "ranks_of"]


def ranks_of(*worlds: Any, timeout: float = 60.0) -> Any:
    """Return a module's fixture: a pool of ranks for each world, a transport's name and a size.

    A world may be a ``pytest.param``, too.
    """

    @pytest.fixture(scope="module", params=worlds, ids=lambda world: f"{world[0]}-{world[1]}")
    def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
        transport, size = request.param
        with RankPool(size, transport, timeout=timeout) as ranks:
            yield ranks

    return pool


def on_ranks(pool: str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Return a decorator that makes a test of a function of a communicator and parameters.

    The test has the function itself as its attribute ``program``, for use on other ranks.

    Args:
        pool: name of the fixture whose ranks run the function.
        options: options of :meth:`RankPool.run`.
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
        program.__qualname__ += ".program"  # Ranks in processes find the function by this name.
        return test

    return make

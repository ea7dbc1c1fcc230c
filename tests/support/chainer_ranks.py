"""Ranks for the tests of Chainer's adapters and of ChainerMN, kept until the end of all tests.

Decorate tests with :func:`on`, or call :func:`run`. The import of Chainer takes long, so all
modules share the ranks.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from collective.testing import RankPool
from tests.support.mpi_launches import launch_of, needs
from tests.support.on_ranks import on_ranks

__all__ = ["EVERYWHERE", "FEW", "QUIETLY", "as_chainermn", "on", "run"]

#: Worlds for :func:`on`, by transport and number of ranks.
EVERYWHERE = "shm-2", "shm-4", "gloo-2", "threads-2", "mpi-2"
FEW = "shm-4", "threads-2"
# With thread ranks the warnings reach the tests: ChainerMN warns that it is experimental.
QUIETLY = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

_pools: dict[str, RankPool] = {}


@atexit.register
def _close() -> None:
    for pool in _pools.values():
        pool.close()


def run(world: str, program: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """Run ``program(comm, …)`` on the ranks of a world, such as ``"shm-2"``; return the results."""
    if world not in _pools:
        backend, _, size = world.partition("-")
        launch = {"mpiexec": launch_of("mpich")} if backend == "mpi" else {}
        _pools[world] = RankPool(int(size), backend, timeout=60.0, **launch)
    return _pools[world].run(program, *args, **options)


class _Ranks(NamedTuple):
    """Ranks of a world, in place of the pool of :func:`~tests.support.on_ranks.on_ranks`."""

    world: str
    chainermn: bool

    def run(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        if not self.chainermn:
            return run(self.world, program, *args)
        return run(self.world, as_chainermn, program, *args, shared=True, call_timeout=15.0)


def on(*worlds: str, chainermn: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that makes a test of a function, on the ranks of each of these worlds.

    Args:
        worlds: transport and number of ranks, such as ``"shm-2"``.
        chainermn: if true, the function gets a ChainerMN communicator over this library.
    """
    # Over other transports than threads and shared memory a test repeats facts.
    marks = {"gloo": [pytest.mark.whole], "mpi": [pytest.mark.whole, needs("mpich")]}
    ranks = [
        pytest.param(_Ranks(each, chainermn), id=each, marks=marks.get(each.partition("-")[0], ()))
        for each in worlds
    ]
    return lambda program: pytest.mark.parametrize("world", ranks)(on_ranks("world")(program))


def as_chainermn(comm: Any, program: Callable[..., Any], *args: Any) -> Any:
    """Run a program with a ChainerMN communicator over ``comm``."""
    from collective.adapters.chainer.chainermn import create_communicator

    return program(create_communicator(comm), *args)
